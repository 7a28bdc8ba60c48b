"""Starts feeds: one of the daemon's own workers imports them, lists their splits and makes a first sample.

Then they can be read. A feed with on_error="retry" that fails is tried again. If any other feed fails, the daemon does
not start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from msgspec import Struct

from penstock_proto import GeneratorError, PenstockError, ProtocolError, WorkerDied
from penstock_proto.messages import FeedPlan

from .model import commands as do
from .model.events import SplitsListed
from .model.failures import pause
from .model.feeds import ServedFeed
from .model.timers import Timers
from .model.workers import NOBODY, REMOTE, Workers
from .production.first_samples import MOST_SECONDS, FirstSampleChecks
from .stream.budget import Budget


class Failing(Struct, frozen=True):
    """Why a feed cannot be started yet, and how often it was tried."""

    times: int
    error: PenstockError


class Starting:
    """The feeds that cannot be read yet, and the runs that list their splits.

    Args:
        workers: the worker processes.
        budget: tells whether the memory suffices.
        timers: for attempts that wait.
        out: where commands go.

    Attributes:
        feeds: the feeds that can be read, by name.
        failing: the feeds with on_error="retry" that could not be started yet.
        checks: has first samples made a second time.
    """

    def __init__(self, workers: Workers, budget: Budget, timers: Timers, out: Callable[[do.Command], None]) -> None:
        self.feeds: dict[str, ServedFeed] = {}
        self.failing: dict[str, Failing] = {}
        self.checks = FirstSampleChecks(out)
        self._workers = workers
        self._budget = budget
        self._timers = timers
        self._do = out
        self._plans: dict[str, FeedPlan] = {}
        self._listings: dict[int, tuple[int, str]] = {}
        """By run, until the feed is ready: the worker that lists the splits, or NOBODY while the feed waits for its
        next attempt; and the feed."""

    @property
    def names(self) -> Collection[str]:
        """The names of all feeds, in the order of the command line; empty until a worker has imported them."""
        return self._plans.keys()

    @property
    def begun(self) -> bool:
        """Whether a worker has imported the feeds."""
        return bool(self._plans)

    @property
    def done(self) -> bool:
        """Whether all feeds can be read."""
        return bool(self._plans) and len(self.feeds) == len(self._plans)

    @property
    def retries(self) -> bool:
        """Whether a feed is not ready, and all such feeds are tried again when their start fails."""
        return bool(self._listings) and all(
            self._plans[feed].on_error == "retry" for _, feed in self._listings.values()
        )

    @property
    def first_samples(self) -> Mapping[str, do.Compare]:
        """The comparisons that each joining host makes, by feed."""
        return self.checks.of_hosts

    def on_imported(self, worker: int, plans: Iterable[FeedPlan]) -> bool:
        """Note that a worker has imported the feeds. The first one to do so is asked for splits and samples.

        Returns:
            Whether its feeds are those that the first worker imported. A remote worker cannot be the first.
        """
        if list(plans) != list(self._plans.values()) and (self._plans or worker >= REMOTE):
            return False
        if worker >= REMOTE:
            return True
        self.checks.on_worker_ready(worker)
        if self._plans:
            self._check_samples()
            return True
        for run, plan in enumerate(plans):
            self._plans[plan.name] = plan
            self._list(worker, run, plan.name)
        return True

    def lists(self, run: int) -> bool:
        """Whether the run belongs to the start."""
        return run in self._listings

    def on_splits_listed(self, event: SplitsListed) -> None:
        """Make a feed ready: a worker has listed its splits and made its first sample."""
        worker, name = self._listings.pop(event.run)
        self.failing.pop(name, None)
        plan, splits = self._plans[name], event.splits
        spec = plan.spec or event.spec
        if spec is None:
            error = ProtocolError("the worker did not say what a sample looks like", feed=name)
            self._do(do.FailStart(error))
            return
        if event.first is not None and event.first.seconds > MOST_SECONDS:
            self._workers.begin_with(worker)
        static = plan.static_splits or plan.length is not None
        self.checks.on_first_sample(name, event.run, splits.number, not static, event.first, worker)
        feed = ServedFeed(plan, spec, event.sample_nbytes, splits if static else None, event.sample_spec)
        too_small = self._budget.check_start([*self.feeds.values(), feed])
        if too_small is not None and not self._listings:  # otherwise it does not count all feeds yet
            self._do(do.FailStart(too_small))  # the feed is not ready, so those that wait for it are told why
            return
        self.feeds[name] = feed
        if too_small is None:
            self._do(do.FeedReady(name, splits.count))
            self._check_samples()

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Try the feed again later, or end the start: user code failed in the run, or its worker died."""
        _, name = self._listings[run]
        if self._plans[name].on_error != "retry" or not isinstance(error, GeneratorError | WorkerDied):
            self._do(do.FailStart(error))
            return
        error.feed = name
        times = self.failing[name].times + 1 if name in self.failing else 1
        self.failing[name] = Failing(times, error)
        self._listings[run] = NOBODY, name
        self._timers.later(pause(times), lambda: self._retry(run))

    def uses(self, worker: int) -> bool:
        """Whether the worker lists the splits of a feed."""
        return any(lister == worker for lister, _ in self._listings.values())

    def on_worker_died(self, worker: int, how: str) -> None:
        """Handle the end of a worker's process. If the worker was to leave anyway, another one takes over its work."""
        if worker >= REMOTE:  # it has no part in the start
            return
        self.checks.on_worker_away(worker)
        if worker in self._workers.leaving:
            for run, (lister, feed) in list(self._listings.items()):
                if lister == worker:
                    self._list(self._workers.pick_local(0), run, feed)
            return
        if not self._plans or (self._listings and not self.retries):
            error = WorkerDied(f"the worker process {how} before it could serve a feed", worker=worker)
            self._do(do.FailStart(error))
            return
        for run, (lister, _) in list(self._listings.items()):
            if lister == worker:
                self.on_run_failed(run, WorkerDied(f"the worker process that looked at it {how}", worker=worker))

    def _list(self, worker: int, run: int, feed: str) -> None:
        self._listings[run] = worker, feed
        self._do(do.ListSplits(worker, run, feed, 0))

    def _retry(self, run: int) -> None:
        if run in self._listings:
            _, feed = self._listings[run]
            self._list(self._workers.pick_local(self.failing[feed].times), run, feed)

    def _check_samples(self) -> None:
        if self.feeds and not self._listings:
            self.checks.begin(self._workers.own)
