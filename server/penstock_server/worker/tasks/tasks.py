"""The worker's work: opens and closes runs as the daemon asks, and makes batches, one small step at a time.

A step makes a batch, or reads some of the samples that must be read before one can be made. User code runs inside these
steps, while splits are listed or samples compared, and when generators are closed.

An error in a run fails that run only. Messages come and go as values: this file knows nothing of connections.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from typing import Protocol, TypeAlias

from penstock_proto import PenstockError, ProtocolError
from penstock_proto import messages as m

from ...feed.combined.feed_kinds import is_shared
from ...feed.options.plan_sizes import segment_count
from ...worker_state.activity import ActivityPage
from ..failures import describe, memory_advice
from ..isolation import helpers
from ..isolation.randomness import GlobalRandomness
from ..lane.lane import LaneRun
from ..reading.lane_batches import LaneBatches
from ..reading.loaded_feed import LoadedFeed
from ..reading.reproducibility import check_reproducibility
from ..reading.split_list import SharedSplits
from ..verification.spot_checks import SpotChecks
from ..verification.transform_checks import TransformChecks
from .batch_maker import BatchMaker, nothing_made
from .listing import answer_listing
from .making_again import make_again
from .memfds import Memfds
from .mixed_feed import check_mixed
from .pooling import pool_rows, transform_rows
from .run import Run, RunOpener
from .scheduler import Job, Scheduler

GATHERING = 0.005
"""Seconds that a shuffled lane waits before a generator starts that runs for several lanes. The daemon starts the lanes
one after another, and each needs samples from the beginning."""

TELL_AGAIN = 1.0
"""Seconds between a busy worker's reports on the use of caches."""

_OfARun: TypeAlias = (
    m.ListSplits | m.StartRun | m.Fill | m.MeasureRows | m.WriteRows | m.PoolRows | m.TransformRows | m.DropRun
)
"""The messages about a run. The run fails if one of them cannot be carried out."""


class Daemon(Protocol):
    """The interface through which tasks report to the daemon."""

    def send(self, message: m.FromWorker, fd: int | None = None) -> None:
        """Send a message, perhaps with a file descriptor, which stays the caller's."""

    def report_failed_run(self, run: int, error: PenstockError) -> None:
        """Report that a run failed. It is closed, with all of its tickets."""


