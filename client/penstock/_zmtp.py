"""A consumer's end of a ZeroMQ connection: a DEALER over a plain socket.

libzmq would receive each message in a thread of its own into memory of its own, from where it has to be copied. Here
bytes go from the kernel to where they stay, in as few calls as they come in: half the CPU for large batches.

This file knows no message of Penstock's.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

from penstock_proto import ProtocolError
from penstock_proto import zmtp as codec

_STAGE = 16 * 1024
"""Bytes that are read ahead: what comes behind a frame that is received to where it stays, small frames above all.
Commands, which are read in one piece, fit."""
_AT_ONCE = 1 << 20
"""Most bytes that a poll is to wait for."""
_STEP = 0.1
"""Seconds after which a wait looks around."""


class Silent(TimeoutError):
    """A peer accepts connections, and says nothing."""


class Dealer:
    """A connection that is open: frames in, messages of one frame out. One thread at a time may use it.

    Attributes:
        left: bytes of the frame that has begun which were not read yet.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Take over a socket that is connected and does not block, and shake hands over it with `greet`."""
        self._socket = connection
        self._poll = select.poll()
        self._stage = memoryview(bytearray(_STAGE))
        self._start = self._end = 0  # of what is there in the stage
        self._unsent = b""
        self._wakes_at = 1
        self.left = 0

    def greet(self, deadline: float, watch: Callable[[], None]) -> None:
        """Shake hands until `deadline`; `watch` is called while nothing comes, and may raise to break off.

        Raises:
            Silent: nothing came.
            OSError: the connection broke.
            ProtocolError: what is there does not speak ZeroMQ, or not without encryption.
        """
        self._unsent = codec.GREETING + codec.ready(b"DEALER")
        codec.check_greeting(self._waited_for(len(codec.GREETING), deadline, watch))
        while (head := codec.head(self._stage[self._start : self._end])) is None:
            self._wait_for_bytes(deadline, watch)
        if not head.command:
            raise ProtocolError("it sends a message where ZeroMQ's READY belongs")
        self._start += head.nbytes
        name, data = codec.parse_command(self._waited_for(head.size, deadline, watch))
        if name == b"ERROR":
            raise ProtocolError(f"it refuses the connection: {codec.reason(data)}")
        if name != b"READY":
            raise ProtocolError(f"it sends ZeroMQ's {name!r} where READY belongs")

    def fileno(self) -> int:
        """The descriptor to poll on: readable, and writable if `unsent`."""
        return self._socket.fileno()

    def wake_at(self, count: int) -> None:
        """Let polls find the descriptor readable from so many bytes on: at most 1 MiB, and what the kernel has room
        for. Where much is to come, waits are a third as many."""
        count = max(1, min(count, _AT_ONCE))
        if count != self._wakes_at:
            self._wakes_at = count
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    @property
    def unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    def send(self, data: bytes) -> bool:
        """Send a message, if there is room; returns whether it was sent, or will be with a later `flush`."""
        self.flush()
        if self._unsent:
            return False
        self._unsent = codec.head_of(len(data)) + data
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as there is room. (Where the connection is broken `read` says so.)"""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return
            except OSError:
                self._unsent = b""

    def begin(self) -> tuple[int, bool] | None:
        """Begin with the next frame of a message: its size, and whether the message has another. None if it is not
        here yet. What was left of the frame before must have been read.

        Raises:
            OSError: the connection broke.
            ProtocolError: something came that is no frame.
        """
        while True:
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

    def read_into(self, target: memoryview) -> int:
        """Read bytes of the frame that has begun, as many as are here and fit; 0 if none is here now.

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
        """Close the connection; what was sent last has `linger` seconds to get there."""
        deadline = time.monotonic() + linger
        with contextlib.suppress(OSError):
            while self._unsent and self.wait(deadline - time.monotonic()):
                self.flush()
            # Closed with bytes unread, it would be reset, and what the peer has not read yet be lost.
            self._socket.shutdown(socket.SHUT_WR)
            while self.wait(deadline - time.monotonic()):
                if not self._socket.recv(1 << 20):
                    break
        self.forget()

    def forget(self) -> None:
        """Close the descriptor, and nothing more: in a forked child the connection is the parent's."""
        self._socket.close()

    def wait(self, timeout: float) -> bool:
        """Wait until something came, or there is room for what waits; whether that was within `timeout` seconds."""
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        return timeout > 0 and bool(self._poll.poll(timeout * 1000))

    def _waited_for(self, count: int, deadline: float, watch: Callable[[], None]) -> bytes:
        """The next bytes."""
        while self._end - self._start < count:
            self._wait_for_bytes(deadline, watch)
        self._start += count
        return bytes(self._stage[self._start - count : self._start])

    def _wait_for_bytes(self, deadline: float, watch: Callable[[], None]) -> None:
        self.flush()
        if not self.wait(_STEP):
            watch()
            if time.monotonic() > deadline:
                raise Silent("it accepts connections, and says nothing")
        self._read_ahead()

    def _read_ahead(self) -> bool:
        """Read into the stage, behind what is there; returns whether anything came."""
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
        if name == b"PING" and len(self._unsent) < _STAGE:  # whoever sends many and reads no answer gets no more
            self._unsent += codec.parse_ping(data).pong
            self.flush()


def connected(host: str, port: int, timeout: float, watch: Callable[[], None]) -> Dealer:
    """A connection to whoever listens there, of the addresses that `host` has the first that answers.

    Args:
        host: a name or an address.
        port: a number.
        timeout: seconds that each address has.
        watch: called now and then while waiting; it may raise to break off.

    Raises:
        Silent: somebody accepts connections there, and says nothing.
        OSError: nobody accepts connections there, or the connection broke; gaierror if `host` has no address.
        ProtocolError: what is there does not speak ZeroMQ, or not without encryption.
    """
    error = OSError(f"{host} has no address")
    for family, kind, proto, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, proto)
        try:
            deadline = time.monotonic() + timeout
            _connect(connection, place, deadline, watch)
            dealer = Dealer(connection)
            dealer.greet(deadline, watch)
            return dealer
        except OSError as failed:
            error = failed
            connection.close()
        except BaseException:
            connection.close()
            raise
    try:
        raise error
    finally:
        del error  # it holds this frame, which would hold it, and through `watch` a session that looks for its daemon


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
