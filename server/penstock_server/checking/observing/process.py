"""A process that runs user code for `penstock check`, as a worker would, and reports facts about it.

`python -m penstock_server.checking.observing.process FD ACTIVITY_FD DUMP_FD TASK`, where TASK is JSON (messages.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_proto import FeedError, GeneratorError, PenstockError, SpecError
from penstock_proto.messages import ErrorReport
from penstock_proto.text import printable
from penstock_proto.transport import seqpacket

from ...feed.combined.feed_kinds import takes_rng
from ...feed.combined.zipped import zip_warnings
from ...feed.objects.indexables import is_keras
from ...feed.options.plan_sizes import segment_count
from ...feed.options.transforms import checked_transforms
from ...machine import orphans
from ...machine.environment import missing
from ...targets import saved_sources, world
from ...worker.isolation import helpers
from ...worker.isolation.randomness import GlobalRandomness
from ...worker.isolation.shared_settings import changed_since, shared
from ...worker.process import signals, start
from ...worker.reading.first_sample import Probe
from ...worker.reading.loaded_feed import LoadedFeed
from ...worker.reading.split_list import list_splits, write_list
from ...worker_state.activity import ActivityPage
from . import debugging, frames, gpu, messages, state_watch
from .cpu_time import CpuWatch
from .imports import ImportWatch, files_opened, open_paths, resident
from .plain_loop import carried, undivided
from .reading import Reader
from .recording import Recorder, load
from .sources import GLOBAL, SEEDED, Spy

_REPORT_SECONDS = 0.1

_SOURCE_SECONDS = 0.5
"""How long the generator is timed alone."""

_NAMED = 3
"""Splits without samples that are named."""


class Process:
    """Carries out a task.

    Args:
        task: the task.
        connection: the socket to the command.
        page: shows the command what user code is doing.
    """

    def __init__(self, task: messages.Task, connection: socket.socket, page: ActivityPage) -> None:
        self._task = task
        self._connection = connection
        self._page = page
        self._randomness = GlobalRandomness()
        self._spy = Spy(task.fixes) if task.spies else None
        self._doing = "importing"
        self._reader: Reader | None = None
        self._said = 0.0

    def run(self) -> None:
        """Import the feed, read it, and report."""
        if self._spy is not None:
            self._spy.install()
        watch = ImportWatch()
        try:
            feed = self._import(watch)
            if feed is not None:
                _refuse_mix(feed)
                self._read(feed, watch)
        except PenstockError as error:
            self._failed(error)

    def _say(self, report: messages.Report) -> None:
        seqpacket.send(self._connection, messages.encode(report))

    def _import(self, watch: ImportWatch) -> LoadedFeed | None:
        before, files = resident(), open_paths()
        began = time.monotonic()
        self._page.importing(f"importing {self._task.target}")
        saved_sources.use()  # a daemon looks for the cause of a difference
        served = not world.enter([self._task.target])
        world.leave_fd()
        loaded = start.load_feeds([self._task.target], served=served)
        variables = missing((name, dict(one.declared.env or {})) for name, one in loaded.items())
        self._page.leave()
        if variables is not None:
            self._say(messages.Wanted(variables))
            return None
        helpers.of_this_process.others()
        (feed,) = loaded.values()
        transforms = checked_transforms(feed.declared.transform)
        self._say(
            messages.Imported(
                plan=feed.plan,
                seconds=time.monotonic() - began,
                nbytes=max(0, resident() - before),
                libraries=watch.libraries(),
                files=files_opened(files),
                keras=is_keras(feed.declared.generate),
                takes_rng=takes_rng(feed.declared) or any(transform.takes_rng for transform in transforms),
            )
        )
        return feed

    def _read(self, feed: LoadedFeed, watch: ImportWatch) -> None:
        imported = {library.name for library in watch.libraries()}
        splits = self._look(feed)
        self._doing = "reading"
        if self._task.order == messages.PLAIN:
            self._compare(feed, splits)
            return
        before = state_watch.snapshot() if self._spy is not None else {}
        settings = shared(random=True)
        states = _states()
        if self._spy is not None:
            self._spy.seed_libraries()
        folder = Path(self._task.folder)
        other = load(folder / self._task.repeats) if self._task.repeats else None
        self._reader = reader = Reader(
            feed, splits, self._randomness, self._page, Recorder(feed, other), self._progress, self._skipped
        )
        failure: PenstockError | None = None
        watch_cpus = CpuWatch()
        try:
            if self._task.order == messages.IN_LANES:
                reader.in_lanes(self._task.seconds)
            elif other is not None:
                reader.backwards(other, self._task.seconds)
            else:
                reader.alone(self._task.place, self._task.count, self._task.seconds)
        except PenstockError as error:
            failure = error
        used_cpus = watch_cpus.used()
        changed = (*changed_since(settings), *state_watch.changed(before)) if self._spy is not None else ()
        used = {} if self._spy is None else dict(self._spy.used)
        for name in _changed(states):
            used[messages.Source(name)] = 1
        reader.recording.save(folder / self._task.name)
        if failure is not None:
            self._failed(failure)
        reader.close()
        helpers.of_this_process.settle(now=True)
        self._say(
            messages.Done(
                samples=reader.recording.samples,
                seconds=reader.seconds,
                undivided_seconds=reader.undivided_seconds,
                cpu_seconds=reader.cpu_seconds + used_cpus.helpers,
                others=used_cpus.others,
                whole=reader.whole and failure is None,
                gpu=gpu.used(),
                late=tuple(library for library in watch.libraries() if library.name not in imported),
                used=tuple(sorted(used, key=lambda source: -used[source]))[:64],
                changed=changed,
                processes=helpers.of_this_process.left,
                started=helpers.of_this_process.most,
                empty=len(reader.empty),
                without_samples=tuple(reader.empty[:_NAMED]),
            )
        )

    def _compare(self, feed: LoadedFeed, splits: Any) -> None:
        """Compare with a plain loop over the generator."""
        self._page.enter(0, 0, "a plain loop over the generator")
        found = carried(feed, splits, self._randomness, self._task.seconds)
        whole = undivided(feed, splits, self._randomness, _SOURCE_SECONDS)
        self._page.leave()
        orphans.kill_all(_REPORT_SECONDS)  # this process ends now, and nothing of it may go on
        self._say(messages.Done(0, 0.0, 0.0, True, messages.Gpu(), (), carried=found, undivided=whole))

    def _look(self, feed: LoadedFeed) -> Any:
        """List the splits, and look at a first sample, as a worker does when the daemon starts. Return the splits."""
        self._doing = "listing"
        plan = feed.plan
        splits: Any = None
        digest = b""
        if plan.segment is not None:
            splits = range(segment_count(plan))
        elif plan.length is None:
            splits = list_splits(feed.declared, plan, 0, self._randomness, self._page, 0)
            fd, _, digest = write_list(splits)
            os.close(fd)
        self._doing = "looking"
        if self._task.spec is not None:
            feed.learn(self._task.spec)
        if self._task.spec is not None and not feed.has_lane_batches:
            nbytes = 0
        else:
            probe = Probe(feed, self._randomness, self._page, 0)
            spec, nbytes = probe.look_at_item() if plan.length is not None else probe.look_at_splits(splits, 0)
            if spec is not None:
                feed.learn(spec)
        warnings = feed.first.warnings if feed.first is not None else ()
        if not plan.static_splits:  # otherwise the plan has these warnings already
            warnings += zip_warnings(feed.declared, plan.name)
        count = plan.length if plan.length is not None else len(splits)
        assert feed.spec is not None
        self._say(messages.Looked(feed.spec, nbytes, count, digest, warnings))
        return splits

    def _progress(self, samples: int) -> None:
        now = time.monotonic()
        if now - self._said > _REPORT_SECONDS:
            self._said = now
            self._say(messages.Progress(samples))

    def _skipped(self, place: str, samples: int, error: GeneratorError) -> None:
        self._say(messages.Skipped(place, samples, error.message[:1000]))

    def _failed(self, error: PenstockError) -> None:
        generator = None if self._reader is None else self._reader.generator
        if self._task.debugs:
            self._say(messages.Debugging(True))
            debugging.debug(error, generator)
            self._say(messages.Debugging(False))
        site = _site(error)
        if not site and isinstance(error, SpecError) and (frame := getattr(generator, "gi_frame", None)) is not None:
            site = frames.site(frame)
        self._say(messages.Failed(self._doing, ErrorReport.of(error), printable(site)[:500]))


def _refuse_mix(feed: LoadedFeed) -> None:
    """Raise a FeedError if the feed is a mix: the check reads split by split, and a mix has no splits of its own."""
    if feed.parts:
        raise FeedError(
            f"penstock check reads the splits of one feed, but {feed.plan.name} draws from "
            f"{len(feed.parts)} ({', '.join(feed.parts)}): check each of these on its own"
        )


def _site(error: PenstockError) -> str:
    """Return the user's line that raised, or an empty text."""
    found, site = error.__cause__, ""
    while found is not None and not site:
        traceback = found.__traceback__
        while traceback is not None:
            if frames.is_users(traceback.tb_frame):
                code = traceback.tb_frame.f_code
                where = ", at import" if code.co_name == "<module>" else f" in {code.co_name}"
                site = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}{where}"
            traceback = traceback.tb_next
        found = found.__cause__
    return site


