"""The search for another connection after a loss: for how long, in which steps, and what is said when it was in vain.

A loss lasts until a slab has come over another connection. One that breaks before belongs to the same loss, so a daemon
that takes connections and drops them is not tried for ever. But one that lasted for as long as a loss may ends it too:
nobody may have read it, as a validation dataset between two epochs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

from penstock_proto import ConnectionLost, DaemonStopped, MemoryBound, PenstockError, Unreachable
from penstock_proto.messages import FeedInfo
from penstock_proto.position import Position

from ._connecting import Connector, Link, LostSession
from ._mailbox import Mailbox

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


class Reconnector:
    """The losses of one session, one after another. Used by its receiver thread alone.

    Attributes:
        seconds: how long a loss may last.
        connections: how many connections were made since the last loss began, of which all but the newest broke
            before a slab had come.
    """

    def __init__(self, mailbox: Mailbox, seconds: float) -> None:
        self.seconds = seconds
        self.connections = 0
        self._mailbox = mailbox
        self._cause: PenstockError | None = None
        self._newest = ""
        self._began = self._made = 0.0
        self._pause = FIRST_PAUSE

    def lost(self, cause: PenstockError) -> bool:
        """A connection was lost by `cause`. Whether that is a loss of its own."""
        self._newest = cause.message
        lasted = time.monotonic() - self._made if self.connections else 0.0
        if self._cause is not None and lasted <= self.seconds:
            return False
        # What was raised holds the frames that it came through, and these the session.
        self._cause, self._began, self._pause = copy.copy(cause), time.monotonic(), FIRST_PAUSE
        self.connections = 0
        return True

    def over(self) -> bool:
        """Something came: the loss is over. Whether there was one."""
        was, self._cause = self._cause is not None, None
        return was

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
        connector: Connector,
        start: Callable[[FeedInfo], Position | None],
        last: Callable[[], LostSession],
        idle: Callable[[], None],
    ) -> Link:
        """Another way. While a loss lasts.

        Args:
            connector: finds it.
            start: as for `Connector`.
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
            if self._mailbox.closing:
                raise GivenUp
            if time.monotonic() > deadline + LAST_PAUSE:  # the wait for an answer ends before, and says more
                raise Unreachable("the daemon was not ready in time")

        said, answer = cause.message, ANSWER
        if self.connections:  # the one before broke at once, and another would
            said = self._newest
            if time.monotonic() > deadline:
                raise self._in_vain(cause, said)
        while True:
            wakeup = self._mailbox.wakeup
            assert wakeup is not None
            wakeup.wait(max(0.0, min(self._pause, deadline - time.monotonic())))
            self._pause = min(2 * self._pause, LAST_PAUSE)
            idle()
            try:
                watch()
                timeout = min(connector.timeout, max(STEP, deadline - time.monotonic()))
                way = connector(self._mailbox, start, timeout, watch, last(), answer)
                self.connections += 1
                self._made = time.monotonic()
                return way
            except (Unreachable, ConnectionLost, DaemonStopped, MemoryBound) as error:  # our old session holds memory
                said = error.message
                answer *= 2
            if time.monotonic() > deadline:
                raise self._in_vain(cause, said)

    def _in_vain(self, cause: PenstockError, said: str) -> ConnectionLost:
        if self.connections:
            times = "a connection was" if self.connections == 1 else f"{self.connections} connections were"
            said = f"{times} made, and broke before data came; the last: {said}"
        else:
            said = f"no connection could be had again; the last attempt said: {said}"
        return ConnectionLost(f"{cause.message}. In {self.seconds:g} s {said}")
