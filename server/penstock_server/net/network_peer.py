"""The common part of all consumers' TCP connections: how they queue messages, how they end, and their bounds.

A connection is bounded in time, memory, and work in one step of the loop. The daemon stops reading from a peer that
does not read its answers, and closes one that exceeds a bound or is silent.
"""

from __future__ import annotations

import asyncio
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from .addresses import is_loopback
from .incoming import Place
from .keys import ClientKey
from .outgoing import Outgoing, OutgoingMessages

HANDSHAKE = 10
"""Seconds that a handshake may take."""
PATIENCE = 30
"""Seconds of silence after which the connection is closed."""
MESSAGES, BUSY = 16, 0.001
"""Bounds of one step of the loop for one peer: messages, and seconds. Then the loop serves the other peers."""
UNREAD = 256 * 1024
"""Bytes of answers that a peer may leave unread before the daemon stops reading from it."""
QUEUED = 64 << 20
"""Bytes of messages, without the bytes of slabs, that may wait for a peer. Credit keeps honest clients far below
that."""
LAST_WORDS = 2
"""Seconds that a dropped peer has to read the messages that wait for it, and to close its end."""


class NetworkPeer(ABC):
    """A connection.

    Args:
        connection: a non-blocking socket, which the peer owns from now on.
        outgoing: the queue of messages to send.
        on_ready: called once, when the handshake is over.
        on_message: called with each message of one frame, and with b"" for any other.
        on_end: called once, from the loop, when the connection has ended; with the reason if the peer broke the rules.

    Attributes:
        PIECE: bytes of a slab that are sent at once.
        key: the client's key; None without encryption, and until it is admitted.
    """

    PIECE: int

    def __init__(
        self,
        connection: socket.socket,
        outgoing: Outgoing | OutgoingMessages,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.key: ClientKey | None = None
        self._tcp = connection
        self._outgoing = outgoing
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._ready = False  # the handshake is over
        self._broken = False  # nothing can be sent; its last messages may still be unread
        self._dropped = 0  # seconds left to send what waits, and until the peer closes its end
        self._awaits: tuple[int, int] | None = None  # what `finish` waits for in a dropped connection
        self._finishing = False  # all is sent, and that direction shut down
        self._silence = 0  # seconds
        self._patience = PATIENCE
        self._goes_on = False  # whether `_go_on` is due in the loop's next step

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._open

    @property
    @abstractmethod
    def unsent(self) -> bool:
        """Whether bytes wait until the connection takes them."""

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait until the connection takes them."""
        return self._outgoing.nbytes

    @property
    def address(self) -> str:
        """The address of the peer, HOST:PORT; "" if it is gone."""
        try:
            return "{}:{}".format(*self._tcp.getpeername()[:2])
        except OSError:
            return ""

    @property
    def own_address(self) -> str:
        """The address of this end, without its port; "" if the connection has ended."""
        try:
            return str(self._tcp.getsockname()[0])
        except OSError:
            return ""

    @property
    def machine(self) -> str:
        """The machine of the peer: its address without the port; "" if it is this machine."""
        host = self.address.rpartition(":")[0]
        return "" if is_loopback(host) or host == self.own_address else host

    @abstractmethod
    def receive_into(self, place: Place) -> None:
        """Accept messages of two frames from now on. `place` says where the second frame belongs."""

    def send(
        self,
        message: bytes,
        body: memoryview | None = None,
        *,
        answer: bool = False,
        done: Callable[[], None] | None = None,
    ) -> bool:
        """Queue a message. Return False if the peer is gone.

        Args:
            message: its first frame.
            body: its second, if it has two. It must not change before it is sent or the peer is gone.
            answer: whether the peer asked for it. The daemon stops reading from a peer that leaves too many answers
                unread.
            done: called when the message is sent, unless the peer is gone before.
        """
        if not self._open or self._broken or self._dropped:
            return False
        self._outgoing.put(message, body, answer=answer, done=done)
        if self._outgoing.cost > QUEUED:
            self.close("it reads nothing, and too much waits for it")
            return False
        self._soon()
        return True

    def tick(self) -> None:
        """Count a second. Seconds in which the loop was blocked do not count: the peer may have sent something then."""
        self._silence += 1
        if self._dropped:
            self._dropped -= 1
            if not self._dropped:
                self.close()
        elif self._silence > (self._patience if self._ready else HANDSHAKE):
            self.close()

    def close(self, why: str = "") -> None:
        """Close the connection. `on_end` is called in the loop's next step."""
        if self._open:
            self._open = False
            self._await(None)
            self._release()
            self._outgoing.clear()
            self._loop.call_soon(self._on_end, why)

    def drop(self) -> None:
        """Send all that waits, and close the connection when the peer has read it and closed its end, or after 2
        seconds. Nothing that the peer sends is handled any longer."""
        if self._open and not self._dropped:
            self._dropped = LAST_WORDS
            self._unwatch()
            self._finish()

    @abstractmethod
    def finish(self) -> tuple[int, int] | None:
        """Send some of what waits. When all is sent, shut down that direction, and read until the peer closes its end.
        (If the connection were closed with unread bytes, it would be reset, and the peer would lose what it has not
        read.)

        Returns:
            A descriptor and the poll(2) events to wait for before the next call; None when all is done.
        """

    def _finish(self) -> None:
        """Finish the dropped connection as far as it goes now."""
        waits = self.finish()
        if waits is None:
            self.close()
        else:
            self._await(waits)

    def _await(self, waits: tuple[int, int] | None) -> None:
        """Call `_finish` when this descriptor is ready, and no longer when another is. None: do not wait."""
        if self._awaits is not None:
            fd, events = self._awaits
            (self._loop.remove_writer if events & select.POLLOUT else self._loop.remove_reader)(fd)
        self._awaits = waits
        if waits is not None:
            fd, events = waits
            (self._loop.add_writer if events & select.POLLOUT else self._loop.add_reader)(fd, self._finish)

    def _soon(self) -> None:
        """Continue in the loop's next step, so that all messages of the current step are sent together."""
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _shaken(self) -> None:
        """Handle the end of the handshake."""
        self._ready, self._silence = True, 0
        self._on_ready()

    @abstractmethod
    def _go_on(self) -> None:
        """Send and receive, within the bounds of one step of the loop."""

    @abstractmethod
    def _unwatch(self) -> None:
        """Stop watching the connection's descriptors."""

    @abstractmethod
    def _release(self) -> None:
        """Release everything that the connection uses."""
