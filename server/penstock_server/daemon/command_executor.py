"""Carries out the coordinator's commands: passes each to the part that does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..consumers.sessions import Sessions
from ..consumers.starting_feeds import StartingFeeds
from ..coordinator import CoordinatorView
from ..coordinator.model import commands as do
from ..hosts.hosts import Hosts
from ..logs.bugs import Bugs
from ..shared_memory.kept import KeptBatches
from ..shared_memory.slot_assignment import SlotAssignment
from ..workers.own_workers import OwnWorkers
from ..workers.to_workers import ToWorkers
from .from_workers import FromWorkers
from .group_file import GroupFile


@dataclass(frozen=True, slots=True)
class Executor:
    """The parts that carry out commands.

    `fail` is called with the error that keeps a feed from being served, and `all_done` when all commands are carried
    out.
    """

    coordinator: CoordinatorView
    feeds: StartingFeeds
    from_workers: FromWorkers
    own: OwnWorkers
    to_workers: ToWorkers
    slots: SlotAssignment
    sessions: Sessions
    hosts: Hosts
    kept: KeptBatches
    group_file: GroupFile | None
    fail: Callable[[PenstockError], None]
    all_done: Callable[[], None]
    bugs: Bugs

    def idle(self) -> None:
        """Note that all commands are carried out."""
        if self.group_file is not None:
            self.group_file.idle()
        self.slots.trim_soon()
        self.all_done()

    def carry_out(self, command: do.Command) -> None:
        """Carry out a command."""
        match command:
            case do.FindSlot():
                self.slots.request(command)
            case do.Fill():
                self.to_workers.way(command.worker).fill(command, self.slots.memfd(command.slot))
            case do.MeasureRows():
                self.to_workers.way(command.worker).measure_rows(command)
            case do.WriteRows():
                self.to_workers.way(command.worker).write_rows(command, self.slots.memfd(command.ticket))
            case do.PoolRows():
                memfds = [self.slots.memfd(ticket) for ticket in (command.ticket, *dict(command.sources))]
                self.own.pool_rows(command, memfds[0], memfds[1:], self.coordinator.feeds[command.feed].info.spec)
            case do.TransformRows():
                memfd, spec = self.slots.memfd(command.ticket), self.coordinator.feeds[command.feed].info.spec
                self.own.transform_rows(command, memfd, spec)
            case do.SendSlab():
                self.sessions.deliver(command, self.slots.memfd(command.ticket))
            case do.Remade():
                self.kept.there(command.ticket, command.whole)
            case do.Free():
                self.kept.freed(command.ticket)
                self.slots.free(command.ticket)
            case do.StartRun():
                self.to_workers.way(command.worker).start_run(command, self.coordinator.feeds[command.feed].info.spec)
            case do.DropRun():
                self.to_workers.way(command.worker).say(command.worker, m.DropRun(command.run))
            case do.Tell():
                self.sessions.send(command.consumer, command.message)
            case do.Refuse():
                self.sessions.refuse(command.consumer, command.error)
            case do.SaveGroup() | do.ForgetGroup():
                assert self.group_file is not None
                self.group_file.carry_out(command)
            case do.ListSplits():
                self.to_workers.way(command.worker).say(
                    command.worker, m.ListSplits(command.run, command.feed, command.epoch)
                )
            case do.Compare():
                self.own.compare(command)
            case do.ForgetSplits():
                self.to_workers.forget_list(command.splits)
            case do.AcceptWorker():
                self.from_workers.accepted(command.worker)
            case do.RejectWorker():
                self.from_workers.rejected(command.worker)
            case do.Retire():
                self.to_workers.way(command.worker).retire(command.worker)
            case do.KillWorker():
                self.to_workers.way(command.worker).kill(command.worker)
            case do.FeedReady():
                self.feeds.feed_ready(command.feed, command.splits)
                if self.feeds.ready:
                    self.sessions.feeds_ready()
                    self.hosts.feeds_ready()
            case do.ReportSkipped():
                self.from_workers.skipped(command)
            case do.FailStart():
                self.fail(command.error)
            case do.ReportBug():
                self.bugs.note(command.error)
