"""One TCP connection of a consumer on the event loop: bounded in time, memory, and work in one step of the loop.

The I/O between a socket, `Incoming` and `Outgoing`. The daemon stops reading from a peer that does not read its
answers, and closes one that exceeds a bound or is silent.
"""

from __future__ import annotations

import asyncio
import math
import select
import socket
import time
from collections.abc import Callable

from penstock_proto import ProtocolError, zmtp
from penstock_proto.codec import MAX_CHUNK

from ..keys import ClientKey
from .incoming import READY, Event, Incoming
from .outgoing import Outgoing

HANDSHAKE = 10
"""Seconds that a handshake may take."""
PING_EVERY = 5
"""Seconds between two heartbeats that a peer must answer."""
PATIENCE = 30
"""Seconds of silence after which the connection is closed."""

_EVENTS, _BUSY = 16, 0.001
"""Messages of a peer that are handled in one step of the loop, and seconds, before the other peers."""
_PIECE = 1 << 20
"""Bytes that are sent to a peer in one step of the loop."""
_UNREAD = 256 * 1024
"""Bytes of answers that a peer may leave unread before the daemon stops reading from it."""
_QUEUED = 64 << 20
"""Bytes of messages, without the bytes of slabs, that may wait for a peer. Credit keeps honest clients far below."""
_LAST_WORDS = 2
"""Seconds that a dropped peer has to read what waits for it."""

_read = memoryview(bytearray(64 * 1024))
"""Where bytes arrive. They are copied on before anything else happens, so all peers share it."""


