"""The base class of connections to hosts from which slabs are fetched, over the network or on this machine."""

from __future__ import annotations

import collections
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from penstock_proto.messages import Fetch, HostAt, Message, NotKept
from penstock_proto.transport.codec import encode

from ..arriving import Arriving

MAX_IDLE = 4096
"""Most messages in a row that bring no slab, without a wait for more."""


class HostConnection(ABC):
    """A connection to a host from which slabs are fetched. One thread at a time may use it.

    Attributes:
        where: the host.
        asked: the slabs that were asked for and have not come, by number.
        heard: when some of a slab last came, or, if later, when the client began to wait for slabs (monotonic seconds).
        missed: how often the host did not keep a slab that it was asked for.
        known: whether the host has sent a slab.
    """

    def __init__(self, where: HostAt) -> None:
        self.where = where
        self.asked: dict[int, Arriving] = {}
        self.heard = 0.0
        self.missed = 0
        self.known = False
        self._unsent: collections.deque[bytes] = collections.deque()

    def ask(self, arriving: Arriving) -> None:
        """Ask the host for a slab."""
        slab = arriving.received.slab
        assert slab.kept is not None
        if not self.asked:
            self.heard = time.monotonic()
        self.asked[slab.seq] = arriving
        self._say(Fetch(slab.seq, slab.kept.ticket, slab.kept.secret, slab.first, slab.batches, slab.stride))

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room to be sent."""
        return bool(self._unsent)

    @property
    def pending(self) -> bool:
        """Whether something has come that no descriptor reports."""
        return False

    @abstractmethod
    def prepare(self) -> Sequence[int]:
        """Send waiting messages, as far as there is room, and return the descriptors to wait for."""

    @abstractmethod
    def read(self) -> Iterator[NotKept | Arriving]:
        """Receive. Yield each slab that is now whole, and each NotKept.

        Raises:
            OSError: the connection broke.
            ConnectionLost: the host has ended the connection.
            ProtocolError: the host sent something that it must not send, or messages without end.
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
