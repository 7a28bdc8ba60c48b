"""How the client of a session is reached: over ZeroMQ, or over a connection on this host.

The rest of the room asks a session's link, and does not ask which of the two it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock_proto.messages import Message

from ..net.local import LocalPeer
from ..net.network import Router
from ..shared_memory.arena import Memfd


class Link(Protocol):
    """The connection over which a session's client gets its messages and batches."""

    @property
    def transport(self) -> str:
        """The transport of the batches: `local` or `tcp`."""

    @property
    def maps_slots(self) -> bool:
        """Whether the client maps the slots, so that its batches lie in them. Then only the end of the connection,
        which the kernel always reports, ends the session and releases them."""

    @property
    def pid(self) -> int:
        """The client's process; 0 if that is not known."""

    @property
    def handed(self) -> int:
        """How many slabs the client has marked as handed over without a message."""

    @property
    def unsent(self) -> bool:
        """Whether bytes of slabs wait until the connection takes them."""

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait until the connection takes them."""

    @property
    def under_way(self) -> list[int]:
        """The sizes in bytes of the slabs that were sent and are not acknowledged; empty if no bytes are sent."""

    def send(self, message: Message) -> bool:
        """Send a message. Return whether that was possible.

        Raises:
            ProtocolError: the message is too large to encode.
        """

    def show(self, memfd: Memfd) -> int:
        """Make sure that the client can find the memfd if it maps slots. Return the memfd's number in the message about
        a slab in it, or 0 if the slab's bytes will be sent."""

    def send_bytes(self, seq: int, memfd: Memfd, regions: Sequence[tuple[int, int]]) -> None:
        """Send the bytes of slab `seq`: these regions of its memfd. (Only if the client does not map slots.)"""

    def on_acknowledged(self, handed: int) -> None:
        """Handle an Ack: the first `handed` slabs were handed over."""

    def drop(self) -> None:
        """Drop the bytes that still wait to be sent, because they would keep their slots in use."""


class TcpLink:
    """A link over ZeroMQ.

    Args:
        router: the connections over ZeroMQ.
        routing_id: names this one.
    """

    transport = "tcp"
    maps_slots = False
    pid = 0
    handed = 0

    def __init__(self, router: Router, routing_id: bytes) -> None:
        self._router = router
        self._routing_id = routing_id
        self._under_way: deque[tuple[int, Memfd, int]] = deque()
        """Slabs that were sent and are not acknowledged yet: number, memfd and bytes."""

    @property
    def unsent(self) -> bool:
        return self._router.unsent(self._routing_id)

    @property
    def unsent_bytes(self) -> int:
        return self._router.unsent_bytes(self._routing_id)

    @property
    def under_way(self) -> list[int]:
        return [nbytes for _, _, nbytes in self._under_way]

    def send(self, message: Message) -> bool:
        return self._router.send(self._routing_id, message)

    def show(self, memfd: Memfd) -> int:
        return 0

    def send_bytes(self, seq: int, memfd: Memfd, regions: Sequence[tuple[int, int]]) -> None:
        self._under_way.append((seq, memfd, sum(stop - start for start, stop in regions)))
        for start, stop in regions:
            self._router.send_bytes(self._routing_id, seq, start, memfd.view(start, stop))

    def on_acknowledged(self, handed: int) -> None:
        while self._under_way and self._under_way[0][0] < handed:
            self._under_way.popleft()

    def drop(self) -> None:
        for _, memfd, _ in self._under_way:
            memfd.retired = True
        if self._under_way:
            self._router.drop(self._routing_id)


class LocalLink:
    """A link over a connection on this host.

    Attributes:
        peer: the connection.
    """

    transport = "local"
    maps_slots = True
    unsent = False
    unsent_bytes = 0

    def __init__(self, peer: LocalPeer) -> None:
        self.peer = peer
        self.pid = peer.pid

    @property
    def handed(self) -> int:
        return self.peer.handed

    @property
    def under_way(self) -> list[int]:
        return []

    def send(self, message: Message) -> bool:
        return self.peer.send(message)

    def show(self, memfd: Memfd) -> int:
        return self.peer.show(memfd)

    def send_bytes(self, seq: int, memfd: Memfd, regions: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("a client on this host maps the slots")

    def on_acknowledged(self, handed: int) -> None:
        pass

    def drop(self) -> None:
        pass
