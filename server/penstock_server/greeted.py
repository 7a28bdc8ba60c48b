"""Sessions that were greeted and are not open yet: how many there may be, for how long, and how much they may send.

A position comes before its stream has a share of memory, so what all of them send together has a bound of its own.
Where it is reached the largest one goes, the oldest of several: a client that opens its stream at once, behind a
position of the usual size, is not kept from it by others that send much and never do.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from penstock_proto import ConnectionLost, MemoryBound, PenstockError, ProtocolError
from penstock_proto.messages import FeedInfo
from penstock_proto.position import MAX_POSITION

if TYPE_CHECKING:
    from .sessions import Session

MOST = 4096
"""Sessions that may wait to be opened."""

MOST_BYTES = 8 * MAX_POSITION
"""Bytes that their positions may have together."""

SECONDS = 60.0
"""Seconds that a session has from Welcome to Open."""

_LANE = 33 * 1024
"""Bytes of a lane's place in a position: a record, and what comes with it."""
_LARGE = 1 << 20
"""Bytes of a position with which malloc would keep more than a little when it is given up."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
_HEAD = 128 * 1024
"""Bytes of the rest: no more than a message has, as the feed in it came in one."""


class Greeted:
    """See the file's head.

    Attributes:
        nbytes: what all positions have together.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._since: dict[Session, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, session: Session, now: float) -> Session | None:
        """One more waits. Returns one that has to go for it."""
        oldest = next(iter(self._since)) if len(self._since) >= MOST else None
        self._since[session] = now
        return oldest

    def remove(self, session: Session) -> None:
        """It does not wait any longer; its position is given up."""
        if self._since.pop(session, None) is not None:
            self.nbytes -= len(session.position)
            large, session.position = len(session.position) >= _LARGE, bytearray()
            if large and _malloc_trim is not None:
                _malloc_trim(0)

    def sent(self, session: Session, data: bytes, feed: FeedInfo) -> Session | None:
        """A piece of its position came. Returns the session that has to go for it, which may be this one.

        Raises:
            ProtocolError: no position of this feed is that large.
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
        """Those that have waited for too long."""
        return [session for session, since in self._since.items() if now - since > SECONDS]


def too_late() -> PenstockError:
    """What a session is told that was not opened in time."""
    return ConnectionLost(f"the session was not opened within {SECONDS:.0f} s: connect again")


def too_many() -> PenstockError:
    """What a session is told that has to go for another."""
    return MemoryBound("too many clients send positions, or wait, and do not open their streams: connect again")
