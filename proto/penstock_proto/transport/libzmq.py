"""A libzmq DEALER at the client's end of one connection to a daemon, with keys (CURVE) or without.

libzmq encrypts, and receives each frame as a whole. Its sockets reconnect on their own, but this one never does,
because a session belongs to one connection. libzmq reports a failed handshake only through its monitor, so errors come
from there.

This file knows no message of Penstock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..errors import KeyRefused, ProtocolError
from ..security.keys import SERVER, ClientKeys, needs_key
from .addresses import Address, first_that_answers
from .codec import MAX_CHUNK, MAX_MESSAGE
from .zmtp import Silent

OVERHEAD = 64
"""Bytes that encryption adds to a frame, rounded up."""
UNDECIPHERED = 300
"""The code with which the daemon ends a handshake that it cannot decipher. (For an unknown key it is libzmq's own,
400.)"""

_STEP = 100
"""Milliseconds between two calls of `watch` during a wait."""
_NEVER = 3_600_000
"""Milliseconds until libzmq would reconnect. (-1 would also drop messages that came and were not read.)"""
_AHEAD = 16
"""How many messages libzmq receives ahead, or holds until they are sent."""


class LibzmqDealer:
    """An open connection: receives frames, and sends messages of one frame. Not thread-safe.

    Attributes:
        left: bytes of the current frame that are still to be read.
    """

    def __init__(self, keys: ClientKeys | None) -> None:
        self.left = 0
        self.unsent = False
        """Whether libzmq holds messages that wait to be sent."""
        self._keys = keys
        self._frame = memoryview(b"")
        self._more = False
        self._lost = False
        self._fd = self._inode = -1
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.reconnect_ivl = _NEVER
        self._socket.rcvhwm = self._socket.sndhwm = _AHEAD
        self._socket.maxmsgsize = max(MAX_MESSAGE, MAX_CHUNK) + OVERHEAD
        if keys is not None:
            self._socket.curve_serverkey = keys.server
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.own
        self._monitor = self._socket.get_monitor_socket()

    def connect(self, endpoint: str, deadline: float, watch: Callable[[], None]) -> None:
        """Connect to one address and shake hands, without another try. Raises the errors of `dealer`."""
        self._socket.connect(endpoint)
        connected = False
        while (event := self._next_event()) != zmq.Event.HANDSHAKE_SUCCEEDED:
            if event == zmq.Event.CONNECTED:
                connected = True
            elif event in (zmq.Event.CLOSED, zmq.Event.DISCONNECTED, zmq.Event.HANDSHAKE_FAILED_NO_DETAIL):
                if connected:
                    raise ConnectionResetError("the peer closed the connection")
                raise ConnectionRefusedError("nobody listens there")
            elif event is None and not self._monitor.poll(_STEP):
                watch()
                if time.monotonic() > deadline:
                    raise Silent("it accepts connections, and says nothing") if connected else TimeoutError("silence")

    def send(self, data: bytes, body: memoryview | None = None) -> bool:
        """Send a message, perhaps with a second frame, if there is room. Copies both. Return whether libzmq took it."""
        try:
            self._socket.send(data, zmq.NOBLOCK if body is None else zmq.NOBLOCK | zmq.SNDMORE)
            if body is not None:
                self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    @property
    def own_address(self) -> str:
        """The address of this end, without its port, or "" if the connection has ended."""
        try:
            with socket.socket(fileno=os.dup(self._fd)) as connection:
                return str(connection.getsockname()[0])
        except OSError:
            return ""

    @property
    def pending(self) -> bool:
        """Whether a frame has come. The descriptors may not show this if something was sent since they were last
        checked."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Two descriptors that become readable once each time something may have changed."""
        return int(self._socket.get(zmq.FD)), int(self._monitor.get(zmq.FD))

    def frames(self) -> list[bytes] | None:
        """Return the next message, or None if none has come.

        Raises:
            ConnectionResetError: the connection broke.
        """
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            if self._broken():
                raise ConnectionResetError("the peer closed the connection") from None
            return None

    def begin(self) -> tuple[int, bool] | None:
        """Begin the next frame of a message. The one before must have been read to its end.

        Returns:
            Its size, and whether the message has another frame. None if the frame has not come.

        Raises:
            ConnectionResetError: the connection broke.
        """
        try:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if self._broken():
                raise ConnectionResetError("the peer closed the connection") from None
            return None
        self._frame, self._more = frame.buffer, frame.more
        self.left = len(self._frame)
        return self.left, self._more

    def read_into(self, target: memoryview) -> int:
        """Copy as many bytes of the current frame into `target` as fit. Return their number."""
        count = min(self.left, len(target))
        at = len(self._frame) - self.left
        target[:count] = self._frame[at : at + count]
        self.left -= count
        if not self.left:
            self._frame = memoryview(b"")
        return count

    def message(self, timeout: float) -> bytes | None:
        """Wait for the next message and return its first frame, or None if none comes within `timeout` seconds. Skip
        the rest of a message that was only read in part.

        Raises:
            ConnectionResetError: the connection broke.
        """
        deadline = time.monotonic() + timeout
        while True:
            rest = self._more
            frame = self.begin()
            if frame is not None and not rest:
                data = bytes(self._frame)
                self.left = 0
                return data
            if time.monotonic() > deadline or (frame is None and not self.wait(deadline - time.monotonic())):
                return None
            self.left = 0

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a frame or for a broken connection. Return whether either came."""
        return self.wait_beside((), timeout, False)[0]

    def wait_beside(self, others: Collection[int], timeout: float, for_room: bool) -> tuple[bool, set[int]]:
        """Wait until a frame comes, the connection breaks, there is room to send (with `for_room`), or one of the
        descriptors `others` is readable.

        Returns:
            Whether a frame has come (or the connection broke), and which of `others` are readable.
        """
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if for_room else 0))
        if not self._lost:
            poller.register(self._monitor, zmq.POLLIN)
        for other in others:
            poller.register(other, zmq.POLLIN)
        ready = dict(poller.poll(int(max(0.0, timeout) * 1000)))
        return self._monitor in ready or bool(ready.get(self._socket, 0) & zmq.POLLIN), ready.keys() & others

    def close(self, linger: float) -> None:
        """Close the connection. Give libzmq `linger` seconds to send the last messages."""
        self._frame = memoryview(b"")
        self._socket.disable_monitor()
        self._context.destroy(linger=int((0 if self._lost else linger) * 1000))

    def forget(self) -> None:
        """Close only the descriptor: in a forked child the connection belongs to the parent."""
        with contextlib.suppress(OSError):
            if self._fd >= 0 and os.fstat(self._fd).st_ino == self._inode:
                os.close(self._fd)

    def _broken(self) -> bool:
        """Return whether the connection has ended and all that came over it was read."""
        self._lost = self._lost or self._next_event() == zmq.Event.DISCONNECTED
        return self._lost and not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN

    def _next_event(self) -> int | None:
        """Return the monitor's next event, or None if there is none.

        Raises:
            KeyRefused: the handshake failed because of keys.
            ProtocolError: it failed because the peer does not speak ZeroMQ.
        """
        try:
            said = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return None
        event, value = int(said["event"]), int(said["value"])
        if event == zmq.Event.CONNECTED:
            self._fd = value
            with contextlib.suppress(OSError):  # it is closed already
                self._inode = os.fstat(value).st_ino
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            raise KeyRefused(self._refused(value))
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                raise KeyRefused(self._one_sided())
            raise ProtocolError(f"it breaks off ZeroMQ's handshake (code {value:#x})")
        return event

    def _refused(self, code: int) -> str:
        if self._keys is None:
            return needs_key("the daemon")
        if code == UNDECIPHERED:
            return (
                f"the daemon is another one than {self._keys.folder / SERVER} is for, or was given other keys since: "
                f"copy the {self._keys.kind}'s folder from the daemon's host again"
            )
        return (
            f"the daemon does not know the key {self._keys.secret_file}: it was removed there (the daemon reads its "
            f"folder server/{self._keys.kind}s when it starts, and at SIGHUP), or it belongs to another daemon"
        )

    def _one_sided(self) -> str:
        if self._keys is None:
            return needs_key("the daemon")
        option = "keys=" if self._keys.kind == "client" else "--keys"
        return (
            f"this {self._keys.kind} has keys ({self._keys.folder}), and the daemon uses none, so nothing would be "
            f"encrypted: start the daemon with --keys, or omit {option} and unset PENSTOCK_KEYS"
        )


def dealer(keys: ClientKeys | None, host: str, port: int, timeout: float, watch: Callable[[], None]) -> LibzmqDealer:
    """Connect to the first address of `host` that answers, and shake hands.

    Args:
        keys: the keys of this end; None: do not encrypt.
        host: a name or an address.
        port: a number.
        timeout: seconds for all addresses together. They share the time that is left equally.
        watch: called now and then while waiting; it may raise to give up.

    Raises:
        Silent: the peer accepts connections and says nothing.
        OSError: nobody accepts connections there, or the connection broke; gaierror if `host` has no address.
        KeyRefused: one side has no key, or one that the other side does not accept.
        ProtocolError: the peer does not speak ZeroMQ.
    """

    def connect(address: Address, deadline: float) -> LibzmqDealer:
        family, *_, place = address
        made = LibzmqDealer(keys)
        try:
            made.connect(
                f"tcp://[{place[0]}]:{port}" if family == socket.AF_INET6 else f"tcp://{place[0]}:{port}",
                deadline,
                watch,
            )
        except BaseException:
            made.close(0)
            raise
        return made

    return first_that_answers(host, port, timeout, connect)
