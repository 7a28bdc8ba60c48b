"""Turns workers' messages, and their deaths, into events for the coordinator and lines in the log."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from penstock_proto import PenstockError, ProtocolError, StartError
from penstock_proto import messages as m
from penstock_proto.text import named_split
from penstock_proto.transport import codec

from ..consumers.starting_feeds import StartingFeeds
from ..coordinator import CoordinatorView, worker_messages
from ..coordinator.model import commands as do
from ..coordinator.model import events as on
from ..coordinator.model.known_lists import SplitsInfo
from ..coordinator.model.workers import REMOTE
from ..logs.rate_limited_log import RateLimitedLog
from ..worker_state.activity import Activity
from ..worker_state.cache_usage import CacheUsages
from ..worker_state.process_ends import ENDED, INVALID, advice
from ..workers.dropped_samples import DroppedSamples
from ..workers.own_workers import OwnWorkers
from ..workers.spot_checks import SpotChecks
from ..workers.supervisor import Supervisor
from ..workers.to_workers import ToWorkers
from .dispatch import Dispatch

log = logging.getLogger(__name__)


class FromWorkers:
    """Receives the messages of all workers, the daemon's own and those of hosts.

    Args:
        coordinator: makes the decisions.
        dispatch: passes events to it.
        supervisor: the worker processes.
        own: keeps their lists of splits, and has them make samples again.
        to_workers: the ways to all workers.
        feeds: knows which feeds are ready, and logs warnings about them.
        fail: called with the error that keeps the daemon from serving.
        name_of: returns the name of a worker, for the log.
        find_cause: looks for the cause of a difference; see `SpotChecks`.
        stale: returns whether the feeds' code has changed since the daemon was started, if it watches for that.

    Attributes:
        caches: the use of the feeds' caches.
        spot_checks: the samples that are made again.
        dropped: how many samples feeds have dropped.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        dispatch: Dispatch,
        *,
        supervisor: Supervisor,
        own: OwnWorkers,
        to_workers: ToWorkers,
        feeds: StartingFeeds,
        fail: Callable[[PenstockError], None],
        name_of: Callable[[int], str],
        stale: Callable[[], bool],
        find_cause: Callable[[str, int, int], None],
    ) -> None:
        self._coordinator = coordinator
        self._dispatch = dispatch
        self._name_of = name_of
        self._supervisor = supervisor
        self._own = own
        self._to_workers = to_workers
        self._feeds = feeds
        self._fail = fail
        self._stale = stale
        self.caches = CacheUsages(feeds.warn_once)
        self.spot_checks = SpotChecks(coordinator, dispatch.tell, own, warn=feeds.warn_once, find_cause=find_cause)
        self.dropped = DroppedSamples(coordinator)
        self._imports: dict[int, m.Imported] = {}
        self._log = RateLimitedLog(log)
        """For lines that workers may cause often."""

    def heard(self, worker: int, data: bytes, fd: int | None) -> None:
        """Decode and handle a worker's message, perhaps with a file descriptor. Kill the worker if it breaks the
        protocol."""
        try:
            message = codec.from_worker(data)
        except ProtocolError as error:
            text = "worker %d is killed, because it sent an invalid message: %s"
            self._log.error(text, worker, error.message, event="worker_killed", worker=worker)
            if fd is not None:
                os.close(fd)
            self._supervisor.kill(worker, INVALID)
            return
        self.take(worker, message, fd)

    def take(self, worker: int, message: m.FromWorker, fd: int | None = None) -> None:
        """Handle a worker's decoded message, perhaps with a file descriptor."""
        try:
            self._heard(worker, message, fd)
        except Exception as error:
            self._dispatch.stream_failed(getattr(message, "run", 0), error)

    def died(self, worker: int, how: str, doing: Activity | None) -> None:
        """Handle the end of a worker's process. `doing` is its last activity, or None."""
        self.spot_checks.gone(worker)
        blamed = None
        where = ""
        leaving = worker in self._coordinator.workers.leaving  # then the daemon ended it
        if doing is not None and doing.in_user_code and not leaving:
            blamed = doing.run, doing.number, doing.split
        elif doing is not None and doing.works_on >= 0 and not leaving:
            blamed = doing.works_on, -1, ""
        if doing is not None and doing.importing:
            where = f" while it was {doing.split}"
        if doing is not None and (doing.in_user_code or doing.cut_off) and doing.split and not leaving:
            where = f" while it read {doing.split}" if doing.run >= 0 else f" while it was {doing.split}"
        level = logging.INFO if how == ENDED else logging.ERROR
        event = "worker_ended" if how == ENDED else "worker_died"
        fields = {"event": event, "worker": worker, **self._place(blamed[0] if blamed else -1)}
        if blamed and blamed[2]:
            fields["split"] = blamed[2]
        who = self._name_of(worker)
        starting = not self._coordinator.feeds and not self._coordinator.starting.retries
        log.log(
            level, "%s %s%s%s", who, how, where, "" if starting else "; other workers take over its work", extra=fields
        )
        if starting:
            said = f"worker {worker} {how}{where} before it could serve a feed{advice(how)}. The log has its output"
            self._fail(StartError(said))
        with_failures = set(self._coordinator.starting.failing)
        self._dispatch.tell(on.WorkerDied(worker, how, blamed))
        self._feeds.say_what_fails(self._coordinator.starting.failing.keys() - with_failures)

    def given_up(self, worker: int, how: str) -> None:
        """Handle a worker that the supervisor does not start again."""
        self.spot_checks.gone(worker)
        self._dispatch.tell(on.WorkerGone(worker, how))

    def accepted(self, worker: int) -> None:
        """Put a worker to use that has the same feeds as the others, and log warnings about its imports."""
        message = self._imports.pop(worker)
        self._to_workers.way(worker).accepted(worker)
        if any(plan.on_error == "retry" for plan in message.feeds):
            self._supervisor.give_nobody_up()
        for plan in message.feeds:
            for text in plan.warnings:
                self._feeds.warn_once(text)
        if message.tensorflow:
            self._feeds.warn_once(
                "your module imports TensorFlow, and each worker does so on its own, which takes about 250 MB and 3 s: "
                f"keep the generator in a module of its own that does not{_or_earlier(message.shared_until)}"
            )
        fields = {"event": "worker_ready", "worker": worker}
        log.info("%s is ready: its imports took %.2f s", self._name_of(worker), message.imports_seconds, extra=fields)

    def rejected(self, worker: int) -> None:
        """End a worker that has imported other feeds than the daemon serves."""
        served, changed = self._coordinator.feeds, []
        for plan in self._imports.pop(worker).feeds:
            if plan.name in served and plan.contents != served[plan.name].plan.contents:
                changed.append(plan.name)
        why = f"the files of {' and '.join(changed)} (a table, or a folder of images)" if changed else "a module"
        text = f"imported other feeds than the daemon serves, as {why} changed: restart the daemon"
        log.error("worker %d %s", worker, text, extra={"event": "worker_rejected", "worker": worker})
        self._to_workers.way(worker).reject(worker, text)

    def skipped(self, said: do.ReportSkipped) -> None:
        """Log that the rest of a split, or some of its items, are left out."""
        text = "feed %s: the rest of %s is left out after %d samples: %s"
        if self._coordinator.feeds[said.feed].plan.items is not None:
            text = "feed %s, %s, %d samples: %s"
        fields = {"event": "split_skipped", "split": said.split, "traceback": said.traceback, **self._place(said.run)}
        log.warning(text, said.feed, named_split(said.split), said.samples, said.why, extra=fields)

    def look_at_the_clock(self, now: float) -> None:
        """Let the log say how many lines it left out. Called once a second."""
        self._log.look_at_the_clock(now)
        self.spot_checks.look_at_the_clock()

    def _place(self, run: int) -> dict[str, object]:
        """Return the feed, epoch and lane of a run, as fields of a log line, as far as they are known."""
        stream = self._coordinator.stream_of(run) if run >= 0 else None
        if stream is None:
            return {}
        epoch, lane = stream.place_of(run)
        return {"feed": stream.feed.name, "epoch": epoch, "lane": lane}

    def _heard(self, worker: int, message: m.FromWorker, fd: int | None) -> None:
        tell = self._dispatch.tell
        match message:
            case m.Made():
                self.dropped.note(message)
                tell(message)
            case m.NeedRoom() | m.RowsMeasured() | m.RowsWritten():
                tell(message)
            case m.SplitSkipped():
                tell(worker_messages.split_skipped(message))
            case m.TransformDiffers():
                self.spot_checks.on_transform_differs(message)
            case m.CacheUsed():
                self.caches.note(message)
            case m.RunFailed():
                self._run_failed(message)
            case m.SplitsListed():
                self._splits_listed(message, fd)
                fd = None
            case m.Compared():
                if message.warning:
                    self._feeds.warn_once(message.warning)
                log.debug("a first sample was compared with another worker's")
            case m.SpotCheck():
                self.spot_checks.report(worker, message)
            case m.SpotChecked():
                self.spot_checks.answered(worker, message)
            case m.Imported() if worker >= REMOTE and self._stale():
                text = "worker %d is not used: the code of its host is newer than that of the epochs being read"
                log.error(text, worker, extra={"event": "worker_rejected", "worker": worker})
                self._to_workers.way(worker).say(worker, m.Shutdown())
            case m.Imported():
                self._imports[worker] = message
                tell(on.Imported(worker, message.feeds))
            case m.EnvironmentWanted():
                self._environment_wanted(worker, message)
            case m.StartFailed() if self._coordinator.starting.done or self._coordinator.starting.retries:
                error = message.error.error()
                fields = {"event": "worker_failed", "worker": worker, "error": error}
                log.error("%s can no longer start: %s", self._name_of(worker), error, extra=fields)
            case m.StartFailed():
                self._fail(message.error.error())
        if fd is not None:
            os.close(fd)

    def _environment_wanted(self, worker: int, message: m.EnvironmentWanted) -> None:
        names = ", ".join(sorted(message.variables)) or "none"
        if self._coordinator.starting.begun:
            text, fields = (
                "worker %d imported feeds with another env= (%s): a module changed; restart the daemon",
                {
                    "event": "worker_rejected",
                    "worker": worker,
                },
            )
            log.error(text, worker, names, extra=fields)
        elif not self._supervisor.use_environment(worker, message.variables):
            self._fail(
                StartError(
                    f"the feeds' env= differs each time they are imported (this time it sets: {names}), so workers "
                    "cannot be started with it: give it values that are the same in every process"
                )
            )

    def _run_failed(self, message: m.RunFailed) -> None:
        error = message.error.error()
        if message.run >= m.IDS_PER_STREAM:  # otherwise it belongs to the start, which reports it
            place = self._place(message.run)
            feed = self._coordinator.feeds.get(str(place.get("feed")))
            tried_again = feed is not None and feed.plan.on_error == "retry"
            event = "split_retried" if tried_again else "split_failed"
            self._log.error("%s", error, event=event, error=error, **place)
        with_failures = set(self._coordinator.starting.failing)
        self._dispatch.tell(on.RunFailed(message.run, error))
        self._feeds.say_what_fails(self._coordinator.starting.failing.keys() - with_failures)

    def _splits_listed(self, message: m.SplitsListed, fd: int | None) -> None:
        number = 0 if fd is None else self._own.keep_new_list(fd, message.nbytes)
        splits = SplitsInfo(number, message.count, message.digest)
        for text in (*message.warnings, *(message.first.warnings if message.first is not None else ())):
            self._feeds.warn_once(text)
        event = on.SplitsListed(
            message.run, splits, message.spec, message.sample_nbytes, message.first, message.sample_spec
        )
        self._dispatch.tell(event)


def _or_earlier(place: str) -> str:
    """Return what else can be done about an import behind the statement at `place`; "" if that is unknown."""
    return place and (
        f", or import it before {place}: then that is done once for all workers (before it there may be other imports, "
        "definitions, constants and os.environ[...] = '...')"
    )
