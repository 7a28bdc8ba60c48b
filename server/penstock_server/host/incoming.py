"""What a peer sends over TCP, taken apart: greeting, READY, then heartbeats and messages, each within bounds.

The daemon's end of ZMTP without I/O. A peer may announce an Identity; nobody looks at it.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from penstock_proto import ProtocolError, zmtp
from penstock_proto.codec import MAX_MESSAGE

MAX_FRAMES = 4
"""Most frames of a message that are read. A message of a client has one; one of several is passed on as empty."""


class Ready:
    """The handshake is over."""


class Ignored:
    """A command that says nothing to us."""


READY: Final = Ready()
IGNORED: Final = Ignored()

Event: TypeAlias = bytes | zmtp.Ping | Ready | Ignored
"""A message (empty if it has several frames), a heartbeat to be answered, the end of the handshake, or nothing."""


class Incoming:
    """Bytes in with `feed`, one event after the other out with `next`. It holds one message and one `feed` at most."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0
        self._greeted = self._ready = False
        self._frames = self._nbytes = 0  # of the message that has begun

    def feed(self, data: memoryview) -> None:
        """Take what was received. `next` must have returned None since the call before."""
        del self._held[: self._at]
        self._at = 0
        self._held += data

    def next(self) -> Event | None:
        """The next event, or None if it has not come yet.

        Raises:
            ProtocolError: the peer breaks ZMTP, or a bound.
        """
        if not self._greeted:
            if len(self._held) < len(zmtp.GREETING):
                return None
            self._at = len(zmtp.GREETING)
            zmtp.check_greeting(self._held[: self._at])
            self._greeted = True
        while (frame := self._frame()) is not None:
            head, body = frame
            if head.command:
                return self._command(body)
            if not self._ready:
                raise ProtocolError("a message before READY")
            if not head.more:
                whole = self._frames == 1
                self._frames = self._nbytes = 0
                return body if whole else b""
        return None

    def _frame(self) -> tuple[zmtp.Head, bytes] | None:
        """The next frame, if all of it has come."""
        head = zmtp.head(self._held[self._at : self._at + 9])
        if head is None:
            return None
        if not head.command and (self._frames >= MAX_FRAMES or self._nbytes + head.size > MAX_MESSAGE):
            raise ProtocolError(f"a message of more than {MAX_FRAMES} frames or {MAX_MESSAGE} bytes")
        body = self._at + head.nbytes
        if len(self._held) < body + head.size:
            return None
        self._at = body + head.size
        if not head.command:
            self._frames += 1
            self._nbytes += head.size
        return head, bytes(self._held[body : self._at])

    def _command(self, body: bytes) -> Event:
        name, data = zmtp.parse_command(body)
        if name == b"ERROR":
            raise ProtocolError(f"it refuses the connection: {zmtp.reason(data)}")
        if not self._ready:
            if name != b"READY":
                raise ProtocolError(f"{name!r} where READY belongs")
            if zmtp.socket_type(data) != b"DEALER":
                raise ProtocolError(f"a socket of type {zmtp.socket_type(data)!r}; clients use a DEALER")
            self._ready = True
            return READY
        return zmtp.parse_ping(data) if name == b"PING" else IGNORED
