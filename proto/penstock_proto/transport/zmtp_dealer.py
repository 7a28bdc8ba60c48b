"""The client's end of a ZeroMQ connection: a DEALER over a plain socket.

libzmq receives each message on a thread of its own into its own memory, from where it must be copied. Here the kernel
writes bytes where they stay, in as few calls as possible, which takes half the CPU for large batches.

The bytes of ZMTP are built and parsed in zmtp.py. This file knows no message of Penstock.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Collection

from ..errors import KeyRefused, ProtocolError
from . import zmtp as codec
from .addresses import Address, first_that_answers
from .zmtp import Silent

_STAGE = 16 * 1024
"""Most bytes to read ahead: small frames, and bytes after a frame whose body goes elsewhere. A whole command fits."""
_AT_ONCE = 1 << 20
"""Most bytes that a poll waits for."""
_STEP = 0.1
"""Seconds between two calls of `watch` during a wait."""
MAX_COMMANDS = 1024
"""Most ZeroMQ commands in a row without a wait for more bytes. A daemon sends one every 5 s."""


class Dealer:
    """An open connection: receives frames, and sends messages of one frame. Not thread-safe.

    Attributes:
        left: bytes of the current frame that are still to be read.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a socket that is connected and does not block, and shake hands over it with `greet`."""
        self._socket = connection
        self._poll = select.poll()
        self._stage = memoryview(bytearray(_STAGE))
        self._start = self._end = 0  # of the bytes in the stage
        self._unsent = b""
        self._wakes_at = 1
        self.left = 0

    def greet(self, deadline: float, watch: Callable[[], None]) -> None:
        """Shake hands until `deadline`. While nothing comes, call `watch`, which may raise to give up.

        Raises:
            Silent: nothing came.
            OSError: the connection broke.
            KeyRefused: the peer wants encryption.
            ProtocolError: the peer does not speak ZeroMQ, or refuses the connection.
        """
        self._unsent = codec.GREETING + codec.ready(b"DEALER")
        greeting = self._waited_for(len(codec.GREETING), deadline, watch)
        if codec.mechanism(greeting) == codec.CURVE:
            raise KeyRefused("it wants encryption")
        codec.check_greeting(greeting)
        while (head := codec.head(self._stage[self._start : self._end])) is None:
            self._wait_for_bytes(deadline, watch)
        if not head.command:
            raise ProtocolError("it sends a message where ZeroMQ's READY belongs")
        self._start += head.nbytes
        codec.parse_ready(self._waited_for(head.size, deadline, watch))

    @property
    def socket(self) -> socket.socket:
        """The socket of the connection."""
        return self._socket

    pending = False
    """Nothing comes without making the descriptor readable."""

    @property
    def descriptors(self) -> tuple[int]:
        """The descriptor to poll on: readable, and writable if `unsent`."""
        return (self._socket.fileno(),)

    def wake_at(self, count: int) -> None:
        """Make polls report the descriptor as readable when `count` bytes have come (at most 1 MiB, and what the kernel
        has room for). For large frames that saves two thirds of the wake-ups."""
        count = max(1, min(count, _AT_ONCE))
        if count != self._wakes_at:
            self._wakes_at = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the kernel has room."""
        return bool(self._unsent)

    def send(self, data: bytes) -> bool:
        """Send a message, if there is room. Return whether it was sent, or will be by a later `flush`."""
        self.flush()
        if self._unsent:
            return False
        self._unsent = codec.head_of(len(data)) + data
        self.flush()
        return True

    def flush(self) -> None:
        """Send unsent bytes, as far as there is room. (If the connection is broken, reading raises.)"""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self._unsent = b""

    def begin(self) -> tuple[int, bool] | None:
        """Begin the next frame of a message. The one before must have been read to its end.

        Returns:
            Its size, and whether the message has another frame; None if its head has not come.

        Raises:
            OSError: the connection broke.
            ProtocolError: the peer sent something other than a frame, or commands without end.
        """
        for _ in range(MAX_COMMANDS):
            head = codec.head(self._stage[self._start : self._end])
            if head is not None and not head.command:
                self._start += head.nbytes
                self.left = head.size
                return head.size, head.more
            if head is not None and self._end - self._start >= head.nbytes + head.size:
                body = self._start + head.nbytes
                self._start = body + head.size
                self._obey(bytes(self._stage[body : self._start]))
            elif not self._read_ahead():
                return None
        raise ProtocolError(f"it sent {MAX_COMMANDS} ZeroMQ commands in a row")

    def read_into(self, target: memoryview) -> int:
        """Read bytes of the current frame into `target`, as many as have come and fit. Return their number.

        Raises:
            OSError: the connection broke.
        """
        target = target[: self.left]
        count = min(self._end - self._start, len(target))
        if count:
            target[:count] = self._stage[self._start : self._start + count]
            self._start += count
        else:
            came = self._receive([target, self._stage])
            count = min(came, len(target))
            self._start, self._end = 0, came - count
        self.left -= count
        return count

    def close(self, linger: float) -> None:
        """Close the connection. Bytes that are under way have `linger` seconds to arrive."""
        deadline = time.monotonic() + linger
        with contextlib.suppress(OSError):
            while self._unsent and self.wait(deadline - time.monotonic()):
                self.flush()
            # Closing with unread bytes would reset the connection, and the peer would lose what it has not read.
            self._socket.shutdown(socket.SHUT_WR)
            while self.wait(deadline - time.monotonic()):
                if not self._socket.recv(1 << 20):
                    break
        self.forget()

    def forget(self) -> None:
        """Close only the descriptor: in a forked child the connection belongs to the parent."""
        self._socket.close()

    def wait(self, timeout: float) -> bool:
        """Wait until bytes come, or there is room for unsent ones. Return whether that was within `timeout` seconds."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return timeout > 0 and bool(self._poll.poll(timeout * 1000))

    def wait_beside(self, others: Collection[int], timeout: float, for_room: bool) -> tuple[bool, set[int]]:
        """Wait until bytes come, there is room to send (with `for_room`), or one of the descriptors `others` is
        readable.

        Returns:
            Whether bytes have come, and which of `others` are readable.
        """
        self.flush()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if for_room or self._unsent else 0))
        for other in others:
            poll.register(other, select.POLLIN)
        self.wake_at(self.left)
        ready = dict(poll.poll(timeout * 1000))
        if self._socket.fileno() not in ready:  # bytes that arrive slowly are a sign of life too
            self.wake_at(1)
            ready.update(poll.poll(0))
        return bool(ready.get(self._socket.fileno(), 0) & select.POLLIN), ready.keys() & others

    def _waited_for(self, count: int, deadline: float, watch: Callable[[], None]) -> bytes:
        """Wait for the next `count` bytes, and return them."""
        while self._end - self._start < count:
            self._wait_for_bytes(deadline, watch)
        self._start += count
        return bytes(self._stage[self._start - count : self._start])

    def _wait_for_bytes(self, deadline: float, watch: Callable[[], None]) -> None:
        """Wait up to a step, and read what has come. Raise `Silent` after the deadline, even if bytes still drip."""
        self.flush()
        if not self.wait(_STEP):
            watch()
        if time.monotonic() > deadline:
            raise Silent("it accepts connections, and does not finish its greeting")
        self._read_ahead()

    def _read_ahead(self) -> bool:
        """Read into the stage, after its contents. Return whether anything came."""
        if self._start:
            here = bytes(self._stage[self._start : self._end])
            self._stage[: len(here)] = here
            self._start, self._end = 0, len(here)
        came = self._receive([self._stage[self._end :]])
        self._end += came
        return came > 0

    def _receive(self, buffers: list[memoryview]) -> int:
        try:
            came = self._socket.recvmsg_into(buffers)[0]
        except BlockingIOError:
            return 0
        if not came:
            raise ConnectionResetError("the peer closed the connection")
        return came

    def _obey(self, command: bytes) -> None:
        name, data = codec.parse_command(command)
        if name == b"PING" and len(self._unsent) < _STAGE:  # a peer that does not read its PONGs gets no more
            self._unsent += codec.parse_ping(data).pong
            self.flush()


def connected(host: str, port: int, timeout: float, watch: Callable[[], None]) -> Dealer:
    """Connect to the first of the addresses of `host` that answers.

    Args:
        host: a name or an address.
        port: a number.
        timeout: seconds for all addresses together. They share the time that is left equally.
        watch: called now and then while waiting; it may raise to give up.

    Raises:
        Silent: the peer accepts connections and says nothing.
        OSError: nobody accepts connections there, or the connection broke; gaierror if `host` has no address.
        KeyRefused: the peer wants encryption.
        ProtocolError: the peer does not speak ZeroMQ, or refuses the connection.
    """

    def connect(address: Address, deadline: float) -> Dealer:
        family, kind, proto, _, place = address
        connection = socket.socket(family, kind, proto)
        try:
            _connect(connection, place, deadline, watch)
            dealer = Dealer(connection)
            dealer.greet(deadline, watch)
        except BaseException:
            connection.close()
            raise
        return dealer

    return first_that_answers(host, port, timeout, connect)


def _connect(connection: socket.socket, place: object, deadline: float, watch: Callable[[], None]) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(BlockingIOError):
        connection.connect(place)  # type: ignore[arg-type]
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while not poll.poll(_STEP * 1000):
        watch()
        if time.monotonic() > deadline:
            raise TimeoutError("nobody answers")
    failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if failed:
        raise OSError(failed, os.strerror(failed))
