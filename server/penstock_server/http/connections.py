"""The connections of the HTTP server. Each carries one request, whose head is checked before aiohttp sees it.

Nobody can hold a connection by being slow: a head and the reading of an answer have time limits, and when all
connections are taken, a new one replaces the oldest that waits for its peer. A part of the connections is kept for the
requests of those who watch the daemon (`PROBES`), because they may restart it if they get no answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import cast

from ..logs.bugs import Bugs
from .request_head import END, Refusal, is_probe, refusal, refusal_of_part

MOST_CONNECTIONS = 64
"""Maximum number of connections."""
RESERVE = 16
"""So many of them are kept for probes."""
HEAD_SECONDS = 5.0
"""Maximum seconds from the beginning of a connection to the end of the request's head."""
ANSWER_SECONDS = 30.0
"""Maximum seconds from there to the end of the answer, as the peer reads it."""
LINGER_SECONDS = 2.0
"""Seconds for which a refused peer may go on sending, so that it gets the reason and not an error."""
MOST_DISCARDED = 1 << 20
"""Maximum bytes that it may send in that time."""

_BUSY = Refusal(503, "Service Unavailable", "too many requests at once: try again in a second", "Retry-After: 1\r\n")


class _State(Enum):
    HEAD = "its head comes"
    ANSWERING = "it is answered"
    REFUSED = "it was refused, and its peer may still send"
    OVER = "it is closed"


class Connections:
    """All connections, with the limits on how many there are.

    Args:
        answerer: makes the protocol that answers one request.
        admits: returns whether the answer to a request that is no probe can be paid for.
        headers: headers of refusals.
        refused: called with the reason of each refusal.
        bugs: notes unexpected errors.
    """

    def __init__(
        self,
        answerer: Callable[[], asyncio.Protocol],
        admits: Callable[[], bool],
        headers: dict[str, str],
        refused: Callable[[str], None],
        bugs: Bugs,
    ) -> None:
        self.answerer = answerer
        self.refused = refused
        self.bugs = bugs
        self.headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._admits = admits
        self._all: dict[Connection, None] = {}
        """All of them, the oldest first."""

    def new(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        return Connection(self)

    def add(self, connection: Connection) -> bool:
        """Take a new connection in, if need be for an older one. Return whether there is room."""
        if len(self._all) >= MOST_CONNECTIONS:
            waiting = next((one for one in self._all if one.waits_for_its_peer), None)
            if waiting is None:
                return False
            waiting.abort()
        self._all[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is over."""
        self._all.pop(connection, None)

    def refusal(self, head: bytes) -> Refusal | None:
        """Return why the request with this head is refused; None: answer it."""
        if (found := refusal(head)) is not None or is_probe(head):
            return found
        answered = [one for one in self._all if one.state is _State.ANSWERING]
        if len(answered) >= MOST_CONNECTIONS - RESERVE:
            slow = next((one for one in answered if one.waits_for_its_peer), None)
            if slow is None:
                return _BUSY
            slow.abort()
        return None if self._admits() else _BUSY


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, connections: Connections) -> None:
        self.state = _State.HEAD
        self._connections = connections
        self._data = bytearray()
        self._discarded = 0
        self._answerer: asyncio.Protocol | None = None

    @property
    def waits_for_its_peer(self) -> bool:
        """Whether it could go on if its peer were quicker."""
        return self.state is not _State.ANSWERING or self._transport.get_write_buffer_size() > 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the head."""
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.abort)
        if not self._connections.add(self):
            self.abort()

    def data_received(self, data: bytes) -> None:
        """Collect the head, and answer or refuse the request when it is complete."""
        try:
            self._received(data)
        except Exception as error:  # the loop would end the daemon
            self._connections.bugs.note(error)
            self.abort()

    def eof_received(self) -> bool:
        """Return whether the connection stays open for the answer to a peer that sends no more."""
        return self.state is _State.ANSWERING

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self.state = _State.OVER
        self._deadline.cancel()
        self._connections.remove(self)
        if self._answerer is not None:
            self._answerer.connection_lost(error)

    def pause_writing(self) -> None:
        """Let the answer wait for its peer."""
        if self._answerer is not None:
            self._answerer.pause_writing()

    def resume_writing(self) -> None:
        """Let the answer go on."""
        if self._answerer is not None:
            self._answerer.resume_writing()

    def abort(self) -> None:
        """Close the connection at once."""
        self.state = _State.OVER
        self._connections.remove(self)
        self._transport.abort()

    def _received(self, data: bytes) -> None:
        if self.state is _State.REFUSED:
            self._discarded += len(data)
            if self._discarded > MOST_DISCARDED:
                self.abort()
        if self.state is not _State.HEAD:
            return
        before = len(self._data)
        self._data += data
        end = self._data.find(END, max(0, before - len(END)))
        if end < 0:
            refused = refusal_of_part(self._data)
            if refused is not None:
                self._refuse(refused)
            return
        head = bytes(self._data[: end + len(END)])  # nothing after the first request is read
        self._data.clear()
        refused = self._connections.refusal(head)
        if refused is not None:
            self._refuse(refused, body=not head.startswith(b"HEAD "))
        else:
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        self.state = _State.ANSWERING
        self._wait(ANSWER_SECONDS)
        self._transport.pause_reading()
        self._answerer = self._connections.answerer()
        self._answerer.connection_made(self._transport)
        self._answerer.data_received(head)

    def _refuse(self, refused: Refusal, *, body: bool = True) -> None:
        self.state = _State.REFUSED
        self._wait(LINGER_SECONDS)
        self._data.clear()
        self._connections.refused(f"{refused.name} ({refused.why})")
        text = f"{refused.why}\n"
        self._transport.write(
            f"HTTP/1.0 {refused.status} {refused.name}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n{refused.field}"
            f"{self._connections.headers}\r\n{text if body else ''}".encode()
        )
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def _wait(self, seconds: float) -> None:
        self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.abort)
