"""Dispatch: passes events to the coordinator, and carries out its commands one by one, in order.

A command that fails makes its stream fail. The commands after it are still carried out: they concern other streams, or
free the slots of this one. If a failed command concerns no stream, the daemon ends, because its state is no longer
known. That can happen only while feeds are made ready, which no peer can influence.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..consumers.sessions import Sessions
from ..coordinator import Coordinator, a_bug
from ..coordinator.vocabulary import commands as do
from ..coordinator.vocabulary import events as on
from ..logs.bugs import Bugs
from ..shared_memory.kept import KeptBatches
from ..shared_memory.slots import Slots
from ..workers.to_workers import ToWorkers
from .group_file import GroupFile

_DEBUG = os.environ.get("PENSTOCK_DEBUG") == "1"
"""Whether to check the coordinator's invariants after each event, which takes time."""


class Dispatch:
    """The loop around the coordinator.

    Args:
        coordinator: makes the decisions.
        bugs: notes unexpected errors.
        feed_ready: called with the name of a feed that can be read now, and its number of splits.
        accepted: called with the number of a worker that has imported the same feeds as the daemon serves.
        rejected: called with the number of a worker that has imported other feeds than those.
        skipped: called when the rest of a split is skipped.
        fail_start: called with the error that keeps a feed from being served.
        idle: called when all commands are carried out.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        bugs: Bugs,
        feed_ready: Callable[[str, int], None],
        accepted: Callable[[int], None],
        rejected: Callable[[int], None],
        skipped: Callable[[do.ReportSkipped], None],
        fail_start: Callable[[PenstockError], None],
        idle: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._bugs = bugs
        self._feed_ready = feed_ready
        self._accepted = accepted
        self._rejected = rejected
        self._skipped = skipped
        self._fail_start = fail_start
        self._idle = idle
        self._commands: deque[do.Command] = deque()
        self._carrying_out = False
        self._halted = False
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at = 0.0

    def connect(
        self,
        *,
        slots: Slots,
        sessions: Sessions,
        to_workers: ToWorkers,
        kept: KeptBatches,
        group_file: GroupFile | None,
    ) -> None:
        """Connect the parts that carry out commands."""
        self._slots = slots
        self._sessions = sessions
        self._to_workers = to_workers
        self._kept = kept
        self._group_file = group_file

    def halt(self) -> None:
        """Carry out no further commands."""
        self._halted = True
        if self._tick is not None:
            self._tick.cancel()

    def tell(self, event: on.Event) -> None:
        """Tell the coordinator of an event, and carry out its commands."""
        if self._halted:
            return
        self._commands.extend(self._coordinator.handle(event, time.monotonic()))
        if _DEBUG:
            for said in self._coordinator.check():
                self._bugs.note(AssertionError(f"after {event}: {said}"))
        if self._carrying_out:  # the outer call carries out these commands too
            return
        self._carrying_out = True
        try:
            while self._commands and not self._halted:
                command = self._commands.popleft()
                try:
                    self._carry_out(command)
                except Exception as error:
                    self._failed(command, error)
        finally:
            self._carrying_out = False
        if self._group_file is not None:
            self._group_file.idle()
        self._slots.trim()
        self._schedule_tick()
        self._idle()

    def _schedule_tick(self) -> None:
        due = self._coordinator.next_tick
        if self._tick is not None and (due is None or due != self._tick_at):
            self._tick.cancel()
            self._tick = None
        if self._tick is None and due is not None and not self._halted:
            self._tick_at = due
            seconds = max(0.0, due - time.monotonic())
            self._tick = asyncio.get_running_loop().call_later(seconds, self._ticks)

    def _ticks(self) -> None:
        self._tick = None
        self.tell(on.Tick())

    def _carry_out(self, command: do.Command) -> None:
        match command:
            case do.FindSlot():
                self._slots.request(command)
            case do.Fill():
                self._to_workers.fill(command, self._slots.memfd(command.ticket))
            case do.MeasureRows():
                self._to_workers.measure_rows(command)
            case do.WriteRows():
                self._to_workers.write_rows(command, self._slots.memfd(command.ticket))
            case do.PoolRows():
                memfds = [self._slots.memfd(ticket) for ticket in (command.ticket, *dict(command.sources))]
                self._to_workers.pool_rows(
                    command, memfds[0], memfds[1:], self._coordinator.feeds[command.feed].info.spec
                )
            case do.SendSlab():
                self._sessions.deliver(command, self._slots.memfd(command.ticket))
            case do.Copy():
                self._kept.bring(command.source, lambda whole: self._slots.copy(command))  # a Copy must be answered
            case do.Remade():
                self._kept.there(command.ticket, command.whole)
            case do.Free():
                self._kept.freed(command.ticket)
                self._slots.free(command.ticket)
            case do.StartRun():
                self._to_workers.start_run(command, self._coordinator.feeds[command.feed].info.spec)
            case do.DropRun():
                self._to_workers.say(command.worker, m.DropRun(command.run))
            case do.Tell():
                self._sessions.send(command.consumer, command.message)
            case do.Refuse():
                self._sessions.refuse(command.consumer, command.error)
            case do.SaveGroup() | do.ForgetGroup():
                assert self._group_file is not None
                self._group_file.carry_out(command)
            case do.ListSplits():
                self._to_workers.say(command.worker, m.ListSplits(command.run, command.feed, command.epoch))
            case do.Compare():
                self._to_workers.compare(command)
            case do.ForgetSplits():
                self._to_workers.forget_list(command.splits)
            case do.AcceptWorker():
                self._accepted(command.worker)
            case do.RejectWorker():
                self._rejected(command.worker)
            case do.Retire():
                self._to_workers.retire(command.worker)
            case do.KillWorker():
                self._to_workers.kill(command.worker)
            case do.FeedReady():
                self._feed_ready(command.feed, command.splits)
            case do.ReportSkipped():
                self._skipped(command)
            case do.FailStart():
                self._fail_start(command.error)
            case do.ReportBug():
                self._bugs.note(command.error)

    def _failed(self, command: do.Command, error: Exception) -> None:
        """Fail the stream of the command."""
        match command:
            case do.StartRun() if isinstance(error, PenstockError):  # the worker was not told
                self.tell(on.RunFailed(command.run, error))
            case do.SendSlab() | do.Tell():
                stream = self._sessions.stream_of(command.consumer)
                if stream is None:
                    self._bugs.note(error)
                else:
                    self.tell(on.StreamFailed(stream, error))
            case do.Copy():
                self._bugs.note(error)
                self.tell(on.NoSlot(command.ticket, a_bug(error)))
            case do.FindSlot() | do.Free() | do.Fill() | do.MeasureRows() | do.WriteRows() | do.PoolRows():
                self.stream_failed(command.ticket, error)
            case do.StartRun() | do.DropRun() | do.ListSplits():
                self.stream_failed(command.run, error)
            case _:
                raise error

    def stream_failed(self, number: int, error: Exception) -> None:
        """Fail the stream of the run or ticket with this number.

        Raises:
            Exception: `error`, if the run belongs to the daemon's start and not to a stream.
        """
        if number < m.IDS_PER_STREAM:
            raise error
        self.tell(on.StreamFailed(number // m.IDS_PER_STREAM, error))
