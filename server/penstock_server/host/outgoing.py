"""What waits to be sent to a peer over TCP: frames in order, the bytes of slabs referred to and never copied."""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import NamedTuple

_BUFFERS = 64
"""Most buffers of one system call."""
_OVERHEAD = 256
"""Bytes that a piece costs beside its own."""


class _Piece(NamedTuple):
    data: bytes | memoryview
    starts: bool
    """Whether a message or a command starts here."""
    cost: int
    """Bytes of the daemon's own memory."""
    answer: int
    """As many, if the piece answers what the peer asked, or 0."""


class Outgoing:
    """A queue of bytes.

    Attributes:
        cost: bytes of the daemon's own memory that the queue takes, without slots.
        answers: as many of these as answer what the peer asked.
    """

    def __init__(self) -> None:
        self.cost = 0
        self.answers = 0
        self._pieces: deque[_Piece] = deque()
        self._sent = 0  # bytes of the first piece

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._pieces)

    def put(self, data: bytes, body: memoryview | None = None, *, answer: bool = False) -> None:
        """Queue a message: its bytes, and behind them those of `body`, which are sent from where they lie."""
        self._pieces.append(self._piece(data, answer))
        if body is not None:
            self._pieces.append(_Piece(body, False, _OVERHEAD, 0))
            self.cost += _OVERHEAD

    def put_first(self, command: bytes, *, answer: bool = False) -> None:
        """Queue a command before everything but the message whose sending has begun."""
        place = 0
        while place < len(self._pieces) and (not self._pieces[place].starts or (not place and self._sent)):
            place += 1
        self._pieces.insert(place, self._piece(command, answer))

    def write(self, connection: socket.socket, most: int) -> int:
        """Send up to `most` bytes, as far as there is room; returns how many.

        Raises:
            OSError: the connection broke.
        """
        buffers: list[bytes | memoryview] = []
        room, skip = most, self._sent
        for piece in islice(self._pieces, _BUFFERS):
            data = piece.data
            if skip or len(data) > room:
                data = memoryview(data)[skip : skip + room]
            buffers.append(data)
            skip = 0
            room -= len(data)
            if not room:
                break
        try:
            count = connection.sendmsg(buffers)
        except BlockingIOError:
            return 0
        self._sent += count
        while self._pieces and self._sent >= len(self._pieces[0].data):
            piece = self._pieces.popleft()
            self._sent -= len(piece.data)
            self.cost -= piece.cost
            self.answers -= piece.answer
        return count

    def clear(self) -> None:
        """Let go of everything."""
        self._pieces.clear()
        self.cost = self.answers = self._sent = 0

    def _piece(self, data: bytes, answer: bool) -> _Piece:
        cost = len(data) + _OVERHEAD
        self.cost += cost
        self.answers += cost * answer
        return _Piece(data, True, cost, cost * answer)
