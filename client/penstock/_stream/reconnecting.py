"""Reconnection after a loss: for how long, at which intervals, and which error ends it.

A loss lasts until a slab arrives over another connection. If that connection breaks earlier, the same loss continues:
otherwise the client would forever retry a daemon that accepts connections and drops them. But a connection that lasts
longer than a loss is allowed to last ends the loss too: perhaps nobody reads it, as with a validation dataset between
two epochs.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

from penstock_proto import ConnectionLost, DaemonStopped, MemoryBound, PenstockError, Unreachable
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo

from .._state.mailbox import Mailbox
from .connecting import Connector, Link, LostSession

SECONDS = 60.0
"""Seconds that a loss may last, if the user gave no other time."""
STEP = 0.1
"""Fewest seconds that the daemon has for an answer."""
FIRST_PAUSE = 0.05
LAST_PAUSE = 1.0
"""Seconds between two attempts: at first, then doubling up to this."""
ANSWER = 4.0
"""Seconds that the daemon has for its first answer at the first attempt, doubled at each further attempt. So a link
that freezes after the connection is made costs little time, and a slow daemon gets enough time in the end."""


class GivenUp(Exception):
    """Nobody waits for another connection any longer."""


class Permit:
    """The permit to connect as a consumer: its stream needs it after a loss, and another stream takes it to replace
    this one.

    At the daemon, a consumer's newest session displaces the older ones. So while the other stream opens, this one must
    not connect, and an attempt that is under way has to end first.

    Attributes:
        taken: whether the other stream has the permit.
    """

    def __init__(self) -> None:
        self.taken = False
        self._connecting = False
        self._changed = threading.Condition()

    def take(self, wake: Callable[[], None]) -> None:
        """Take the permit for the other stream, once the attempt under way has ended; `wake` hurries that."""
        with self._changed:
            self.taken = True
            wake()
            try:
                while self._connecting:
                    self._changed.wait(STEP)  # in steps, so that Ctrl-C works
            except BaseException:
                self.taken = False
                raise

    def give_back(self) -> None:
        """Give the permit back: the other stream could not be opened."""
        with self._changed:
            self.taken = False
            self._changed.notify_all()

    def wait(self, watch: Callable[[], None]) -> None:
        """Wait until no other stream has the permit. Call `watch` meanwhile; it may raise to stop."""
        with self._changed:
            while self.taken:
                watch()
                self._changed.wait(STEP)

    def begin(self, watch: Callable[[], None]) -> None:
        """Begin an attempt, once no other stream has the permit; `watch` as for `wait`."""
        with self._changed:
            self.wait(watch)
            self._connecting = True

    def end(self) -> None:
        """End the attempt."""
        with self._changed:
            self._connecting = False
            self._changed.notify_all()


class Reconnector:
    """The losses of one stream, one after another. Used by its receiver thread alone.

    Args:
        mailbox: the mailbox of the stream.
        seconds: how long a loss may last; None: `SECONDS`, not counting the time in which a daemon makes progress with
            its start.
        farewell: how many seconds to go on after the stream was closed. In a group the daemon must learn which batches
            were handed over, or others get them again.

    Attributes:
        seconds: how long a loss may last.
        cause: why the connection was lost, or None while there is no loss.
        connections: connections made since the last loss began; all but the newest broke before a slab arrived.
        permit: the permit to connect as this stream's consumer.
    """

    def __init__(self, mailbox: Mailbox, seconds: float | None, farewell: float = 0.0) -> None:
        self.seconds = SECONDS if seconds is None else seconds
        self._patient = seconds is None
        self.cause: PenstockError | None = None
        self.connections = 0
        self.permit = Permit()
        self._mailbox = mailbox
        self._farewell = farewell
        self._newest = ""
        self._began = self._connected = 0.0
        self._progressed = 0.0
        """When a daemon last made progress with its start (monotonic)."""
        self._pause = FIRST_PAUSE

    def on_lost(self, cause: PenstockError) -> bool:
        """Note that a connection was lost because of `cause`. Return whether a new loss begins with it."""
        self._newest = cause.message
        lasted = time.monotonic() - self._connected if self.connections else 0.0
        if self.cause is not None and lasted <= self.seconds:
            return False
        # A raised error holds the frames that it passed through, and so the stream.
        self.cause, self._began, self._pause = copy.copy(cause), time.monotonic(), FIRST_PAUSE
        self.connections = 0
        return True

    def on_recovered(self) -> None:
        """Note that a slab arrived: the loss is over."""
        self.cause = None

    @property
    def lasted(self) -> float:
        """Seconds since the last loss began."""
        return time.monotonic() - self._began

    @property
    def overdue(self) -> PenstockError | None:
        """The cause of a loss that has lasted longer than `seconds`, or None."""
        return self.cause if time.monotonic() > self._deadline else None

    @property
    def _deadline(self) -> float:
        return max(self._began, self._progressed) + self.seconds

    def _on_progress(self) -> None:
        self._progressed = time.monotonic()

    def wait_for_permit(self) -> None:
        """Wait while another stream takes the place of this one. Raises GivenUp if this one is closed."""
        self.permit.wait(self._check_wanted)

    def connect(
        self,
        connector: Callable[[], Connector],
        start: Callable[[FeedInfo], Position | None],
        lost: Callable[[], LostSession],
        idle: Callable[[], None],
    ) -> Link:
        """Open another connection during a loss.

        Args:
            connector: returns the connector that opens it; called before each attempt.
            start: as for `Connector.connect`.
            lost: returns the lost session; called before each attempt.
            idle: called before each attempt.

        Raises:
            GivenUp: nobody waits any longer.
            ConnectionLost: no attempt succeeded in time.
            PenstockError: the daemon refused for a reason that will not pass.
        """
        cause = self.cause
        assert cause is not None

        def over() -> None:
            self._check_wanted()
            if time.monotonic() > self._deadline + LAST_PAUSE:  # the wait for an answer ends earlier, and says more
                raise Unreachable("the daemon was not ready in time")

        def watch() -> None:
            over()
            if self.permit.taken:
                raise Unreachable("another stream was to take the place of this one")

        said, answer = cause.message, ANSWER
        if self.connections:  # the one before broke at once, and another would too
            said = self._newest
            if time.monotonic() > self._deadline:
                raise self._too_late(cause, said)
        while True:
            wakeup = self._mailbox.wakeup
            assert wakeup is not None
            wakeup.wait(max(0.0, min(self._pause, self._deadline - time.monotonic())))
            self._pause = min(2 * self._pause, LAST_PAUSE)
            idle()
            try:
                over()
                link = self._attempt(connector, start, watch=watch, over=over, lost=lost, answer=answer)
                self.connections += 1
                self._connected = time.monotonic()
                return link
            except (Unreachable, ConnectionLost, DaemonStopped, MemoryBound) as error:
                # MemoryBound too: our lost session may still hold memory.
                said = error.message
                answer *= 2
            if time.monotonic() > self._deadline:
                raise self._too_late(cause, said)

    def _check_wanted(self) -> None:
        if time.monotonic() >= self._mailbox.closed_at + self._farewell:
            raise GivenUp

    def _attempt(
        self,
        connector: Callable[[], Connector],
        start: Callable[[FeedInfo], Position | None],
        *,
        watch: Callable[[], None],
        over: Callable[[], None],
        lost: Callable[[], LostSession],
        answer: float,
    ) -> Link:
        self.permit.begin(over)
        try:
            opens = connector()
            timeout = min(opens.timeout, max(STEP, self._deadline - time.monotonic()))
            progress = self._on_progress if self._patient else None
            return opens.connect(self._mailbox, start, timeout, watch, lost(), answer, progress)
        finally:
            self.permit.end()

    def _too_late(self, cause: PenstockError, said: str) -> ConnectionLost:
        if self.connections:
            count = "one connection was" if self.connections == 1 else f"{self.connections} connections were"
            said = f"{count} made, but broke before data came; the last error: {said}"
        else:
            said = f"no attempt to reconnect succeeded; the last error: {said}"
        return ConnectionLost(f"{cause.message}. Within {self.seconds:g} s {said}")