class TcpPeer:
    """A connection without encryption.

    Args:
        connection: a non-blocking socket, which the peer owns from now on.
        on_ready: called once, when the handshake is over.
        on_message: called with each message of one frame, and with b"" for any other.
        on_end: called once, from the loop, when the connection has ended; with the reason if the peer broke the rules.
    """

    PIECE = MAX_CHUNK
    """Bytes of a slab that are sent at once."""
    key: ClientKey | None = None
    """Nobody proves who they are."""

    def __init__(
        self,
        connection: socket.socket,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._socket = connection
        self._fd = connection.fileno()
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._incoming = Incoming()
        self._outgoing = Outgoing()
        self._open = True
        self._ready = False
        self._reading = True
        self._writing = False
        self._more = False  # to be handled or received
        self._goes_on = False  # with that, or with sending, in the loop's next step
        self._broken = False  # nothing can be sent; its last messages may still be unread
        self._dropped = 0  # seconds left to send what waits
        self._finishing = False
        self._age = self._silence = 0  # seconds
        self._patience = PATIENCE
        self._loop.add_reader(self._fd, self._readable)
        self._outgoing.put(zmtp.GREETING + zmtp.ready(b"ROUTER"))
        self._soon()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._outgoing)

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._open

    def send(self, message: bytes, body: memoryview | None = None, *, answer: bool = False) -> bool:
        """Queue a message. Return False if the peer is gone.

        Args:
            message: its first frame.
            body: its second, if it has two. It must not change before it is sent or the peer is gone.
            answer: whether the peer asked for it. The daemon stops reading from a peer that leaves too much of this
                unread.
        """
        if not self._open or self._broken or self._dropped:
            return False
        frames = zmtp.head_of(len(message), more=body is not None) + message
        self._outgoing.put(frames if body is None else frames + zmtp.head_of(len(body)), body, answer=answer)
        if self._outgoing.cost > _QUEUED:
            self.close("it reads nothing, and too much waits for it")
            return False
        self._soon()
        return True

    def tick(self) -> None:
        """Count a second. Seconds in which the loop stood still do not count: a peer may have sent something then."""
        self._age += 1
        self._silence += 1
        if self._dropped:
            self._dropped -= 1
            if not self._dropped:
                self.close()
        elif self._silence > (self._patience if self._ready else HANDSHAKE):
            self.close()
        elif self._ready and not self._broken and self._age % PING_EVERY == 0:
            self._outgoing.put_first(zmtp.PING)
            self._soon()

    def close(self, why: str = "") -> None:
        """Close the connection. `on_end` is called in the loop's next step."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            self._socket.close()
            self._outgoing.clear()
            self._loop.call_soon(self._on_end, why)

    def drop(self) -> None:
        """Stop reading, and close the connection when what waits has been sent, or after 2 seconds."""
        if self._open and not self._dropped:
            self._dropped = _LAST_WORDS
            self._more = False
            self._read_on(False)
            if not self._outgoing:
                self.close()

    def finish(self) -> tuple[int, int] | None:
        """Send some of what waits. When all is sent, shut down that direction, and read until the peer closes its end.
        (If the connection were closed with unread bytes, it would be reset, and the peer would lose what it has not
        read.)

        Returns:
            What to wait for before it is called again, a descriptor and the events of poll(2); None when all is done.
        """
        try:
            if self._outgoing:
                self._send_some()
                return self._fd, select.POLLOUT
            if not self._finishing:
                self._finishing = True
                self._socket.shutdown(socket.SHUT_WR)
            elif not self._socket.recv_into(_read):
                return None
        except BlockingIOError:
            pass
        except OSError:
            return None
        return self._fd, select.POLLIN

    def _soon(self) -> None:
        """Continue in the loop's next step, so that all messages of this one are sent with one system call."""
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        if self._open and self._more:
            self._read()
        if self._outgoing and not self._writing:
            self._write()

    def _readable(self) -> None:
        if not self._open or self._dropped:
            return
        self._more = True
        if not self._goes_on:
            self._read()

    def _read(self) -> None:
        """Handle what the peer sent, within the bounds of one step. Read until nothing more has come, because the loop
        may report the end of a connection only once."""
        until = time.monotonic() + _BUSY
        for _ in range(_EVENTS):
            if self._outgoing.answers > _UNREAD:
                self._read_on(False)  # until the peer reads them
                return
            try:
                event = self._incoming.next()
            except ProtocolError as error:
                self.close(error.message)
                return
            if event is not None:
                self._handle(event)
            elif not self._receive():
                return
            if not self._open or self._dropped:
                return
            if time.monotonic() > until:
                break
        self._soon()

    def _receive(self) -> bool:
        """Receive what has come. Return False if that is nothing, or the end of the connection."""
        try:
            count = self._socket.recv_into(_read)
        except BlockingIOError:
            self._more = False
            self._read_on(True)
            return False
        except OSError:
            count = 0
        if not count:
            self.close()
            return False
        if self._ready:
            self._silence = 0
        self._incoming.feed(_read[:count])
        return True

    def _handle(self, event: Event) -> None:
        if isinstance(event, bytes):
            self._on_message(event)
        elif isinstance(event, zmtp.Ping):
            if event.patience:
                self._patience = min(PATIENCE, math.ceil(event.patience))
            if not self._broken:
                self._outgoing.put_first(event.pong, answer=True)
                self._soon()
        elif event is READY:
            self._ready, self._silence = True, 0
            self._on_ready()

    def _read_on(self, reading: bool) -> None:
        if reading != self._reading:
            self._reading = reading
            if reading:
                self._loop.add_reader(self._fd, self._readable)
            else:
                self._loop.remove_reader(self._fd)

    def _write(self) -> None:
        if not self._open:
            return
        try:
            sent = self._send_some()
        except OSError:
            self._broken = True
            self._outgoing.clear()
            sent = 0
        if self._dropped and not self._outgoing:
            self.close()
            return
        if not self._reading:
            if sent:  # it reads its answers: a sign of life
                self._silence = 0
            if self._outgoing.answers <= _UNREAD // 2:
                self._soon()
        if bool(self._outgoing) != self._writing:
            self._writing = not self._writing
            if self._writing:
                self._loop.add_writer(self._fd, self._write)
            else:
                self._loop.remove_writer(self._fd)

    def _send_some(self) -> int:
        """Send as much as one system call takes. Return the number of bytes, 0 if there is no room.

        Raises:
            OSError: the connection broke.
        """
        try:
            count = self._socket.sendmsg(self._outgoing.buffers(_PIECE))
        except BlockingIOError:
            return 0
        self._outgoing.sent(count)
        return count