class Tasks:
    """The tasks of one worker.

    Args:
        number: the worker's number, for errors; None if they are done in the trainer's own process.
        feeds: the served feeds, by name.
        memfds: the mapped slots.
        page: the worker's activity page.
        daemon: receives their reports.

    Attributes:
        randomness: the random numbers of this process.
    """

    def __init__(
        self, number: int | None, feeds: dict[str, LoadedFeed], memfds: Memfds, page: ActivityPage, daemon: Daemon
    ) -> None:
        self._number = number
        self._feeds = feeds
        self._memfds = memfds
        self._page = page
        self._daemon = daemon
        self._lists: dict[int, SharedSplits] = {}
        self._runs: dict[int, Run] = {}
        self._revoked: set[int] = set()
        """The runs whose DropRun was read, but not carried out yet."""
        each = [one for feed in feeds.values() for one in (feed, *feed.parts.values())]
        self._passes = [feed.passes for feed in each if is_shared(feed.declared)]
        self._first_splits = [feed.first_split for feed in each]
        self._cached = [feed for feed in each if feed.cache is not None]
        self._told_of_caches = 0.0
        self._gathering = 0.0
        """When the last lane that waits for others starts."""
        self._scheduler = Scheduler[Run](lambda run: run.number // m.IDS_PER_STREAM, lambda run: run.waits)
        self.randomness = GlobalRandomness()
        self._spots = SpotChecks(daemon.send)
        for name, feed in feeds.items():
            if feed.declared.batch_transform is not None:
                feed.transform_checks = TransformChecks(name, daemon.send)
        self._opener = RunOpener(number, self._lists, self.randomness, page, daemon.send, self._spots)
        self._maker = BatchMaker(memfds, daemon.send)

    def step(self) -> bool:
        """Take the next step. Return False if there is nothing to do."""
        job = self._scheduler.next(self._urgent())
        if self._cached and (job is None or time.monotonic() > self._told_of_caches + TELL_AGAIN):
            self._tell_of_caches()
        helpers.of_this_process.settle(now=job is None)
        if job is None:
            return False
        self._page.works_on(job.run.number)
        began = job.run.began = time.monotonic()
        try:
            next(job.steps)
        except StopIteration:
            self._scheduler.done(job)
        except Exception as error:
            self.fail(job.run.number, None, error)
        ended = time.monotonic()
        job.run.seconds += ended - began
        self._spots.on_work_done(ended - began)
        self._scheduler.on_step(job, began, ended)
        self._page.works_on(-1)
        return True

    def _urgent(self) -> Callable[[Run], bool] | None:
        """Return which run goes on first, if a pass keeps much for it."""
        for passes in self._passes:
            if (number := passes.urgent) is not None:
                return lambda run: run.number == number
        return None

    def take(self, message: m.ToWorker, fd: int | None = None) -> None:
        """Carry out `message`. Take over `fd`."""
        before = self._page.works_on(getattr(message, "run", -1))
        try:
            self._take(message, fd)
        except Exception as error:
            if not isinstance(message, _OfARun):
                raise
            self.fail(message.run, getattr(message, "feed", None), error)
        self._page.works_on(before)  # not after an exception that ends this process

    def revoke(self, run: int) -> None:
        """Write no more rows for this run: a DropRun for it has come, after other messages that still wait."""
        self._revoked.add(run)

    def fail(self, run: int, feed: str | None, error: Exception) -> None:
        """Report `error`, and close the run with all of its tickets."""
        if not isinstance(error, PenstockError):
            cause = error
            error = PenstockError(
                f"the worker failed while it served this stream: it {describe(cause)}"
                + (memory_advice() if isinstance(cause, MemoryError) else ""),
                remote_traceback="".join(traceback.format_exception(cause)),
            )
            error.__cause__ = cause
        error.feed = error.feed or feed
        error.worker = self._number
        opened = self._runs.get(run)
        if opened is not None:
            error.feed = opened.feed.plan.name
            self._close(opened)
        self._daemon.report_failed_run(run, error)

    @property
    def patience(self) -> float | None:
        """Seconds after which a worker without work calls `tidy`, and has work perhaps; None: never."""
        times = [left for split in self._first_splits if (left := split.left) is not None]
        if (left := self._gathering - time.monotonic()) > 0:
            times.append(left)
        return min(times, default=None)

    def tidy(self) -> None:
        """End the generators that were kept for lanes, and that no lane of this worker has read in time."""
        for split in self._first_splits:
            if split.left == 0:
                split.drop()

    def close(self) -> None:
        """Close all runs: end their generators."""
        for run in self._runs.values():
            run.close()
        for split in self._first_splits:
            split.drop()
        self._tell_of_caches()

    def _tell_of_caches(self) -> None:
        """Report to the daemon the reads from caches and the writes to them."""
        self._told_of_caches = time.monotonic()
        for feed in self._cached:
            assert feed.cache is not None
            said = feed.cache.counters.take(feed.plan.name, feed.component or "")
            if said is not None:
                self._daemon.send(said)

    def _take(self, message: m.ToWorker, fd: int | None) -> None:
        match message:
            case m.Fill():
                self._queue(message)
            case m.MeasureRows() | m.WriteRows():
                self._leftover(message)
            case m.StartRun():
                self._start_run(message)
            case m.DropRun():
                self._drop(message.run)
            case m.PoolRows():
                self._pool_rows(message)
            case m.TransformRows():
                self._transform_rows(message)
            case m.ListSplits():
                answer_listing(message, self._feeds[message.feed], self.randomness, self._page, self._daemon.send)
            case m.Compare():
                self._compare(message)
            case m.SpotCheck():
                feed = self._feeds[message.feed]
                self._daemon.send(make_again(message, feed, self._lists, self.randomness, self._page))
            case m.ShareSplits():
                fd = _needed(fd, message)
                try:
                    self._lists[message.splits] = SharedSplits(fd, message.nbytes)
                finally:
                    os.close(fd)
            case m.ForgetSplits():
                self._lists.pop(message.splits, None)
            case m.Map():
                self._memfds.add(message.memfd, message.nbytes, _needed(fd, message))
            case m.Unmap():
                self._memfds.remove(message.memfd)

    def _start_run(self, message: m.StartRun) -> None:
        run = self._runs[message.run] = self._opener.open(message, self._feeds[message.feed])
        if self._number is not None and any(source.begins_pass for source in run.sources):
            run.starts = self._gathering = time.monotonic() + GATHERING

    def _pool_rows(self, message: m.PoolRows) -> None:
        feed = self._feeds[message.feed]
        if message.spec is not None:
            feed.learn(message.spec, message.sample_spec)
        if message.run not in self._revoked:  # otherwise the daemon only waits until nothing writes to the slot
            pool_rows(message, feed, self._memfds, self._transforms(feed, message.run))
        self._daemon.send(m.RowsWritten(run=message.run, ticket=message.ticket))

    def _transform_rows(self, message: m.TransformRows) -> None:
        feed = self._feeds[message.feed]
        if message.spec is not None:
            feed.learn(message.spec, message.sample_spec)
        answer: m.RowsWritten | m.NeedRoom = m.RowsWritten(run=message.run, ticket=message.ticket)
        transforms = self._transforms(feed, message.run)
        if transforms is not None and message.run not in self._revoked:
            answer = transform_rows(message, feed, self._memfds, transforms)
        self._daemon.send(answer)

    def _transforms(self, feed: LoadedFeed, run: int) -> LaneBatches | None:
        """Return what transforms the feed's batches of rows from several lanes, for the daemon's run `run`."""
        return LaneBatches(feed, self.randomness, self._page, run) if feed.has_lane_batches else None

    def _compare(self, message: m.Compare) -> None:
        feed = self._feeds[message.feed]
        splits = self._lists.get(message.splits)
        if feed.parts:
            assert splits is not None
            found = check_mixed(feed, splits, message.digests, self.randomness, self._page, message.run)
        else:
            found = check_reproducibility(
                feed,
                splits or range(segment_count(feed.plan) if feed.plan.segment else 0),
                message.index,
                message.digests,
                self.randomness,
                self._page,
                message.run,
            )
        self._daemon.send(m.Compared(run=message.run, warning=found.warning[:1024], unfit=found.unfit[:1024]))

    def _drop(self, number: int) -> None:
        self._revoked.discard(number)
        run = self._runs.pop(number, None)
        if run is None:
            return  # its StartRun failed
        jobs = [] if run.closed else self._scheduler.drop(run)  # if it failed, its tickets are gone with it
        if run.waiting is not None:
            self._daemon.send(nothing_made(number, run.waiting))
        self._close(run)
        for job in jobs:
            if job.fills:
                self._daemon.send(nothing_made(number, job.ticket, job.reported))
            else:
                # The daemon only waits for its slot.
                self._daemon.send(m.RowsWritten(run=number, ticket=job.ticket))

    def _close(self, run: Run) -> None:
        run.close()
        self._scheduler.drop(run)

    def _queue(self, fill: m.Fill) -> None:
        run = self._runs.get(fill.run)
        if run is None or run.closed:
            return  # it failed before the daemon knew
        job = Job(run, fill.ticket, fills=True, stripe=fill.stripe, place=fill.first)
        layout = run.feed.visits_layout
        job.steps = self._maker.one(fill, job) if layout is None else self._maker.turn(fill, job, layout)
        waited = run.waiting == fill.ticket
        if waited:
            run.waiting = None
        self._scheduler.add(job, first=waited)

    def _leftover(self, message: m.MeasureRows | m.WriteRows) -> None:
        run = self._runs.get(message.run)
        if run is None or run.closed or message.run in self._revoked:  # the daemon only waits, as for a pool
            self._daemon.send(m.RowsWritten(run=message.run, ticket=message.ticket))
            return
        steps = self._maker.leftover(message, run)
        if isinstance(run.batches, LaneRun) and not run.batches.ended:
            job = Job(run, message.ticket, fills=False)
            job.steps = steps
            self._scheduler.add(job, first=True)
        else:
            next(steps, None)


def _needed(fd: int | None, message: m.Message) -> int:
    if fd is None:
        raise ProtocolError(f"a {type(message).__name__} message without its fd")
    return fd
