"""Turns the bytes of a TCP peer into events: the end of the handshake, heartbeats and messages, each within bounds.

The receiving half of the daemon's ZMTP, without I/O. The Identity that a peer may announce is ignored.

A consumer's messages have one frame. Those of a joined host, and those that it gets from the head, may have a second
one, whose bytes belong in memory that the first frame names. They are received there directly, without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from penstock_proto import ProtocolError
from penstock_proto.transport import zmtp
from penstock_proto.transport.codec import MAX_MESSAGE

Place: TypeAlias = Callable[[bytes], memoryview]
"""Takes the first frame of a message and returns the memory for the second, which must have exactly that size.

Raises:
    ProtocolError: the second frame belongs nowhere.
"""

MAX_FRAMES = 4
"""Maximum number of frames in a message. A client's message has one; a message of several is reported as empty."""


class Ready:
    """The handshake is over."""


class Ignored:
    """A command that means nothing to the daemon."""


READY: Final = Ready()
IGNORED: Final = Ignored()

Event: TypeAlias = bytes | zmtp.Ping | Ready | Ignored
"""A message (empty if it has several frames), a heartbeat, the end of the handshake, or an ignored command."""


class Incoming:
    """Takes bytes with `feed`, and returns one event after another with `next`. Holds at most one message and the bytes
    of one `feed`.

    Args:
        peers: the socket type that the peer must have.

    Attributes:
        place: where second frames belong; None if messages have only one.
        target: where the next received bytes belong; empty if that is unknown. After filling it, call `took`, not
            `feed`.
    """

    def __init__(self, peers: bytes = b"DEALER") -> None:
        self.place: Place | None = None
        self.target = memoryview(b"")
        self._peers = peers
        self._held = bytearray()
        self._at = 0
        self._greeted = self._ready = False
        self._frames = self._nbytes = 0  # of the message that has begun
        self._first = b""  # its first frame, until `place` is called for the second

    def took(self, count: int) -> None:
        """Note that `count` bytes were received into `target`."""
        self.target = self.target[count:]

    def feed(self, data: memoryview) -> None:
        """Take received bytes. `next` must have returned None since the last call."""
        del self._held[: self._at]
        self._at = 0
        self._held += data

    def next(self) -> Event | None:
        """Return the next event, or None until it is complete.

        Raises:
            ProtocolError: the peer breaks ZMTP, or exceeds a bound.
        """
        if not self._greeted:
            if len(self._held) < len(zmtp.GREETING):
                return None
            self._at = len(zmtp.GREETING)
            zmtp.check_greeting(self._held[: self._at])
            self._greeted = True
        while not self.target and (frame := self._frame()) is not None:
            head, body = frame
            if head.command:
                return self._command(body)
            if not self._ready:
                raise ProtocolError("a message before READY")
            if head.more and self.place is not None:
                self._first = body
            elif not head.more:
                whole = self._frames == 1
                self._frames = self._nbytes = 0
                return body if whole else b""
        return None

    def _frame(self) -> tuple[zmtp.Head, bytes] | None:
        """Return the next frame, if it is complete."""
        head = zmtp.head(self._held[self._at : self._at + 9])
        if head is None:
            return None
        if self._first and not head.command:
            self._placed(head)
            return self._frame() if not self.target else None
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

    def _placed(self, head: zmtp.Head) -> None:
        """Begin the second frame of a message: move its bytes that have arrived to where they belong."""
        assert self.place is not None
        target = self.place(self._first)
        if head.more or head.size != len(target):
            raise ProtocolError(f"a second frame of {head.size} bytes, expected {len(target)}")
        self._first = b""
        self._frames = self._nbytes = 0
        self._at += head.nbytes
        here = min(head.size, len(self._held) - self._at)
        target[:here] = self._held[self._at : self._at + here]
        self._at += here
        self.target = target[here:]

    def _command(self, body: bytes) -> Event:
        if not self._ready:
            socket_type = zmtp.parse_ready(body)
            if socket_type != self._peers:
                raise ProtocolError(f"a socket of type {socket_type!r}, expected {self._peers!r}")
            self._ready = True
            return READY
        name, data = zmtp.parse_command(body)
        if name == b"ERROR":
            raise ProtocolError(f"it refuses the connection: {zmtp.reason(data)}")
        return zmtp.parse_ping(data) if name == b"PING" else IGNORED
