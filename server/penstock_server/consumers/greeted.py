"""Sessions that were greeted and are not open yet, and their limits: number, time, and bytes sent.

A position arrives before its stream has a share of memory, so there is a limit for all positions together. When it is
reached, the session with the largest position ends (the oldest one, if several are equal). So clients that send much
and never open a stream do not keep out a client that opens its stream at once, with a position of the usual size.
"""

from __future__ import annotations

import ctypes

from penstock_proto import ConnectionLost, MemoryBound, PenstockError, ProtocolError
from penstock_proto.batches.position import MAX_POSITION
from penstock_proto.messages import FeedInfo

from .session import Session

MOST = 4096
"""Most sessions that wait for Open."""

MOST_BYTES = 8 * MAX_POSITION
"""Most bytes of all their positions together."""

SECONDS = 60.0
"""Seconds from Welcome to Open after which a session ends."""

_LANE = 33 * 1024
"""Most bytes of one lane in a position: a record, and its fields."""
_LARGE = 1 << 20
"""Positions of at least this many bytes leave much memory with malloc when they are dropped."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_HEAD = 128 * 1024
"""Most bytes of the rest of a position. It fits a message, because the feed in it came in one."""


class Greeted:
    """The sessions that wait for Open.

    Attributes:
        nbytes: bytes of all their positions together.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._since: dict[Session, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, session: Session, now: float) -> Session | None:
        """Add a session. Return one that must end to make room, or None."""
        oldest = next(iter(self._since)) if len(self._since) >= MOST else None
        self._since[session] = now
        return oldest

    def remove(self, session: Session) -> None:
        """Remove a session, if it is here, and drop its position."""
        if self._since.pop(session, None) is not None:
            self.nbytes -= len(session.position)
            large, session.position = len(session.position) >= _LARGE, bytearray()
            if large and _malloc_trim is not None:
                _malloc_trim(0)

    def sent(self, session: Session, data: bytes, feed: FeedInfo) -> Session | None:
        """Add a piece to a session's position. Return the session that must end to make room, if any.

        Raises:
            ProtocolError: the position is too large for this feed.
        """
        most = min(MAX_POSITION, _HEAD + feed.lanes * _LANE)
        if len(session.position) + len(data) > most:
            raise ProtocolError(f"a position of more than {most} bytes, which this feed cannot have", feed=feed.name)
        session.position += data
        self.nbytes += len(data)
        if self.nbytes <= MOST_BYTES:
            return None
        return max(self._since, key=lambda other: len(other.position))

    def late(self, now: float) -> list[Session]:
        """Return the sessions that have waited too long."""
        return [session for session, since in self._since.items() if now - since > SECONDS]


def too_late() -> PenstockError:
    """Return the error for a session that was not opened in time."""
    return ConnectionLost(f"the session was not opened within {SECONDS:.0f} s: connect again")


def too_many() -> PenstockError:
    """Return the error for a session that must end to make room for another."""
    return MemoryBound("too many clients send positions, or wait, and do not open their streams: connect again")
