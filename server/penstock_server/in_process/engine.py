"""Makes a stream in the trainer's own process, without a daemon and without worker processes.

The coordinator and the code of one worker run as in a daemon, so the stream is the same. This file passes messages
between them. Everything happens inside `work`, on the calling thread, batch by batch, and only while the consumer
waits. So user code runs under the user's debugger and profiler, and its errors appear in the user's traceback.

Slots are memory of this process. An error of user code has the original exception as its cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto import FeedError, GeneratorError, MemoryBound, PenstockError
from penstock_proto import messages as m
from penstock_proto.batches.position import Position
from penstock_proto.text import named_split

from ..coordinator import Coordinator, worker_messages
from ..coordinator.model import commands as do
from ..coordinator.model import events as on
from ..coordinator.model.failures import ALL
from ..coordinator.model.known_lists import SplitsInfo
from ..coordinator.model.memory import MANY
from ..coordinator.model.open_request import OpenRequest
from ..feed.feed_warnings import MOST_DIFFERENT, mixing_warning
from ..worker.failures import letting_through
from ..worker.isolation import breakpoints, helpers
from ..worker.isolation.randomness import put_states, seeds, take_states
from ..worker.reading.loaded_feed import LoadedFeed
from ..worker.tasks.memfds import Memfds
from ..worker.tasks.tasks import Tasks
from ..worker_state.activity import ActivityPage
from ..worker_state.cache_usage import warning_of

UNLIMITED = 2**62
"""Memory limit in bytes if the user sets none."""

CONSUMER, WORKER = 1, 0
"""The numbers of the only consumer and the only worker."""

Said: TypeAlias = do.Said | tuple[m.Slab, Any] | PenstockError
"""Output for the consumer: a message, a slab with its slot, or the error with which the stream failed."""

_warned: set[str] = set()

log = logging.getLogger("penstock")


class InProcess:
    """Makes one stream of one feed.

    Args:
        feed: the feed.
        room: returns memory for a slot of the given number of bytes: any object that keeps the memory alive, and the
            bytes as an array, 64-byte aligned and writable.
        memory: limit of the slots and shuffle blocks in bytes; None: no limit.

    Raises:
        KeyboardInterrupt, BdbQuit: the user stopped user code.
        PenstockError: the feed cannot be served.
    """

    def __init__(
        self,
        feed: LoadedFeed,
        room: Callable[[int], tuple[Any, npt.NDArray[np.uint8]]],
        memory: int | None = None,
    ) -> None:
        self._name = feed.plan.name
        self._retries = feed.plan.on_error == "retry"
        self._room = room
        self._memfds = Memfds()
        self._coordinator = Coordinator(workers=1, memory=memory or UNLIMITED, slots=MANY)
        self._tasks = Tasks(None, {self._name: feed}, self._memfds, ActivityPage(), self)
        self._slots: dict[int, Any] = {}
        self._lists = 0
        self._listings: deque[m.ListSplits] = deque()
        self._checks: deque[m.SpotCheck] = deque()
        self._differences = 0
        self._events: deque[on.Event] = deque()
        self._commands: deque[do.Command] = deque()
        self._said: deque[Said] = deque()
        self._failure: PenstockError | None = None
        with self._as_a_worker():
            self._tell(on.Imported(WORKER, (feed.plan,)))
            while self._name not in self._coordinator.feeds:
                self._next(inf)
                if self._failure is not None:
                    cause = self._failure.__cause__
                    raise self._failure.with_traceback(None if cause is None else cause.__traceback__)
        for text in feed.plan.warnings:
            _warn_once(text)

    @property
    def info(self) -> m.FeedInfo:
        """The feed's description for the consumer."""
        feed = self._coordinator.feeds[self._name]
        return feed.plan.with_classes(feed.info)

    def open(self, position: Position | None) -> None:
        """Begin the stream at `position`, or at epoch 0 if it is None.

        Raises:
            PenstockError: it cannot begin there, or there is too little memory.
        """
        ask = OpenRequest(credit=1, credit_bytes=UNLIMITED, quota=0, position=position)
        with self._as_a_worker():
            self._tell(on.Open(CONSUMER, self._name, ask))
        while self._said:
            said = self._said.popleft()
            if isinstance(said, PenstockError):
                raise said

    def hear(self, message: m.ClientMessage) -> None:
        """Take a message of the consumer. The next `work` acts on it."""
        match message:
            case m.Begin():
                self._events.append(on.Begin(CONSUMER, message.epoch))
            case m.Ack():
                self._events.append(on.Acknowledge(CONSUMER, message.handed, message.released, message.ended))
            case m.Leave():
                self._events.append(on.Leave(CONSUMER, message.epoch, message.handed))
            case m.Close():
                self._events.append(on.Close(CONSUMER, message.handed))

    def work(self, seconds: float) -> Iterator[Said]:
        """Work until there is output for the consumer, or for about `seconds`. Yield the output.

        A step takes as long as its user code. Afterwards the global random generators have their former states.

        Raises:
            KeyboardInterrupt, BdbQuit: the user stopped user code. The stream cannot go on here; another InProcess can
                make it from the consumer's position.
        """
        until = time.monotonic() + seconds
        with self._as_a_worker():
            self._settle()
            while not self._said and time.monotonic() < until:
                self._next(until)
        while self._said:
            yield self._said.popleft()

    def close(self) -> None:
        """End the generators."""
        with self._as_a_worker():
            self._tasks.close()

    # --- called by the worker's code ---

    def send(self, message: m.FromWorker, fd: int | None = None) -> None:
        """Note a message of the worker's code. The coordinator gets it after the step."""
        match message:
            case m.Made() | m.NeedRoom() | m.RowsMeasured() | m.RowsWritten():
                self._events.append(message)
            case m.SplitSkipped():
                self._events.append(worker_messages.split_skipped(message))
            case m.CacheUsed() if message.problem:
                _warn_once(warning_of(message))
            case m.TransformDiffers():
                _warn_once(message.warning)
            case m.SpotCheck():
                self._checks.append(message)
            case m.SpotChecked():
                self._checked(message)
            case m.SplitsListed():
                self._events.append(self._listed(message, fd))

    def report_failed_run(self, run: int, error: PenstockError) -> None:
        """Note that a run failed."""
        if error.__cause__ is not None:
            error.remote_traceback = None  # the cause has the traceback
        if self._retries and isinstance(error, GeneratorError):
            log.warning('%s\nIt is tried again, as the feed has on_error="retry"', str(error))
        self._events.append(on.RunFailed(run, error))

    def _listed(self, message: m.SplitsListed, fd: int | None) -> on.SplitsListed:
        number = 0
        if fd is not None:
            number = self._lists = self._lists + 1
            self._tasks.take(m.ShareSplits(number, message.nbytes), os.dup(fd))
        for text in (*message.warnings, *(message.first.warnings if message.first is not None else ())):
            _warn_once(text)
        splits = SplitsInfo(number, message.count, message.digest)
        return on.SplitsListed(
            message.run, splits, message.spec, message.sample_nbytes, message.first, message.sample_spec
        )

    def _check(self, check: m.SpotCheck) -> None:
        """Make samples again, unless the user debugs the feed. This process is the only worker, so it sees only what
        differs from call to call."""
        if self._differences < MOST_DIFFERENT and sys.gettrace() is None:
            with breakpoints.ignored():
                self._tasks.take(check)

    def _checked(self, answer: m.SpotChecked) -> None:
        if answer.warning:
            self._differences += 1
            if self._differences == 1:
                _warn_once(answer.warning)
        if answer.lost:
            error = FeedError(answer.lost, feed=self._name)
            self._events.append(on.StreamFailed(answer.run // m.IDS_PER_STREAM, error))

    # --- internals ---

    @contextlib.contextmanager
    def _as_a_worker(self) -> Iterator[None]:
        """Separate the global random states of user code from the trainer's, and let the user interrupt user code."""
        states = take_states()
        helpers.of_this_process.only_this_thread = True
        helpers.of_this_process.others()
        try:
            with letting_through(KeyboardInterrupt, BdbQuit):
                yield
        finally:
            self._tasks.randomness.use(None)
            put_states(states, seeds("trainer"))

    def _next(self, until: float) -> None:
        """Do the next task: a retry that is due, a step, or a list of splits. If there is none, wait until a retry is
        due, at most until the time `until`."""
        due = self._coordinator.next_tick
        if due is not None and due <= time.monotonic():
            self._tell(on.Tick())
        elif self._checks:
            self._check(self._checks.popleft())
            self._settle()
        elif self._tasks.step():
            self._settle()
        elif self._listings:  # last, so that an epoch's splits are listed when its first batch is needed
            self._tasks.take(self._listings.popleft())
            self._settle()
        else:
            assert due is not None, "the consumer waits, and there is nothing to do"
            time.sleep(max(0.0, min(due, until) - time.monotonic()))

    def _tell(self, event: on.Event) -> None:
        self._events.append(event)
        self._settle()

    def _settle(self) -> None:
        """Tell the coordinator what has happened, and carry out its commands in order."""
        while self._commands or self._events:
            if self._commands:
                self._carry_out(self._commands.popleft())
            else:
                self._commands.extend(self._coordinator.handle(self._events.popleft(), time.monotonic()))

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.FindSlot():
                self._find_slot(command.ticket, command.nbytes)
            case do.Free():
                del self._slots[command.ticket]
                self._memfds.remove(command.ticket)
            case do.StartRun():
                one_by_one = msgspec.structs.replace(command, careful=ALL)
                self._tasks.take(worker_messages.start_run(one_by_one, self.info.spec))
            case do.Fill():
                self._tasks.take(worker_messages.fill(command, command.slot, self._nbytes(command.slot)))
            case do.MeasureRows():
                self._tasks.take(worker_messages.measure_rows(command))
            case do.WriteRows():
                self._tasks.take(worker_messages.write_rows(command, command.ticket, self._nbytes(command.ticket)))
            case do.PoolRows():
                sources = [ticket for ticket, _ in command.sources]
                nbytes = self._nbytes(command.ticket)
                self._tasks.take(worker_messages.pool_rows(command, command.ticket, nbytes, sources, self.info.spec))
            case do.TransformRows():
                nbytes = self._nbytes(command.ticket)
                self._tasks.take(worker_messages.transform_rows(command, command.ticket, nbytes, self.info.spec))
            case do.DropRun():
                self._tasks.take(m.DropRun(command.run))
            case do.ListSplits():
                self._listings.append(m.ListSplits(command.run, command.feed, command.epoch))
            case do.ForgetSplits():
                self._tasks.take(m.ForgetSplits(command.splits))
            case do.SendSlab():
                self._said.append((worker_messages.slab(command, 0), self._slots[command.ticket][0]))
            case do.Tell(_, m.Failed()):
                error = self._coordinator.stream_read_by(self._coordinator.consumers[CONSUMER]).error
                assert error is not None
                self._said.append(error)
            case do.Tell():
                self._said.append(command.message)
            case do.Refuse():
                self._said.append(command.error)
            case do.FailStart():
                self._failure = command.error
            case do.FeedReady():
                feed = self._coordinator.feeds[command.feed]
                if command.splits and (text := mixing_warning(feed.plan, command.splits, feed.info.pool)):
                    _warn_once(text)
            case do.ReportSkipped():
                text = "feed %s: the rest of %s is left out after %d samples: %s"
                if self._coordinator.feeds[self._name].plan.items is not None:
                    text = "feed %s, %s, %d samples: %s"
                log.warning(text, command.feed, named_split(command.split), command.samples, command.why)
            case do.ReportBug():
                log.error("penstock failed: please report this as a bug", exc_info=command.error)
            case do.AcceptWorker() | do.Compare():
                pass  # this process is the only worker, so there is nothing to compare
            case _:
                raise AssertionError(f"one consumer in its own process needs no {command}")

    def _find_slot(self, ticket: int, nbytes: int) -> None:
        try:
            slot = self._room(nbytes)
        except MemoryError:
            error = MemoryBound(f"there is no memory for a slot of {nbytes} bytes: make the batches smaller")
            self._events.append(on.NoSlot(ticket, error))
            return
        self._slots[ticket] = slot
        self._memfds.put(ticket, slot[1])
        self._events.append(on.SlotFound(ticket))

    def _nbytes(self, ticket: int) -> int:
        return int(self._slots[ticket][1].nbytes)


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)