def _states() -> dict[str, str]:
    """Return the states of the random generators that Penstock seeds, for each loaded library."""
    reads = {
        "random": lambda module: module.getstate(),
        "numpy.random": lambda module: module.get_state(legacy=False),
        "torch": lambda module: module.default_generator.get_state().tolist(),
    }
    return {name: str(reads[name](sys.modules[name])) for name in GLOBAL if name in sys.modules}


def _changed(states: dict[str, str]) -> list[str]:
    """Return the libraries whose random state user code may have used: the state has changed, or cannot be read."""
    now = _states()
    drawn = [name for name in states if now[name] != states[name]]
    return drawn + [name for name in SEEDED if name not in GLOBAL and name in sys.modules]


def main(arguments: Sequence[str]) -> int:
    """Run the process; return its exit status."""
    fd, activity_fd, dump_fd = map(int, arguments[:3])
    task = msgspec.json.decode(arguments[3], type=messages.Task)
    connection = socket.socket(fileno=fd)
    for descriptor in (fd, activity_fd, dump_fd):
        os.set_inheritable(descriptor, False)
    start.end_with_the_daemon(connection, "penstock-check")
    orphans.adopt()
    if not task.debugs:
        start.quiet()
        signals.restore_in_children()
    faulthandler.enable(dump_fd, all_threads=False)
    faulthandler.register(signal.SIGUSR2, dump_fd, all_threads=False)
    Process(task, connection, ActivityPage.inherited(activity_fd, ticks=True)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    orphans.kill_all(_REPORT_SECONDS)  # once this process has ended, the command no longer finds them
    os._exit(0)  # threads that user code left running must not keep this process alive


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
