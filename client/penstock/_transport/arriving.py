"""Slabs that are on their way to this process.

A slab arrives in chunks, which are written into its aligned memory. Or a host on this machine lends the memory in which
it lies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock_proto import ProtocolError
from penstock_proto.messages import Chunk
from penstock_proto.transport.codec import MAX_CHUNK
from penstock_proto.transport.zmtp_dealer import Dealer

from .._state.consumer_state import Received
from .._state.memory import Root

if TYPE_CHECKING:
    from penstock_proto.transport.libzmq import LibzmqDealer


class Arriving:
    """A slab that has partly arrived: its slot in our memory, and the region of the slot that is being filled."""

    __slots__ = ("_regions", "_start", "at", "is_whole", "received", "slot", "stop")

    def __init__(self, received: Received) -> None:
        self.received = received
        self.slot = np.asarray(received.root).data
        self.restart()

    def restart(self) -> None:
        """Start again from the first byte, because the bytes now come from elsewhere."""
        slab = self.received.slab
        self._regions = iter(self.received.layout.regions(slab.first, slab.batches, slab.stride))
        self.at, self.stop = next(self._regions)
        self._start = self.at
        self.is_whole = False

    def lies_at(self, root: Root) -> None:
        """Mark the slab as whole. It lies in the memory of `root`."""
        self.received.root = root
        self.slot = memoryview(b"")
        self.is_whole = True

    def copy_from(self, root: Root) -> None:
        """Copy the slab from the memory of `root`, and mark it as whole."""
        slab = self.received.slab
        source, target = np.asarray(root), np.asarray(self.received.root)
        for start, stop in self.received.layout.regions(slab.first, slab.batches, slab.stride):
            np.copyto(target[start:stop], source[start:stop])
        self.received.copied = self.is_whole = True

    @property
    def at_start(self) -> bool:
        """Whether none of it has arrived."""
        return self.at == self._start

    def whole(self) -> bool:
        """Return whether all of the slab has arrived. Move on to the next region if this one is full."""
        if self.at < self.stop:
            return False
        self.at, self.stop = next(self._regions, (self.at, self.stop))
        self.is_whole = self.at == self.stop
        return self.is_whole


class Landing:
    """Receives the chunks of one connection: one chunk at a time, perhaps in several steps."""

    def __init__(self) -> None:
        self._chunk: Chunk | None = None
        self._slab: Arriving | None = None

    def begin(self, chunk: Chunk, slab: Arriving, more: bool) -> None:
        """Prepare to receive the bytes of `chunk`, which belong to `slab`.

        Raises:
            ProtocolError: another piece of the slab was due, or no bytes follow.
        """
        if chunk.start != slab.at or not more:
            raise ProtocolError(f"{chunk} came, but slab {chunk.seq} from byte {slab.at} was due")
        self._chunk, self._slab = chunk, slab

    def go_on(self, dealer: Dealer | LibzmqDealer) -> Arriving | None:
        """Receive the bytes of the chunk that have come. Return the slab if it is now whole.

        Raises:
            OSError: the connection broke.
            ProtocolError: the chunk is too large.
        """
        chunk, slab = self._chunk, self._slab
        assert chunk is not None
        assert slab is not None
        if not dealer.left:
            frame = dealer.begin()
            if frame is None:
                return None
            nbytes, more = frame
            room = min(MAX_CHUNK, slab.stop - slab.at)
            if more or not 0 < nbytes <= room:
                raise ProtocolError(f"{chunk} has {nbytes} bytes, but its slab has room for {room}")
        while dealer.left:
            count = dealer.read_into(slab.slot[slab.at : slab.stop])
            if not count:
                return None
            slab.at += count
        self._chunk = self._slab = None
        return slab if slab.whole() else None

    def __bool__(self) -> bool:
        """Whether bytes of a chunk are still missing."""
        return self._chunk is not None
