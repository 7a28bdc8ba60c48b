"""Remote workers, at the coordinator's door: the work that they get, and the effects of their loss.

Each test is a short history. Long histories, in which hosts come and go, are simulated (test_coordinator.py).
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_proto import Leaf, WorkerDied
from penstock_proto import messages as m
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.coordinator.model.turn import TurnState
from penstock_server.coordinator.model.workers import REMOTE, VACANT, Workers
from penstock_server.scaling.scaling import Scaling
from tests.coordinator.test_coordinator_tables import PLAN, Machine, filling

A, B, C, D = range(REMOTE, REMOTE + 4)
"""Remote workers."""


TOLD = do.StartRun | do.Fill | do.MeasureRows | do.WriteRows | do.PoolRows | do.ListSplits
"""The commands that give work to a worker."""


class Daemon(Machine):
    """A coordinator with remote workers. Its own worker makes no batches, unless `idle` is False."""

    def __init__(self, workers: int = 1, idle: bool = True, **options: Any) -> None:
        super().__init__(workers=workers, idle=idle, **options)

    def tell(self, event: on.Event) -> list[do.Command]:
        commands = super().tell(event)
        told = {command.worker for command in commands if isinstance(command, TOLD)}
        assert told <= {*self.coordinator.workers.numbers}, "a worker that is not there gets work"
        return commands

    def join(self, *workers: int) -> list[do.Command]:
        """Let a host join with these workers. Return the commands that follow."""
        for worker in workers:
            assert self.tell(on.WorkerAdded(worker)) == []
        return [command for worker in workers for command in self.tell(on.Imported(worker, (self.plan,)))]

    def find(self, commands: list[do.Command]) -> list[do.Command]:
        """Find the slots that these commands and their consequences ask for. Return the commands that follow."""
        after: list[do.Command] = []
        commands = list(commands)
        for command in commands:
            if isinstance(command, do.FindSlot):
                found = self.tell(on.SlotFound(command.ticket))
                after += found
                commands += found
        return after

    @property
    def fillers(self) -> list[int]:
        """The workers that fill turns, in stream order."""
        return [worker for turn in self.epoch.order.window for worker, _ in turn.fillers]


def of(kind: Any, commands: list[do.Command]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]


class TestWithoutWorkers:
    @pytest.mark.parametrize(("order", "length"), [("exact", None), ("fast", None), ("exact", 100)])
    def test_a_stream_waits_and_begins_by_itself_when_the_first_worker_is_ready(
        self, order: str, length: int | None
    ) -> None:
        daemon = Daemon(lanes=3, order=order, length=length)
        daemon.begin()
        assert daemon.find(daemon.opened) == []
        accept, *commands = daemon.join(A)
        assert accept == do.AcceptWorker(A)
        (start,), (fill,) = of(do.StartRun, commands), of(do.Fill, commands)
        assert (start.worker, fill.worker, fill.ticket) == (A, A, daemon.tickets[0])
        assert of(do.SendSlab, daemon.made(fill))

    def test_a_worker_that_was_added_gets_work_when_it_is_ready(self) -> None:
        daemon = Daemon()
        daemon.tell(on.WorkerAdded(A))
        assert daemon.find(daemon.opened) == []
        assert of(do.Fill, daemon.tell(on.Imported(A, (daemon.plan,))))

    def test_a_consumer_that_goes_while_its_stream_waits_leaves_no_slot_behind(self) -> None:
        daemon = Daemon()
        daemon.begin()
        daemon.find(daemon.opened)
        assert daemon.turn().state is TurnState.FILLING
        assert do.Free(daemon.tickets[0]) in daemon.tell(on.Leave(1, 0, 0))
        daemon.tell(on.Close(1, 0))
        daemon.tell(on.Lost(1, 0))
        assert not daemon.coordinator.streams
        assert daemon.coordinator.budget.nbytes_reserved == 0

    def test_a_stream_gets_more_slots_as_workers_come_and_keeps_them_when_they_go(self) -> None:
        daemon = Daemon(lanes=8)
        stream = daemon.coordinator.streams[1]
        assert stream.share.production == 1
        daemon.join(A, B, C)
        other = Machine(workers=3, lanes=8).coordinator.streams[1]
        assert stream.share == other.share
        assert len(stream.slots) == len(other.slots)
        daemon.tell(on.WorkersLost((A, B, C), "is lost"))
        daemon.join(D)
        assert stream.share == other.share

    def test_half_of_all_memory_and_slots_stays_for_consumers_that_come_later(self) -> None:
        daemon = Daemon(lanes=8)
        stream, budget = daemon.coordinator.streams[1], daemon.coordinator.budget
        budget.memory = 2 * (budget.nbytes_reserved + 3 * stream.slots.slot_nbytes)
        before = stream.share.production
        daemon.join(A, B, C)
        assert stream.share.production == before + 3
        budget.memory, budget.slots = 1 << 40, 2 * budget.slots_reserved + 1
        daemon.join(D)
        assert stream.share.production == before + 3

    def test_in_fast_order_each_lane_of_an_epoch_that_is_planned_before_is_visited_by_itself(self) -> None:
        assert Daemon(lanes=5, order="fast").epoch.lane_sets.count == 5


class TestLostHosts:
    def test_what_lost_workers_were_to_make_goes_to_those_that_are_left_and_not_to_one_another(self) -> None:
        daemon = Daemon(lanes=4, turn=2)
        daemon.find(daemon.opened)
        daemon.find(daemon.join(A, B, C, D))
        assert {A, B, C, D} == set(daemon.fillers)
        again = daemon.tell(on.WorkersLost((A, B, C), "is lost"))
        assert {command.worker for command in of((do.StartRun, do.Fill), again)} == {D}
        assert set(daemon.fillers) == {D}
        assert daemon.coordinator.workers.numbers == [0, D]

    def test_of_workers_that_are_lost_together_none_gets_work_of_another(self) -> None:
        daemon = Daemon(length=100)
        slots = [*daemon.opened, *daemon.join(A, B)]  # the first turn waited for a slot while there was no worker
        daemon.find(slots)
        assert {A, B} == set(daemon.fillers)
        assert daemon.tell(on.WorkersLost((A, B), "is lost")) == []
        daemon.join(C)
        assert set(daemon.fillers) == {C}

    def test_a_lane_goes_on_from_its_last_record(self) -> None:
        daemon = Daemon(workers=1, idle=False, turn=4)
        daemon.join(A)
        daemon.tell(on.RetireWorkers((0,)))  # so a remote worker makes the lane
        fill = filling(daemon, daemon.tickets[0])
        assert fill.worker == A
        daemon.join(B)
        daemon.made(fill, last=False, record=b"record")
        start, again = daemon.tell(on.WorkersLost((A,), "is lost"))
        assert (start.worker, start.record) == (B, b"record")  # type: ignore[union-attr]
        assert again == do.Fill(B, start.run, fill.ticket, index=1, batches=3, first=1)  # type: ignore[union-attr]

    def test_when_all_are_lost_the_stream_waits_and_goes_on_from_the_last_record(self) -> None:
        daemon = Daemon(turn=4)
        daemon.begin()
        daemon.join(A)
        fill = filling(daemon, daemon.tickets[0])
        daemon.made(fill, last=False, record=b"record")
        assert daemon.tell(on.WorkersLost((A,), "is lost")) == []
        daemon.now += 1e6
        assert daemon.tell(on.Tick()) == []
        _, start, again = daemon.join(B)[:3]
        assert (start.worker, start.record) == (B, b"record")  # type: ignore[union-attr]
        assert again == do.Fill(B, start.run, fill.ticket, index=1, batches=3, first=1)  # type: ignore[union-attr]
        assert daemon.coordinator.feeds["train"].replays == 1  # the vacant place replays nothing

    def test_what_a_lost_worker_still_says_changes_nothing(self) -> None:
        daemon = Daemon(turn=4)
        daemon.begin()
        daemon.join(A)
        fill = filling(daemon, daemon.tickets[0])
        daemon.tell(on.WorkersLost((A,), "is lost"))
        assert daemon.made(fill, 4) == []
        assert daemon.turn().made == 0
        assert daemon.tell(on.Imported(A, (daemon.plan,))) == [do.RejectWorker(A)]
        assert daemon.coordinator.workers.available == [VACANT]

    @pytest.mark.parametrize("length", [None, 100])
    def test_nobody_is_blamed_however_often_hosts_are_lost(self, length: int | None) -> None:
        daemon = Daemon(attempts=2, length=length)
        daemon.begin()
        daemon.find(daemon.opened)
        for worker in range(REMOTE, REMOTE + 5):
            assert of(do.Fill, daemon.join(worker))
            daemon.tell(on.WorkersLost((worker,), "is lost"))
        lanes = daemon.epoch.lanes.values()
        assert not any(lane.failures or lane.deaths or lane.unexplained or lane.careful for lane in lanes)
        assert not daemon.epoch.deaths
        assert daemon.coordinator.streams[1].error is None

    def test_leftovers_of_several_lost_workers_are_written_by_another(self) -> None:
        daemon = Daemon(lanes=2)
        daemon.begin()
        fills = of(do.Fill, daemon.find([*daemon.opened, *daemon.join(A, B)]))
        ends = [next(fill for fill in fills if fill.worker == worker) for worker in (A, B)]
        commands = [*daemon.made(ends[0], batches=0, ended=True, leftover=1)]
        commands += daemon.made(ends[1], batches=0, ended=True, leftover=2)
        for fill in fills:  # visits that were made ahead find nothing
            if fill not in ends:
                commands += daemon.made(fill, batches=0, ended=True, leftover=1 if fill.worker == A else 2)
        writes = of(do.WriteRows, [*commands, *daemon.find(commands)])
        assert {write.worker for write in writes} == {A, B}
        assert daemon.tell(m.RowsWritten(writes[0].run, writes[0].ticket)) == []
        assert daemon.tell(on.WorkersLost((A, B), "is lost")) == []
        (again,) = of(do.WriteRows, daemon.join(C))
        assert (again.worker, again.start, again.count, again.row) == (C, 0, writes[1].count, writes[1].row)

    def test_what_lost_workers_filled_for_an_epoch_that_was_left_is_freed(self) -> None:
        daemon = Daemon()
        daemon.begin()
        daemon.join(A)
        fill = filling(daemon, daemon.tickets[0])
        assert do.Free(fill.ticket) not in daemon.tell(on.Leave(1, 0, 0))
        assert do.Free(fill.ticket) in daemon.tell(on.WorkersLost((A,), "is lost"))

    def test_a_worker_of_a_host_that_is_being_replaced_gets_nothing(self) -> None:
        daemon = Daemon()
        daemon.join(A, B)
        fill = filling(daemon, daemon.tickets[0])
        other = B if fill.worker == A else A
        (start, again) = daemon.tell(on.WorkerDied(fill.worker, "was killed"))
        assert (start.worker, again.worker) == (other, other)  # type: ignore[union-attr]
        assert daemon.tell(on.WorkersLost((other,), "is lost")) == []
        assert of(do.Fill, daemon.tell(on.Imported(fill.worker, (daemon.plan,))))

    def test_a_host_that_is_lost_before_its_workers_were_ready_changes_nothing(self) -> None:
        daemon = Daemon()
        daemon.find(daemon.opened)
        daemon.tell(on.WorkerAdded(A))
        assert daemon.tell(on.WorkersLost((A, B), "is lost")) == []
        assert daemon.coordinator.workers.numbers == [0]
        assert of(do.Fill, daemon.join(C))


class TestTheStart:
    def test_a_worker_of_another_host_is_never_the_first_to_be_accepted(self) -> None:
        coordinator = Coordinator(workers=1, idle=True, memory=1 << 30)
        coordinator.handle(on.WorkerAdded(A), 0.0)
        assert coordinator.handle(on.Imported(A, (PLAN,)), 0.0) == [do.RejectWorker(A)]
        assert coordinator.handle(on.WorkerDied(A, "was killed"), 0.0) == []
        assert coordinator.handle(on.WorkersLost((A,), "is lost"), 0.0) == []
        assert coordinator.handle(on.Imported(0, (PLAN,)), 0.0) == [do.ListSplits(0, 0, "train", 0), do.AcceptWorker(0)]

    def test_it_has_no_part_in_the_start_and_its_end_does_not_refuse_it(self) -> None:
        coordinator = Coordinator(workers=1, idle=True, memory=1 << 30)
        coordinator.handle(on.Imported(0, (PLAN,)), 0.0)
        coordinator.handle(on.WorkerAdded(A), 0.0)
        assert coordinator.handle(on.Imported(A, (PLAN,)), 0.0) == [do.AcceptWorker(A)]
        assert coordinator.handle(on.WorkerDied(A, "was killed"), 0.0) == []
        assert coordinator.handle(on.WorkerGone(A, "was killed"), 0.0) == []

    def test_first_samples_are_compared_by_the_daemons_own_workers(self) -> None:
        coordinator = Coordinator(workers=2, memory=1 << 30)
        for worker in (0, 1):
            coordinator.handle(on.Imported(worker, (PLAN,)), 0.0)
        coordinator.handle(on.WorkerAdded(A), 0.0)
        coordinator.handle(on.Imported(A, (PLAN,)), 0.0)
        first = m.FirstSample(index=0, digests=(b"d",), seconds=0.0)
        listed = on.SplitsListed(0, SplitsInfo(1, 4, bytes(32)), Leaf("int64", ()), 8, first)
        assert [command.worker for command in of(do.Compare, coordinator.handle(listed, 0.0))] == [1]


@pytest.mark.parametrize(
    ("order", "compares", "after"),
    [
        ((0, 1, 2), 1, 1),
        ((0, 2, 1), 2, 1),
        ((2, 0, 1), 1, 2),  # not worker 0 as soon as it is ready
        ((1, 2, 0), 2, 1),
        ((1, 0, 2), 2, 2),
        ((1, 0), 0, 1),
        ((0, 1), 1, 1),
        ((0,), 0, 0),
    ],
)
def test_a_first_sample_is_compared_beside_the_worker_that_makes_the_first_batches(
    order: tuple[int, ...], compares: int, after: int
) -> None:
    coordinator = Coordinator(workers=len(order), memory=1 << 30)
    first = m.FirstSample(index=0, digests=(b"d",), seconds=0.0)
    listed = on.SplitsListed(0, SplitsInfo(1, 4, bytes(32)), Leaf("int64", ()), 8, first)
    asked = []
    for place, worker in enumerate(order):
        commands = coordinator.handle(on.Imported(worker, (PLAN,)), 0.0)
        if place == 0:
            commands += coordinator.handle(listed, 0.0)
        asked += [(command.worker, place) for command in of(do.Compare, commands)]
    assert asked == [(compares, after)]


class TestOwnWork:
    @pytest.mark.parametrize("idle", [True, False])
    def test_lists_of_splits_are_made_by_the_daemons_own_workers(self, idle: bool) -> None:
        daemon = Daemon(idle=idle, static_splits=False)
        daemon.join(A, B)
        (first,) = of(do.ListSplits, daemon.opened)
        daemon.tell(on.Begin(1, 0))
        asked = [first]
        for epoch in range(1, 4):
            daemon.tell(on.SplitsListed(asked[-1].run, SplitsInfo(epoch + 1, 4, bytes(32))))
            asked += of(do.ListSplits, [*daemon.tell(on.Leave(1, epoch - 1, 0)), *daemon.tell(on.Begin(1, epoch))])
        assert [(command.worker, command.epoch) for command in asked] == [(0, epoch) for epoch in range(4)]

    @pytest.mark.parametrize("idle", [True, False])
    def test_rows_of_pools_are_mixed_by_the_daemons_own_workers(self, idle: bool) -> None:
        daemon = Daemon(idle=idle, lanes=2, shuffle=7)
        daemon.begin()
        commands = [*daemon.opened, *daemon.join(A, B)]
        rows: list[do.PoolRows] = []
        for command in commands:
            if isinstance(command, do.FindSlot):
                commands += daemon.tell(on.SlotFound(command.ticket))
            elif isinstance(command, do.Fill):
                commands += daemon.made(command, command.batches)
            elif isinstance(command, do.PoolRows):
                rows.append(command)
        assert rows
        assert {command.worker for command in rows} == {0}

    def test_if_the_daemon_has_no_worker_left_only_what_needs_one_fails(self) -> None:
        daemon = Daemon(idle=False)
        daemon.join(A)
        assert daemon.tell(on.WorkerGone(0, "was killed")) is not None
        assert daemon.coordinator.streams[1].error is None
        pooled = Daemon(idle=False, lanes=2, shuffle=7)
        pooled.begin()
        commands = [*pooled.opened, *pooled.join(A)]
        pooled.tell(on.WorkerGone(0, "was killed"))
        for command in commands:
            if isinstance(command, do.FindSlot):
                commands += pooled.tell(on.SlotFound(command.ticket))
            elif isinstance(command, do.Fill) and pooled.coordinator.streams[1].error is None:
                commands += pooled.made(command, command.batches)
        error = pooled.coordinator.streams[1].error
        assert isinstance(error, WorkerDied)
        assert "no worker process of the daemon is left" in error.message
        listed = Daemon(idle=False, static_splits=False)
        listed.join(A)
        listed.tell(on.WorkerGone(0, "was killed"))
        assert isinstance(listed.coordinator.streams[1].error, WorkerDied)
        for other in (pooled, listed):
            (refused,) = of(do.Refuse, other.tell(on.Open(2, "train", OpenRequest(1, 1 << 40, 0))))
            assert refused.error.message == error.message
            assert list(other.coordinator.streams) == [1]
        assert not of(do.Refuse, daemon.tell(on.Open(2, "train", OpenRequest(1, 1 << 40, 0))))


class TestEndsOfWorkers:
    def test_a_stream_outlives_the_last_own_worker_if_there_is_another_host(self) -> None:
        daemon = Daemon(idle=False)
        fill = filling(daemon, daemon.tickets[0])
        daemon.join(A)
        start, again, *_ = daemon.tell(on.WorkerGone(0, "was killed"))
        assert (start.worker, again.worker, again.ticket) == (A, A, fill.ticket)  # type: ignore[union-attr]

    def test_a_stream_outlives_the_last_worker_of_another_host(self) -> None:
        daemon = Daemon()
        daemon.join(A)
        filling(daemon, daemon.tickets[0])
        assert daemon.tell(on.WorkerGone(A, "was killed")) == []
        assert of(do.Fill, daemon.join(B))

    def test_it_fails_when_no_worker_of_any_kind_is_left(self) -> None:
        daemon = Daemon()
        daemon.tell(on.WorkerGone(0, "was killed"))
        assert isinstance(daemon.coordinator.streams[1].error, WorkerDied)
        (refused,) = daemon.tell(on.Open(2, "train", OpenRequest(1, 1 << 40, 0)))
        assert isinstance(refused, do.Refuse)
        assert isinstance(refused.error, WorkerDied)


class TestLeavingHosts:
    def test_a_host_that_leaves_hands_its_lanes_to_another_at_a_border(self) -> None:
        daemon = Daemon()
        fills = of(do.Fill, daemon.find([*daemon.opened, *daemon.join(A)]))
        daemon.made(fills[0], record=b"1", border=False)
        daemon.join(B)
        assert daemon.tell(on.RetireWorkers((A,))) == []
        drop, retire = daemon.made(fills[1], record=b"2", border=True)
        assert (drop, retire) == (do.DropRun(A, fills[1].run), do.Retire(A))
        daemon.begin()
        wanted = [turn.slot.ticket for turn in daemon.epoch.order.window if turn.state is TurnState.WAITING]
        start, fill = daemon.tell(on.SlotFound(wanted[0]))
        assert (start.worker, start.record, fill.worker) == (B, b"2", B)  # type: ignore[union-attr]

    def test_lanes_of_a_leaving_host_go_neither_to_its_other_workers_nor_to_lost_ones(self) -> None:
        daemon = Daemon(lanes=4)
        daemon.find([*daemon.opened, *daemon.join(A, B, C, D)])
        daemon.tell(on.WorkersLost((C,), "is lost"))
        commands = daemon.tell(on.RetireWorkers((A, B)))
        assert {command.worker for command in of(do.DropRun, commands)} == {A, B}
        for turn in list(daemon.epoch.order.window):
            for worker, run in turn.fillers:
                if worker in (A, B):  # the answer to DropRun
                    commands += daemon.tell(m.Made(run, turn.slot.ticket, first=0, batches=0, rows=0, last=True))
        assert {command.worker for command in of((do.StartRun, do.Fill), commands)} == {D}
        assert {command.worker for command in of(do.Retire, commands)} == {A, B}

    def test_if_all_leave_they_go_on_until_they_are_lost(self) -> None:
        daemon = Daemon(lanes=2)
        daemon.begin()
        fills = of(do.Fill, daemon.find([*daemon.opened, *daemon.join(A, B)]))
        assert daemon.tell(on.RetireWorkers((A, B))) == []
        assert daemon.coordinator.workers.available == [A, B]
        assert of(do.SendSlab, daemon.made(fills[0], border=True))
        daemon.tell(on.WorkersLost((A, B), "is lost"))
        assert daemon.coordinator.workers.leaving == set()
        while (due := daemon.coordinator.next_tick) is not None:  # the minute that leaving workers have
            daemon.now = due
            assert daemon.tell(on.Tick()) == []
        assert of(do.Fill, daemon.join(C))

    def test_a_host_that_leaves_and_has_no_work_is_ended_though_it_is_the_last(self) -> None:
        daemon = Daemon()
        daemon.tell(on.Lost(1, 0))
        daemon.join(A)
        assert daemon.tell(on.RetireWorkers((A,))) == [do.Retire(A)]
        assert daemon.coordinator.workers.available == [VACANT]

    def test_one_that_dies_while_it_leaves_gets_no_work_again(self) -> None:
        daemon = Daemon()
        daemon.join(A)
        filling(daemon, daemon.tickets[0])
        daemon.tell(on.RetireWorkers((A,)))
        assert daemon.tell(on.WorkerDied(A, "was killed")) == [do.Retire(A)]
        assert of(do.Fill, daemon.join(B))


class TestScale:
    def test_only_own_workers_that_make_batches_are_counted(self) -> None:
        workers = Workers(2)
        workers.add(A)
        assert (workers.scaled, workers.own, workers.makers) == ([0, 1], [0, 1], [0, 1, A])
        workers.let_leave([1])
        assert workers.scaled == [0]
        idle = Workers(1, idle=True)
        idle.add(A)
        idle.add(1)
        assert (idle.scaled, idle.own, idle.makers) == ([1], [0, 1], [1, A])

    def test_own_workers_stay_if_no_other_own_one_is_left_and_those_of_other_hosts_leave_all_the_same(self) -> None:
        daemon = Daemon(workers=2, idle=False, lanes=4)
        daemon.find([*daemon.opened, *daemon.join(A)])
        daemon.tell(on.RetireWorkers((1, A)))
        daemon.tell(on.WorkerGone(0, "was killed"))
        assert daemon.coordinator.workers.leaving == {A}
        assert daemon.coordinator.workers.scaled == [1]

    @pytest.mark.parametrize(
        ("idle", "wanted", "added", "scaled"),
        [(True, 2, [1, 2], (0, 2)), (True, 0, [], (0, 0)), (False, 3, [1, 2], (1, 3)), (False, 0, [], (1, 1))],
    )
    def test_scale_leaves_idle_and_remote_workers_alone(
        self, idle: bool, wanted: int, added: list[int], scaled: tuple[int, int]
    ) -> None:
        daemon = Daemon(idle=idle)
        daemon.join(A, B)
        told: list[on.Event] = []
        numbers = iter((1, 2))
        supervisor = SimpleNamespace(add=lambda: next(numbers))

        def tell(event: on.Event) -> None:
            told.append(event)
            daemon.tell(event)

        scaling = Scaling(
            daemon.coordinator,
            tell,
            supervisor,  # type: ignore[arg-type]
            lambda: None,
        )
        assert scaling.scale(wanted) == scaled
        assert [event.worker for event in told if isinstance(event, on.WorkerAdded)] == added
        scaling.scale(0)
        assert [event.workers for event in told if isinstance(event, on.RetireWorkers)] == (
            [tuple(added)] if added else []
        )


def test_a_lane_that_has_no_run_yet_when_workers_come_goes_to_the_one_with_the_fewest() -> None:
    """The lanes that have runs may be spread evenly before that: [1, 1, 0]."""
    machine = Machine(workers=2, lanes=4)
    machine.begin()
    first, second = (filling(machine, ticket) for ticket in machine.tickets[:2])
    assert (first.worker, second.worker) == (0, 1)
    machine.tell(on.WorkerAdded(2))
    machine.tell(on.Imported(2, (machine.plan,)))
    machine.made(first, border=True)
    assert filling(machine, machine.tickets[3]).worker == 2
    assert machine.epoch.moved
    machine.made(filling(machine, machine.tickets[2]), border=True)
    assert not machine.epoch.moved  # all four have runs


def test_no_more_lanes_move_to_a_worker_that_comes_than_make_up_its_share() -> None:
    """A lane that moves goes to its next worker at its next visit. Until then it counts for the worker with the fewest
    lanes. Otherwise nearly all lanes would move, and each would open its splits again."""
    machine = Machine(workers=2, lanes=9, credit=64, turn=1)
    machine.begin()
    waiting, moved, slabs = deque(machine.tickets), 0, 0

    def tell(event: on.Event) -> None:
        nonlocal moved, slabs
        commands = machine.tell(event)
        waiting.extend(command.ticket for command in commands if isinstance(command, do.FindSlot))
        moved += sum(isinstance(command, do.DropRun) for command in commands)
        for slab in [command for command in commands if isinstance(command, do.SendSlab)]:
            slabs += 1
            tell(on.Acknowledge(1, slabs, (slab.seq,), 0))

    def visit(times: int) -> None:
        for _ in range(times):
            fill = filling(machine, waiting.popleft())
            tell(m.Made(fill.run, fill.ticket, first=0, batches=1, rows=4, last=True, border=True))

    visit(9)
    tell(on.WorkerAdded(2))
    tell(on.Imported(2, (machine.plan,)))
    visit(27)
    assert +machine.epoch.loads == {0: 3, 1: 3, 2: 3}
    assert moved == 3
    assert not machine.epoch.moved
