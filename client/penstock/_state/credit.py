"""Checks that the daemon sends no more slabs than it was given credit for. So a slab's memory is allocated only if the
credit covers it, whatever the daemon sends."""

from __future__ import annotations

import collections

from penstock_proto import ProtocolError
from penstock_proto.messages import Opened, Slab


class Credit:
    """The slabs under way over one connection: those that came, and that the daemon was not told are handed over.

    The daemon may count more slabs as under way than this object, never fewer. So a slab that is refused here was sent
    without credit.
    """

    def __init__(self, slabs: int, nbytes: int) -> None:
        """Give credit for `slabs` slabs of `nbytes` bytes together, but always for one slab of any size."""
        self._slabs = slabs
        self._most = nbytes
        self._nbytes = 0
        self._under_way: collections.deque[int] = collections.deque()
        self._came = 0
        self._handed = 0

    @classmethod
    def granted(cls, opened: Opened, slabs: int, nbytes: int, *, shares: bool) -> Credit:
        """Return the credit of a stream that was opened with `slabs` and `nbytes`.

        If others read the stream too, the daemon grants what the first of them asked for, which may be more slabs.
        """
        return cls(opened.credit if shares else min(opened.credit, slabs), nbytes)

    def tell(self, handed: int) -> None:
        """Note that the daemon is about to learn that the first `handed` slabs were handed over. Safe on any thread."""
        self._handed = handed

    def on_slab(self, slab: Slab) -> None:
        """Note that a slab begins to arrive. Its memory is allocated after this.

        Raises:
            ProtocolError: another slab was due, or it exceeds the credit.
        """
        if slab.seq != self._came:
            raise ProtocolError(f"the daemon sent slab {slab.seq}, but slab {self._came} was due")
        while self._came - len(self._under_way) < self._handed and self._under_way:
            self._nbytes -= self._under_way.popleft()
        count = len(self._under_way)
        if count and (count >= self._slabs or self._nbytes + slab.nbytes > self._most):
            raise ProtocolError(
                f"the daemon sent slab {slab.seq} of {slab.nbytes} bytes without credit: {count} slabs of "
                f"{self._nbytes} bytes are under way, and the credit is {self._slabs} slabs and {self._most} bytes"
            )
        self._came += 1
        self._nbytes += slab.nbytes
        self._under_way.append(slab.nbytes)
