"""Has samples made again while streams are read, and acts on what differs.

A worker reports some of the samples that it makes (worker/verification/spot_checks.py). Another worker makes them again
(worker/tasks/making_again.py). If they differ, the log says so, and a process looks for the cause, as `penstock check`
does. If rows are lost, the stream fails. The end of an epoch waits for its checks, at most for a few seconds.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from penstock_proto import FeedError
from penstock_proto import messages as m
from penstock_proto.status.feed_status import Checks

from ..coordinator import CoordinatorView
from ..coordinator.model import events as on
from ..feed.feed_warnings import MOST_DIFFERENT
from .own_workers import OwnWorkers

MOST_ASKED = 4
"""How many checks one worker may have to make."""

PATIENCE = 5.0
"""How many seconds the end of an epoch waits for a check."""


@dataclass(slots=True)
class _Asked:
    """A check that a worker was asked for. The end of the epoch waits for it `until` that time, or, if that is None, no
    longer."""

    check: m.SpotCheck
    until: float | None


class SpotChecks:
    """The samples that are made again now, and what was found.

    Args:
        coordinator: makes the decisions.
        tell: passes events to it.
        own: sends messages to the daemon's own workers.
        warn: logs a warning about a feed, once.
        find_cause: starts to look for the cause of a difference, at this place and number of the feed.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        tell: Callable[[on.Event], None],
        own: OwnWorkers,
        *,
        warn: Callable[[str], None],
        find_cause: Callable[[str, int, int], None],
    ) -> None:
        self._coordinator = coordinator
        self._tell = tell
        self._own = own
        self._warn = warn
        self._find_cause = find_cause
        self._asked: dict[int, deque[_Asked]] = {}
        """By worker, in the order in which it answers."""
        self._compared: Counter[str] = Counter()
        self._different: Counter[str] = Counter()

    def figures(self, feed: str) -> Checks:
        """Return how many samples of the feed were compared, and how many checks have found a difference."""
        return Checks(samples=self._compared[feed], different=self._different[feed])

    def report(self, worker: int, check: m.SpotCheck) -> None:
        """Ask another worker to make samples again that `worker` has made, if one has time."""
        feed = self._coordinator.feeds.get(check.feed)
        stream = self._coordinator.stream_of(check.run)
        checker = self._checker(worker)
        if feed is None or stream is None or checker is None or self._different[check.feed] >= MOST_DIFFERENT:
            return
        if not self._own.check(checker, structs.replace(check, spec=feed.info.spec)):
            return
        self._asked.setdefault(checker, deque()).append(
            _Asked(check, time.monotonic() + PATIENCE if check.first else None)
        )
        if check.first:
            self._tell(on.CheckBegan(check.run))

    def answered(self, worker: int, answer: m.SpotChecked) -> None:
        """Act on the answer of a worker that has made samples again."""
        asked = self._asked.get(worker)
        if not asked or asked[0].check.run != answer.run:
            return
        check = asked[0].check
        self._compared[check.feed] += check.samples
        if answer.warning:
            self._different[check.feed] += 1
            if self._different[check.feed] == 1:
                self._warn(answer.warning)
                if not check.part:
                    self._find_cause(check.feed, answer.place, answer.number)
        if answer.lost:
            error = FeedError(answer.lost, feed=check.feed)
            self._tell(on.StreamFailed(check.run // m.IDS_PER_STREAM, error))
        self._over(asked.popleft())

    def on_transform_differs(self, message: m.TransformDiffers) -> None:
        """Log that a worker's `batch_transform=` made another batch of the same samples."""
        if message.feed in self._coordinator.feeds:
            self._different[message.feed] += 1
            if self._different[message.feed] == 1:
                self._warn(message.warning)

    def gone(self, worker: int) -> None:
        """Note that the worker's process has ended: it answers no longer."""
        for asked in self._asked.pop(worker, ()):
            self._over(asked)

    def stands(self, worker: int) -> None:
        """Let the ends of epochs no longer wait for this worker's checks: it is in a long call of user code."""
        for asked in self._asked.get(worker, ()):
            self._over(asked)

    def look_at_the_clock(self) -> None:
        """Let the ends of epochs no longer wait for checks that take too long. Called once a second."""
        now = time.monotonic()
        for checks in self._asked.values():
            for asked in checks:
                if asked.until is not None and asked.until < now:
                    self._over(asked)

    def _over(self, asked: _Asked) -> None:
        if asked.until is not None:
            asked.until = None
            self._tell(on.CheckEnded(asked.check.run))

    def _checker(self, worker: int) -> int | None:
        """Return the worker of this host that makes the samples again: another one, if there is one."""
        workers = self._coordinator.workers
        not_now = workers.away | workers.leaving | workers.standing
        ready = [number for number in workers.own if number not in not_now]
        others = [number for number in ready if number != worker]
        if not others and workers.own == [worker]:
            others = ready
        free = [number for number in others if len(self._asked.get(number, ())) < MOST_ASKED]
        return min(free, key=lambda number: (len(self._asked.get(number, ())), -number), default=None)
