"""Turns the bytes of a TCP peer into events: the end of the handshake, heartbeats and messages, each within bounds.

The receiving half of the daemon's ZMTP, without I/O. The Identity that a peer may announce is ignored.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from penstock_proto import ProtocolError, zmtp
from penstock_proto.codec import MAX_MESSAGE

MAX_FRAMES = 4
"""Most frames of a message that are read. A client's message has one; a message of several is reported as empty."""


class Ready:
    """The handshake is over."""


class Ignored:
    """A command without meaning for the daemon."""


READY: Final = Ready()
IGNORED: Final = Ignored()

Event: TypeAlias = bytes | zmtp.Ping | Ready | Ignored
"""A message (empty if it has several frames), a heartbeat, the end of the handshake, or an ignored command."""


class Incoming:
    """Takes bytes with `feed`, and returns one event after another with `next`. Holds at most one message and the bytes
    of one `feed`."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._at = 0
        self._greeted = self._ready = False
        self._frames = self._nbytes = 0  # of the message that has begun

    def feed(self, data: memoryview) -> None:
        """Take received bytes. `next` must have returned None since the last call."""
        del self._held[: self._at]
        self._at = 0
        self._held += data

    def next(self) -> Event | None:
        """Return the next event, or None if it is not complete.

        Raises:
            ProtocolError: the peer breaks ZMTP, or exceeds a bound.
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
        """Return the next frame, if it is complete."""
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
        if not self._ready:
            socket_type = zmtp.parse_ready(body)
            if socket_type != b"DEALER":
                raise ProtocolError(f"a socket of type {socket_type!r}; clients use a DEALER")
            self._ready = True
            return READY
        name, data = zmtp.parse_command(body)
        if name == b"ERROR":
            raise ProtocolError(f"it refuses the connection: {zmtp.reason(data)}")
        return zmtp.parse_ping(data) if name == b"PING" else IGNORED
