"""One TCP connection of a consumer on the event loop: the I/O between a socket, `Incoming` and `Outgoing`."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable

from penstock_proto import ProtocolError
from penstock_proto.transport import zmtp
from penstock_proto.transport.codec import MAX_CHUNK

from .incoming import READY, Event, Incoming, Place
from .network_peer import BUSY, MESSAGES, PATIENCE, UNREAD, NetworkPeer
from .outgoing import Outgoing

PING_EVERY = 5
"""Seconds between two heartbeats that a peer must answer."""

_PIECE = 1 << 20
"""Bytes to send to a peer in one step of the loop."""

_read = memoryview(bytearray(64 * 1024))
"""The buffer for received bytes. They are copied out before anything else happens, so all peers share it."""


class TcpPeer(NetworkPeer):
    """A connection without encryption.

    Args:
        ours: the socket type at this end.
        theirs: the socket type that the peer must have. The others are as for `NetworkPeer`.
    """

    PIECE = MAX_CHUNK
    _outgoing: Outgoing

    def __init__(
        self,
        connection: socket.socket,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
        *,
        ours: bytes = b"ROUTER",
        theirs: bytes = b"DEALER",
    ) -> None:
        super().__init__(connection, Outgoing(), on_ready, on_message, on_end)
        self._fd = connection.fileno()
        self._incoming = Incoming(theirs)
        self._reading = True
        self._writing = False
        self._more = False  # more to handle or to receive
        self._age = 0  # seconds
        self._loop.add_reader(self._fd, self._readable)
        self._outgoing.put_first(zmtp.GREETING + zmtp.ready(ours))
        self._soon()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._outgoing)

    def receive_into(self, place: Place) -> None:
        """Take messages of two frames, as `NetworkPeer` says."""
        self._incoming.place = place

    def tick(self) -> None:
        """Count a second, and send a heartbeat from time to time."""
        super().tick()
        self._age += 1
        if self._open and self._ready and not (self._dropped or self._broken) and self._age % PING_EVERY == 0:
            self._outgoing.put_first(zmtp.PING)
            self._soon()

    def finish(self) -> tuple[int, int] | None:
        """Send some of what waits, as `NetworkPeer` says."""
        try:
            if self._outgoing:
                self._send_some()
                return self._fd, select.POLLOUT
            if not self._finishing:
                self._finishing = True
                self._tcp.shutdown(socket.SHUT_WR)
            elif not self._tcp.recv_into(_read):
                return None
        except BlockingIOError:
            pass
        except OSError:
            return None
        return self._fd, select.POLLIN

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)

    def _release(self) -> None:
        self._unwatch()
        self._tcp.close()

    def _go_on(self) -> None:
        self._goes_on = False
        if self._open and self._more and not self._dropped:
            self._read()
        if self._outgoing and not (self._writing or self._dropped):
            self._write()

    def _readable(self) -> None:
        if not self._open:
            return
        self._more = True
        if not self._goes_on:
            self._read()

    def _read(self) -> None:
        """Handle what the peer sent, within the bounds of one step of the loop. Read until nothing more has come,
        because the loop may report the end of a connection only once."""
        until = time.monotonic() + BUSY
        for _ in range(MESSAGES):
            if self._outgoing.answers > UNREAD:
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
        """Receive the bytes that have arrived. Return False if there are none, or if the connection has ended."""
        target = self._incoming.target
        try:
            count = self._tcp.recv_into(target or _read)
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
        if target:
            self._incoming.took(count)
        else:
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
            self._shaken()

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
        if not self._reading:
            if sent:  # the peer reads its answers, so it is alive
                self._silence = 0
            if self._outgoing.answers <= UNREAD // 2:
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
            count = self._tcp.sendmsg(self._outgoing.buffers(_PIECE))
        except BlockingIOError:
            return 0
        self._outgoing.sent(count)
        return count
