"""The search for another connection after a loss: for how long, in which steps, and what is said when it was in vain.

A loss lasts until a slab has come over another connection. One that breaks before belongs to the same loss, so a daemon
that takes connections and drops them is not tried for ever.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from penstock_proto import ConnectionLost, DaemonStopped, MemoryBound, PenstockError, Unreachable
from penstock_proto.messages import FeedInfo
from penstock_proto.position import Position

from .dial import Dial, Last, Way
from .notes import Notes

STEP = 0.1
"""Fewest seconds that the daemon has for an answer."""
FIRST_PAUSE = 0.05
LAST_PAUSE = 1.0
"""Seconds between two attempts: from, doubling, to."""
ANSWER = 4.0
"""Seconds that the daemon has for its first answer at the first attempt, doubling. A link that froze once the
connection was made is not waited for in vain for long, and a daemon that is slow has its time in the end."""


class GivenUp(Exception):
    """Nobody waits for another connection any more."""


class Redial:
    """The losses of one session, one after another. Used by its receiver thread alone.

    Attributes:
        seconds: how long a loss may last.
    """

    def __init__(self, notes: Notes, seconds: float) -> None:
        self.seconds = seconds
        self._notes = notes
        self._cause: PenstockError | None = None
        self._began = 0.0
        self._pause = FIRST_PAUSE

    def lost(self, cause: PenstockError) -> bool:
        """A connection was lost by `cause`. Whether that is a loss of its own."""
        if self._cause is not None:
            return False
        # What was raised holds the frames that it came through, and these the session.
        self._cause, self._began, self._pause = copy.copy(cause), time.monotonic(), FIRST_PAUSE
        return True

    def over(self) -> None:
        """Something came: the loss, if there was one, is over."""
        self._cause = None

    @property
    def lasted(self) -> float:
        """Seconds since the last loss began."""
        return time.monotonic() - self._began

    @property
    def overdue(self) -> PenstockError | None:
        """The cause of a loss that lasts for longer than `seconds`, or None."""
        return self._cause if self.lasted > self.seconds else None

    def __call__(
        self,
        dial: Dial,
        start: Callable[[FeedInfo], Position | None],
        last: Callable[[], Last],
        idle: Callable[[], None],
    ) -> Way:
        """Another way. While a loss lasts.

        Args:
            dial: finds it.
            start: as for `Dial`.
            last: what was lost, asked for at each attempt.
            idle: called before each attempt.

        Raises:
            GivenUp: nobody waits any more.
            ConnectionLost: there was none in time.
            PenstockError: what the daemon there says will not become better.
        """
        cause, deadline = self._cause, self._began + self.seconds
        assert cause is not None

        def watch() -> None:
            if self._notes.closing:
                raise GivenUp
            if time.monotonic() > deadline + LAST_PAUSE:  # the wait for an answer ends before, and says more
                raise Unreachable("the daemon was not ready in time")

        said, answer = cause.message, ANSWER
        while True:
            bell = self._notes.bell
            assert bell is not None
            bell.wait(max(0.0, min(self._pause, deadline - time.monotonic())))
            self._pause = min(2 * self._pause, LAST_PAUSE)
            idle()
            try:
                watch()
                timeout = min(dial.timeout, max(STEP, deadline - time.monotonic()))
                return dial(self._notes, start, timeout, watch, last(), answer)
            except (Unreachable, ConnectionLost, DaemonStopped, MemoryBound) as error:  # our old session holds memory
                said = error.message
                answer *= 2
            if time.monotonic() > deadline:
                raise ConnectionLost(
                    f"{cause.message}. In {self.seconds:g} s no connection could be had again; the last attempt "
                    f"said: {said}"
                )
