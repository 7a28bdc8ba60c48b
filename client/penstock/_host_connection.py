"""What connections to hosts have in common, whether over the network or on this machine: slabs are fetched there."""

from __future__ import annotations

import collections
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from penstock_proto.codec import encode
from penstock_proto.messages import Fetch, HostAt, Message, NotKept

from ._arriving import Arriving


class HostConnection(ABC):
    """See the file's head. One thread at a time may use it.

    Attributes:
        where: the host.
        asked: the slabs that were asked for and have not come, by number.
        heard: when it was last heard, in monotonic seconds, since there was something to ask for.
        missed: how often it did not keep what it was asked for.
        known: whether it has sent a slab.
    """

    def __init__(self, where: HostAt) -> None:
        self.where = where
        self.asked: dict[int, Arriving] = {}
        self.heard = 0.0
        self.missed = 0
        self.known = False
        self._unsent: collections.deque[bytes] = collections.deque()

    def ask(self, arriving: Arriving) -> None:
        """Ask for a slab."""
        slab = arriving.received.slab
        assert slab.kept is not None
        if not self.asked:
            self.heard = time.monotonic()
        self.asked[slab.seq] = arriving
        self._say(Fetch(slab.seq, slab.kept.ticket, slab.kept.secret, slab.first, slab.batches))

    @property
    def unsent(self) -> bool:
        """Whether something waits until there is room."""
        return bool(self._unsent)

    @property
    def pending(self) -> bool:
        """Whether something has come that no descriptor tells of."""
        return False

    @abstractmethod
    def prepare(self) -> Sequence[int]:
        """Send what waits, as far as there is room, and return the descriptors to wait for."""

    @abstractmethod
    def read(self) -> Iterator[NotKept | Arriving]:
        """Receive. Yield each slab that is whole now, and each NotKept.

        Raises:
            OSError: the connection broke.
            ConnectionLost: the host has ended it.
            ProtocolError: the host sent something that it must not send.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""

    @abstractmethod
    def _send(self, data: bytes) -> bool:
        """Send one message if there is room. Return whether it was sent."""

    def _say(self, message: Message) -> None:
        """Send a message now, or when there is room."""
        self._unsent.append(encode(message))
        self._flush()

    def _flush(self) -> None:
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
