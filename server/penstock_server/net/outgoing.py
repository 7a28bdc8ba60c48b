"""The messages that wait to be sent to a TCP peer, in order. Slabs are sent from their slots and never copied.

`Outgoing` is the sending half of the daemon's ZMTP, without I/O: `buffers` says what to send, and `sent` is told how
much of it went. `OutgoingMessages` keeps messages as they are, for libzmq.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from penstock_proto.transport import zmtp

_BUFFERS = 64
"""Maximum number of buffers per system call."""
_OVERHEAD = 256
"""Bytes that a queued piece, or a message for libzmq, costs in addition to its own."""


class _Piece(NamedTuple):
    data: bytes | memoryview
    starts: bool
    """Whether a message or a command starts here."""
    cost: int
    """Bytes of the daemon's own memory."""
    answer: int
    """`cost` if the piece answers a request of the peer, otherwise 0."""
    done: Callable[[], None] | None = None
    """Called when it is sent."""


class Outgoing:
    """A queue of messages as bytes.

    Attributes:
        cost: bytes of the daemon's own memory that the queue takes, without slots.
        answers: how many of these bytes answer requests of the peer.
        nbytes: how many bytes wait to be sent.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.cost = 0
        self.answers = 0
        self._pieces: deque[_Piece] = deque()
        self._sent = 0  # bytes of the first piece

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._pieces)

    def put(
        self,
        message: bytes,
        body: memoryview | None = None,
        *,
        answer: bool = False,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message of one frame, or of two. The queue refers to `body`, the second one, until it is sent. Then
        it calls `done`."""
        frames = zmtp.head_of(len(message), more=body is not None) + message
        if body is None:
            self._pieces.append(self._piece(frames, answer, done))
        else:
            self._pieces.append(self._piece(frames + zmtp.head_of(len(body)), answer))
            self._pieces.append(_Piece(body, False, _OVERHEAD, 0, done))
            self.cost += _OVERHEAD
            self.nbytes += len(body)

    def put_first(self, command: bytes, *, answer: bool = False) -> None:
        """Queue the bytes of a command before everything except the rest of a message that was sent in part."""
        place = 0
        while place < len(self._pieces) and (not self._pieces[place].starts or (not place and self._sent)):
            place += 1
        self._pieces.insert(place, self._piece(command, answer))

    def buffers(self, most: int) -> list[bytes | memoryview]:
        """Return what to send next: up to `most` bytes, in as many buffers as one system call takes."""
        found: list[bytes | memoryview] = []
        room, skip = most, self._sent
        for piece in islice(self._pieces, _BUFFERS):
            data = piece.data
            if skip or len(data) > room:
                data = memoryview(data)[skip : skip + room]
            found.append(data)
            skip = 0
            room -= len(data)
            if not room:
                break
        return found

    def sent(self, count: int) -> None:
        """Remove the first `count` bytes, which were sent."""
        self._sent += count
        self.nbytes -= count
        while self._pieces and self._sent >= len(self._pieces[0].data):
            piece = self._pieces.popleft()
            self._sent -= len(piece.data)
            self.cost -= piece.cost
            self.answers -= piece.answer
            if piece.done is not None:
                piece.done()

    def clear(self) -> None:
        """Remove everything."""
        self._pieces.clear()
        self.cost = self.answers = self.nbytes = self._sent = 0

    def _piece(self, data: bytes, answer: bool, done: Callable[[], None] | None = None) -> _Piece:
        cost = len(data) + _OVERHEAD
        self.cost += cost
        self.answers += cost * answer
        self.nbytes += len(data)
        return _Piece(data, True, cost, cost * answer, done)


class Message(NamedTuple):
    """One or two frames."""

    first: bytes
    body: memoryview | None
    cost: int
    answer: int
    """`cost` if the peer asked for the message, otherwise 0."""
    done: Callable[[], None] | None
    """Called when it is sent."""

    @property
    def nbytes(self) -> int:
        """Bytes of its frames."""
        return len(self.first) + (0 if self.body is None else len(self.body))


class OutgoingMessages:
    """A queue of messages.

    Attributes:
        cost: bytes of the daemon's own memory that the queue takes, without slots.
        answers: how many of these bytes answer requests of the peer.
        nbytes: how many bytes wait to be sent.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.cost = 0
        self.answers = 0
        self._messages: deque[Message] = deque()

    def __bool__(self) -> bool:
        """Return whether anything waits."""
        return bool(self._messages)

    def put(
        self,
        message: bytes,
        body: memoryview | None = None,
        *,
        answer: bool = False,
        done: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message of one frame, or of two. The queue refers to `body`, the second one, until it is sent. Then
        it calls `done`."""
        cost = len(message) + _OVERHEAD
        self._messages.append(Message(message, body, cost, cost * answer, done))
        self.nbytes += self._messages[-1].nbytes
        self.cost += cost
        self.answers += cost * answer

    @property
    def first(self) -> Message:
        """The message to send next."""
        return self._messages[0]

    def sent(self) -> None:
        """Remove the first message, which was sent."""
        message = self._messages.popleft()
        self.cost -= message.cost
        self.answers -= message.answer
        self.nbytes -= message.nbytes
        if message.done is not None:
            message.done()

    def clear(self) -> None:
        """Remove everything."""
        self._messages.clear()
        self.cost = self.answers = self.nbytes = 0
