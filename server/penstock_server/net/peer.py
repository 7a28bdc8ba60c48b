"""A SOCK_SEQPACKET connection on the event loop: sends messages and fds in order, receives, and notices end of file."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable

from penstock_proto import ProtocolError
from penstock_proto.transport import seqpacket

_AT_ONCE = 16
"""Datagrams to read from one connection before serving the others."""

_BESIDE = 256
"""Bytes that a waiting message takes in addition to its own."""


class Peer:
    """One connection.

    Args:
        connection: a connected SOCK_SEQPACKET socket; this object owns it.
        on_data: called with the bytes of each datagram and the fd that came with it.
        on_end: called once when the other side is gone, broke the framing, or cannot be sent a message.
        most_unread: maximum bytes that may wait for the other side to read them; None: no limit.

    Attributes:
        cut: whether this side ended the connection, so that the other side may still live.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_data: Callable[[bytes, int | None], None],
        on_end: Callable[[], None],
        most_unread: int | None = None,
    ) -> None:
        self._connection = connection
        self._on_data = on_data
        self._on_end = on_end
        self._outbox: deque[tuple[bytes, int | None]] = deque()
        self.cut = False
        self._unread = 0
        self._most_unread = most_unread
        self._loop = asyncio.get_running_loop()
        self._open = True
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._open

    @property
    def unread(self) -> bool:
        """Whether the other side has not read everything that was sent to it."""
        if not self._open:
            return False
        (nbytes,) = struct.unpack("i", fcntl.ioctl(self._connection, termios.TIOCOUTQ, bytes(4)))
        return bool(self._outbox) or nbytes > 0

    @property
    def unsent(self) -> bool:
        """Whether messages wait here, because the other side has no room for them yet."""
        return bool(self._outbox)

    def send(self, data: bytes, fd: int | None = None) -> None:
        """Send, now or when the other side has room. The caller may close the fd at once."""
        if not self._open:
            return
        if not self._outbox and self._try(data, fd):
            return
        if not self._open:
            return
        try:
            kept = None if fd is None else os.dup(fd)
        except OSError:  # no descriptor is left, and without this message the following ones mean nothing
            self._cut()
            return
        if not self._outbox:
            self._loop.add_writer(self._connection.fileno(), self._writable)
        self._outbox.append((data, kept))
        self._unread += len(data) + _BESIDE
        if self._most_unread is not None and self._unread > self._most_unread:
            self._cut()

    def unsay(self) -> None:
        """Drop the messages that wait to be sent."""
        if self._outbox:
            self._loop.remove_writer(self._connection.fileno())
        for _, fd in self._outbox:
            if fd is not None:
                os.close(fd)
        self._outbox.clear()

    def drain(self) -> None:
        """Read everything that has arrived: the last messages of a peer that has ended."""
        self._readable(1 << 16)

    def close(self) -> None:
        """Close the connection; `on_end` is not called."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()
            for _, fd in self._outbox:
                if fd is not None:
                    os.close(fd)
            self._outbox.clear()
            self._unread = 0

    def _try(self, data: bytes, fd: int | None) -> bool:
        try:
            seqpacket.send(self._connection, data, fd)
        except BlockingIOError:
            return False
        except ConnectionError:
            pass  # its last messages may still be unread, and then the end of file
        except OSError:  # no memory, or it is too large: without it the following ones mean nothing
            self._cut()
        return True

    def _writable(self) -> None:
        while self._outbox:
            data, fd = self._outbox[0]
            if not self._try(data, fd):
                return
            if not self._open:
                return
            self._outbox.popleft()
            self._unread -= len(data) + _BESIDE
            if fd is not None:
                os.close(fd)
        self._loop.remove_writer(self._connection.fileno())

    def _readable(self, most: int = _AT_ONCE) -> None:
        for _ in range(most):
            if not self._open:
                return
            try:
                data, fd = seqpacket.receive(self._connection)
            except BlockingIOError:
                return
            except ProtocolError:
                self._cut()
                return
            except ConnectionResetError:  # it closed with messages unread; its own last ones come after this error
                self.drain()
                return
            except OSError:
                data, fd = b"", None
            if not data:
                self._end()
                return
            self._on_data(data, fd)

    def _cut(self) -> None:
        self.cut = True
        self._end()

    def _end(self) -> None:
        if self._open:
            self.close()
            self._loop.call_soon(self._on_end)  # not within a send, whose caller is in the middle of something
