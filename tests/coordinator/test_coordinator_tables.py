"""The coordinator's door, row by row of its tables: given this state, `handle(event)` gives these commands.

Each test is a short history. Long histories are simulated (test_coordinator.py). One test runs all others again, and
checks that they walk all rows of all tables.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from penstock_proto import DaemonStopped, FeedError, GeneratorError, Leaf, ProtocolError, WorkerDied
from penstock_proto import messages as m
from penstock_proto.batches.layout import TAIL_LANE
from penstock_proto.batches.position import Position
from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.consumer import CONSUMER_STATES, Consumer, ConsumerState
from penstock_server.coordinator.model.feeds import Skipped
from penstock_server.coordinator.model.group_log import SavedGroup
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.open_request import OpenRequest
from penstock_server.coordinator.model.transitions import ImpossibleTransition, Table
from penstock_server.coordinator.model.turn import TURN_STATES, Turn, TurnState
from penstock_server.coordinator.order.lane import LANE_STATES, Lane, LaneState

TABLES: tuple[Table[Any], ...] = (TURN_STATES, LANE_STATES, CONSUMER_STATES)
ROWS = {(before, after) for table in TABLES for before, row in table.items() for after in row}

PLAN = m.FeedPlan(
    name="train",
    spec=None,
    batch_size=4,
    turn=1,
    lanes=1,
    order="exact",
    shuffle=0,
    interleave=1,
    seed=0,
    epochs=None,
    samples=None,
    length=None,
    drop_remainder=False,
    segment=None,
    static_splits=True,
    on_error="raise",
    attempts=2,
)


class Machine:
    """A coordinator with a feed that can be read, and consumer 1, which has opened a stream of it.

    Attributes:
        opened: the commands after the stream was opened.
    """

    def __init__(
        self,
        workers: int = 2,
        credit: int = 1,
        ragged: bool = False,
        group: str = "",
        saved: SavedGroup | None = None,
        idle: bool = False,
        transforms: bool = False,
        **options: Any,
    ) -> None:
        self.now = 0.0
        groups = {("train", group): saved} if saved else {} if group else None
        self.coordinator = Coordinator(workers=workers, idle=idle, memory=1 << 30, saved=groups)
        plan = m.FeedPlan(**{**{name: getattr(PLAN, name) for name in PLAN.__struct_fields__}, **options})
        spec = Leaf("int64", ()) if plan.batch_size and not ragged else Leaf("int64", (None,), ragged)
        self.plan = plan
        for worker in range(workers):
            self.tell(on.Imported(worker, (plan,)))
        count = 0 if plan.length is not None else max(4, plan.lanes)
        sample_spec = Leaf("int32", ()) if transforms else None
        self.tell(on.SplitsListed(0, SplitsInfo(1, count, bytes(32)), spec, 8, sample_spec=sample_spec))
        self.opened = self.tell(on.Open(1, "train", OpenRequest(credit, 1 << 40, 2, group=group, identity=b"one")))

    def tell(self, event: on.Event) -> list[do.Command]:
        commands = self.coordinator.handle(event, self.now)
        assert self.coordinator.check() == []
        return commands

    def begin(self) -> None:
        assert isinstance(self.tell(on.Begin(1, 0))[0], do.Tell)  # Begun

    def made(self, fill: do.Fill, batches: int = 1, **fields: Any) -> list[do.Command]:
        """Report that the worker has made a part of the turn, the last part unless `fields` say otherwise."""
        said = {"first": 0, "batches": batches, "rows": 4 * batches, "last": True, **fields}
        return self.tell(m.Made(fill.run, fill.ticket, **said))

    @property
    def tickets(self) -> list[int]:
        return [command.ticket for command in self.opened if isinstance(command, do.FindSlot)]

    @property
    def epoch(self) -> Any:
        return self.coordinator.streams[1].epochs[0]

    def turn(self, at: int = 0) -> Turn:
        """Return a turn of the epoch, by its place in the stream."""
        found: Turn = list(self.epoch.order.window)[at]
        return found

    @property
    def lane(self) -> Lane:
        found: Lane = self.epoch.lanes[0]
        return found


def filling(machine: Machine, ticket: int) -> do.Fill:
    """Report that the ticket's slot is found. Return the command that tells a worker to fill it."""
    (fill,) = [command for command in machine.tell(on.SlotFound(ticket)) if isinstance(command, do.Fill)]
    return fill


def kinds(commands: list[do.Command]) -> list[type]:
    return [type(command) for command in commands]


def test_opening_a_stream_asks_for_slots_and_keeps_one_for_the_head() -> None:
    machine = Machine(workers=1)
    opened, *slots = machine.opened
    assert set(kinds(slots)) == {do.FindSlot}
    assert len(slots) == machine.coordinator.streams[1].share.production - 1
    assert isinstance(opened, do.Tell)
    assert isinstance(opened.message, m.Opened)
    assert machine.turn().state is TurnState.WAITING


def test_a_slot_that_is_found_is_filled_by_the_lanes_run() -> None:
    machine = Machine()
    ticket = machine.tickets[0]
    start, fill = machine.tell(on.SlotFound(ticket))
    assert isinstance(start, do.StartRun)
    assert (start.worker, start.feed, start.epoch, start.lane) == (0, "train", 0, 0)
    assert fill == do.Fill(worker=0, run=start.run, ticket=ticket, index=0, batches=1, first=0)
    assert (machine.turn().state, machine.lane.state) == (TurnState.FILLING, LaneState.RUNNING)


def test_what_stands_next_is_sent_when_it_is_made_and_its_slot_is_freed_when_it_is_released() -> None:
    machine = Machine()
    machine.begin()
    first = machine.turn()
    fill = filling(machine, machine.tickets[0])
    sent, *_ = machine.made(fill, record=b"r")
    assert isinstance(sent, do.SendSlab)
    assert (sent.consumer, sent.ticket, sent.seq, sent.lane, sent.index, sent.rows) == (1, fill.ticket, 0, 0, 0, 4)
    assert first.state is TurnState.DONE
    assert do.Free(fill.ticket) not in machine.tell(on.Acknowledge(1, 1, (), 0))
    assert do.Free(fill.ticket) in machine.tell(on.Acknowledge(1, 1, (0,), 0))


def test_what_is_made_ahead_waits_for_its_place() -> None:
    machine = Machine(lanes=2)
    machine.begin()
    other = filling(machine, machine.tickets[1])
    assert machine.made(other) == []
    assert machine.turn(1).state is TurnState.COMPLETE


def test_when_a_worker_dies_another_goes_on_from_the_last_record() -> None:
    machine = Machine(turn=4)
    fill = filling(machine, machine.tickets[0])
    machine.made(fill, last=False, record=b"record")
    start, again = machine.tell(on.WorkerDied(0, "was killed"))
    assert isinstance(start, do.StartRun)
    assert (start.worker, start.record) == (1, b"record")
    assert again == do.Fill(worker=1, run=start.run, ticket=fill.ticket, index=1, batches=3, first=1)


def test_a_batch_that_does_not_fit_gets_a_larger_slot() -> None:
    machine = Machine(batch_size=None)
    fill = filling(machine, machine.tickets[0])
    assert machine.tell(m.NeedRoom(fill.run, fill.ticket, 100_000))[-1] == do.FindSlot(
        fill.ticket, machine.coordinator.streams[1].slots.slot_nbytes
    )
    assert machine.turn().state is TurnState.WAITING
    (again,) = machine.tell(on.SlotFound(fill.ticket))
    assert again == fill


def test_a_run_that_asked_for_a_larger_slot_before_it_was_dropped_no_longer_answers_for_the_turn() -> None:
    machine = Machine(batch_size=None)
    fill = filling(machine, machine.tickets[0])
    assert do.DropRun(0, fill.run) in machine.tell(on.RetireWorkers((0,)))
    machine.tell(m.NeedRoom(fill.run, fill.ticket, 100_000))
    assert filling(machine, fill.ticket).worker == 1
    assert machine.made(fill, batches=0) == []  # the answer to DropRun
    assert machine.turn().state is TurnState.FILLING
    assert machine.turn().error is None


def test_an_epoch_that_is_left_frees_what_nobody_fills_and_waits_for_who_does() -> None:
    machine = Machine()
    machine.begin()
    fill = filling(machine, machine.tickets[0])
    waiting, abandoned = machine.tickets[1], machine.turn()
    commands = machine.tell(on.Leave(1, 0, 0))
    assert do.DropRun(0, fill.run) in commands
    assert do.Free(waiting) in commands
    assert do.Free(fill.ticket) not in commands
    assert abandoned.state is TurnState.ABANDONED
    assert do.Free(fill.ticket) in machine.made(fill, batches=0)
    assert abandoned.state is TurnState.DONE


def test_a_failed_run_is_tried_again_after_a_pause_if_the_feed_says_so() -> None:
    machine = Machine(on_error="retry")
    fill = filling(machine, machine.tickets[0])
    assert machine.tell(on.RunFailed(fill.run, GeneratorError("away"))) == [do.DropRun(0, fill.run)]
    assert (machine.turn().state, machine.lane.state) == (TurnState.IDLE, LaneState.PAUSED)
    assert machine.coordinator.next_tick is not None
    assert machine.tell(on.Tick()) == []
    machine.now = machine.coordinator.next_tick
    assert kinds(machine.tell(on.Tick())) == [do.StartRun, do.Fill]


def test_a_turn_that_waits_for_the_next_try_is_freed_with_its_epoch() -> None:
    machine = Machine(on_error="retry")
    machine.begin()
    fill = filling(machine, machine.tickets[0])
    machine.tell(on.RunFailed(fill.run, GeneratorError("away")))
    assert do.Free(fill.ticket) in machine.tell(on.Leave(1, 0, 0))


def test_a_failed_run_fails_the_stream_when_its_turn_is_next() -> None:
    machine = Machine()
    fill = filling(machine, machine.tickets[0])
    machine.tell(on.RunFailed(fill.run, GeneratorError("wrong")))
    assert (machine.turn(0).state, machine.turn(1).state) == (TurnState.COMPLETE, TurnState.COMPLETE)
    assert machine.lane.state is LaneState.FAILED
    said = [command.message for command in machine.tell(on.Begin(1, 0)) if isinstance(command, do.Tell)]
    assert [type(message) for message in said] == [m.Begun, m.Failed]


def test_a_visit_to_a_lane_that_has_ended_finds_nothing() -> None:
    machine = Machine()
    first = filling(machine, machine.tickets[0])
    machine.made(first, batches=0, ended=True, leftover=3)
    assert machine.tell(on.SlotFound(machine.tickets[1])) == []
    assert machine.turn(1).state is TurnState.COMPLETE
    assert machine.turn(1).ended


def test_a_split_that_a_dropped_run_left_out_before_its_last_batch_is_reported_once() -> None:
    machine = Machine(on_error="skip")
    machine.begin()
    first, second = (filling(machine, ticket) for ticket in machine.tickets[:2])
    assert do.DropRun(first.worker, first.run) in machine.tell(on.RetireWorkers((first.worker,)))
    machine.made(first, record=b"one")
    skipped = Skipped("a split", 3, "raises")
    (report,) = machine.tell(on.SplitSkipped(second.run, 0, skipped))
    assert isinstance(report, do.ReportSkipped)
    assert machine.tell(on.SplitSkipped(second.run, 0, skipped)) == []
    machine.made(second, record=b"without the split")
    assert machine.lane.record == b"without the split"
    assert machine.coordinator.feeds["train"].skipped_count == 1


def end_both_lanes(machine: Machine) -> tuple[list[do.Fill], list[do.Command]]:
    """Let the machine's two lanes end with 1 and 2 leftover rows. Return the commands that had them filled, and those
    that followed."""
    machine.begin()
    fills = [filling(machine, ticket) for ticket in machine.tickets[:2]]
    commands = [do.FindSlot(ticket, 0) for ticket in machine.tickets[2:]]
    commands += machine.made(fills[0], batches=0, ended=True, leftover=1)
    commands += machine.made(fills[1], batches=0, ended=True, leftover=2)
    for command in commands:  # visits that were made ahead find nothing, and then comes the merged batch
        if isinstance(command, do.FindSlot):
            commands += machine.tell(on.SlotFound(command.ticket))
    return fills, commands


def test_leftovers_are_written_by_the_runs_that_have_them_to_one_batch() -> None:
    machine = Machine(lanes=2)
    fills, commands = end_both_lanes(machine)
    writes = [command for command in commands if isinstance(command, do.WriteRows)]
    assert [(write.run, write.start, write.count, write.row, write.rows) for write in writes] == [
        (fills[0].run, 0, 1, 0, 3),
        (fills[1].run, 0, 2, 1, 3),
    ]
    merged = machine.turn()
    assert merged.lane == TAIL_LANE
    assert machine.tell(m.RowsWritten(writes[0].run, merged.slot.ticket)) == []
    sent, *_ = machine.tell(m.RowsWritten(writes[1].run, merged.slot.ticket))
    assert isinstance(sent, do.SendSlab)
    assert (sent.lane, sent.rows) == (TAIL_LANE, 3)


def merged_batch_to_transform(**options: Any) -> tuple[Machine, Turn, do.TransformRows]:
    """Return a merged batch whose rows are all written, and the command that has it transformed."""
    machine = Machine(lanes=2, transforms=True, **options)
    fills, _ = end_both_lanes(machine)
    merged = machine.turn()
    assert machine.tell(m.RowsWritten(fills[0].run, merged.slot.ticket)) == []
    (transform,) = machine.tell(m.RowsWritten(fills[1].run, merged.slot.ticket))
    assert isinstance(transform, do.TransformRows)
    return machine, merged, transform


def test_a_merged_batch_is_transformed_when_all_of_its_rows_are_written() -> None:
    machine, merged, transform = merged_batch_to_transform()
    assert (transform.ticket, transform.rows, transform.index) == (merged.slot.ticket, 3, 0)
    assert transform.sample_spec == Leaf("int32", ())
    sent, *_ = machine.tell(m.RowsWritten(transform.run, merged.slot.ticket))
    assert isinstance(sent, do.SendSlab)
    assert (sent.lane, sent.rows) == (TAIL_LANE, 3)


def test_if_the_worker_dies_that_transforms_a_merged_batch_its_rows_are_written_again() -> None:
    machine, merged, transform = merged_batch_to_transform()
    commands = machine.tell(on.WorkerDied(transform.worker, "was killed"))
    writes = [command for command in commands if isinstance(command, do.WriteRows)]
    assert [(write.row, write.count) for write in writes] == [(0, 1), (1, 2)]
    assert machine.tell(m.RowsWritten(transform.run, merged.slot.ticket)) == []
    assert machine.tell(m.RowsWritten(writes[0].run, merged.slot.ticket)) == []
    (again,) = machine.tell(m.RowsWritten(writes[1].run, merged.slot.ticket))
    assert isinstance(again, do.TransformRows)
    assert again.worker != transform.worker
    sent, *_ = machine.tell(m.RowsWritten(again.run, merged.slot.ticket))
    assert isinstance(sent, do.SendSlab)


@pytest.mark.parametrize("on_error", ["raise", "retry"])
def test_a_merged_batch_whose_transform_raises_fails_the_stream_or_is_tried_again(on_error: str) -> None:
    machine, _, transform = merged_batch_to_transform(on_error=on_error)
    machine.tell(on.RunFailed(transform.run, GeneratorError("no such label")))
    if on_error == "raise":
        assert str(machine.coordinator.streams[1].error) == "no such label"
        return
    assert machine.coordinator.next_tick is not None
    machine.now = machine.coordinator.next_tick
    writes = machine.tell(on.Tick())
    assert kinds(writes) == [do.WriteRows, do.WriteRows]


@pytest.mark.parametrize("fits", [True, False])
def test_an_epoch_that_is_left_spares_the_function_a_batch_that_nobody_wants(fits: bool) -> None:
    machine, merged, transform = merged_batch_to_transform()
    assert do.DropRun(transform.worker, transform.run) in machine.tell(on.Close(1, 0))
    ticket, nbytes = merged.slot.ticket, 2 * merged.slot.nbytes
    answer = m.RowsWritten(transform.run, ticket) if fits else m.NeedRoom(transform.run, ticket, nbytes)
    assert do.Free(ticket) in machine.tell(answer)


@pytest.mark.parametrize("ragged", [False, True])
def test_leftovers_of_a_lane_that_fails_while_it_is_read_again_are_written_after_its_pause(ragged: bool) -> None:
    machine = Machine(lanes=2, ragged=ragged, on_error="retry")
    fills, _ = end_both_lanes(machine)
    merged = machine.turn()
    ticket = merged.slot.ticket
    (again,) = [
        command
        for command in machine.tell(on.WorkerDied(fills[1].worker, "was killed"))
        if isinstance(command, do.WriteRows | do.MeasureRows)
    ]
    assert kinds(machine.tell(on.RunFailed(again.run, GeneratorError("away")))) == [do.DropRun]
    first = m.RowsMeasured(fills[0].run, ticket, ((7,),)) if ragged else m.RowsWritten(fills[0].run, ticket)
    assert machine.tell(first) == []
    assert merged.state is TurnState.IDLE
    assert machine.tell(m.RowsWritten(again.run, ticket)) == [], "what the failed run says no longer counts"
    assert merged.state is TurnState.IDLE
    assert machine.coordinator.next_tick is not None
    machine.now = machine.coordinator.next_tick
    start, third = machine.tell(on.Tick())
    assert isinstance(start, do.StartRun)
    assert isinstance(third, do.MeasureRows if ragged else do.WriteRows)
    assert (third.run, third.start, third.count) == (start.run, 0, 2)
    if ragged:
        writes = machine.tell(m.RowsMeasured(third.run, ticket, ((20,),)))
        assert kinds(writes) == [do.WriteRows, do.WriteRows]
        assert machine.tell(m.RowsWritten(fills[0].run, ticket)) == []
    sent, *_ = machine.tell(m.RowsWritten(third.run, ticket))
    assert isinstance(sent, do.SendSlab)
    assert (sent.lane, sent.rows) == (TAIL_LANE, 3)


def test_leftovers_of_a_lane_that_fails_while_it_is_read_again_fail_the_stream_unless_it_retries() -> None:
    machine, _, measures = merged_batch_to_measure()
    again = machine.tell(on.WorkerDied(measures[1].worker, "was killed"))
    (measure,) = [command for command in again if isinstance(command, do.MeasureRows)]
    commands = machine.tell(on.RunFailed(measure.run, GeneratorError("wrong")))
    (said,) = [command.message for command in commands if isinstance(command, do.Tell)]
    assert isinstance(said, m.Failed)


def merged_batch_to_measure() -> tuple[Machine, Turn, list[do.MeasureRows]]:
    """Return a machine whose two lanes have ended with 1 and 2 leftover ragged rows."""
    machine = Machine(lanes=2, ragged=True)
    _, commands = end_both_lanes(machine)
    return machine, machine.turn(), [command for command in commands if isinstance(command, do.MeasureRows)]


def test_leftovers_that_vary_in_size_are_measured_before_they_are_written() -> None:
    machine, merged, measures = merged_batch_to_measure()
    assert [(measure.start, measure.count) for measure in measures] == [(0, 1), (0, 2)]
    assert merged.state is TurnState.FILLING
    assert machine.tell(m.RowsMeasured(measures[0].run, merged.slot.ticket, ((7,),))) == []
    writes = machine.tell(m.RowsMeasured(measures[1].run, merged.slot.ticket, ((20,),)))
    assert [(write.row, write.before, write.sizes, write.shapes) for write in writes] == [  # type: ignore[union-attr]
        (0, ((0,),), ((7,),), ((27,), (4,))),
        (1, ((7,),), ((20,),), ((27,), (4,))),
    ]
    assert machine.tell(m.RowsWritten(measures[1].run, merged.slot.ticket)) == []
    sent, *_ = machine.tell(m.RowsWritten(measures[0].run, merged.slot.ticket))
    assert isinstance(sent, do.SendSlab)
    assert (sent.lane, sent.rows, sent.shapes) == (TAIL_LANE, 3, ((27,), (4,)))


def test_a_merged_batch_that_is_larger_than_its_slot_gets_another_one_before_it_is_written() -> None:
    machine, merged, measures = merged_batch_to_measure()
    machine.tell(m.RowsMeasured(measures[0].run, merged.slot.ticket, ((100_000,),)))
    (find,) = machine.tell(m.RowsMeasured(measures[1].run, merged.slot.ticket, ((1,),)))
    assert isinstance(find, do.FindSlot)
    assert (find.ticket, find.nbytes > 800_000, merged.state) == (merged.slot.ticket, True, TurnState.WAITING)
    assert kinds(machine.tell(on.SlotFound(find.ticket))) == [do.WriteRows, do.WriteRows]


def test_rows_are_measured_again_by_another_worker_after_a_death_and_only_these() -> None:
    machine, merged, measures = merged_batch_to_measure()
    machine.tell(m.RowsMeasured(measures[0].run, merged.slot.ticket, ((7,),)))
    again = machine.tell(on.WorkerDied(measures[1].worker, "was killed"))
    (measure,) = [command for command in again if isinstance(command, do.MeasureRows)]
    assert (measure.run != measures[1].run, measure.start, measure.count) == (True, 0, 2)
    machine.tell(m.RowsMeasured(measures[1].run, merged.slot.ticket, ((20,),)))  # of the dead worker: it is ignored
    writes = machine.tell(m.RowsMeasured(measure.run, merged.slot.ticket, ((21,),)))
    assert [write.sizes for write in writes] == [((7,),), ((21,),)]  # type: ignore[union-attr]


def test_sizes_that_cannot_be_fail_the_stream() -> None:
    machine, merged, measures = merged_batch_to_measure()
    machine.tell(m.RowsMeasured(measures[0].run, merged.slot.ticket, ((7,),)))
    told, *_ = machine.tell(m.RowsMeasured(measures[1].run, merged.slot.ticket, ((7, 7), ())))
    assert isinstance(told, do.Tell)
    assert isinstance(told.message, m.Failed)
    assert "sizes ((7, 7), ())" in told.message.error.message


def test_a_lane_moves_at_a_border_once_its_run_has_answered() -> None:
    machine = Machine(workers=1, turn=2)
    fills = [filling(machine, ticket) for ticket in machine.tickets[:2]]
    machine.made(fills[0], last=False, record=b"no border")
    machine.tell(on.WorkerAdded(1))
    machine.tell(on.Imported(1, (machine.plan,)))
    assert machine.tell(on.RetireWorkers((0,))) == []
    assert machine.made(fills[0], first=1, record=b"border", border=True) == [do.DropRun(0, fills[0].run)]
    assert machine.lane.state is LaneState.DROPPING
    commands = machine.made(fills[1], batches=0)
    assert do.Retire(0) in commands
    start = next(command for command in commands if isinstance(command, do.StartRun))
    assert (start.worker, start.record) == (1, b"border")
    assert machine.lane.state is LaneState.RUNNING


def test_a_worker_that_is_to_leave_has_a_minute_and_is_killed_soon_after() -> None:
    machine = Machine(turn=2)
    machine.made(filling(machine, machine.tickets[0]), last=False, record=b"no border")
    machine.tell(on.RetireWorkers((0,)))
    assert machine.coordinator.next_tick == 60.0
    machine.now = 60.0
    assert kinds(machine.tell(on.Tick())) == [do.DropRun]
    assert machine.coordinator.next_tick == 70.0
    machine.now = 70.0
    assert machine.tell(on.Tick()) == [do.KillWorker(0)]


def test_a_place_that_ends_workers_again_and_again_fails_the_stream() -> None:
    machine = Machine(workers=3, attempts=2)
    machine.begin()
    for _ in range(2):
        fill = filling(machine, machine.tickets[0]) if machine.turn().state is TurnState.WAITING else None
        assert machine.lane.run is not None
        worker, run = machine.lane.run
        commands = machine.tell(on.WorkerDied(worker, "was killed", (run, 0, "split 0")))
        del fill
    (failed,) = [command.message for command in commands if isinstance(command, do.Tell)]
    assert isinstance(failed, m.Failed)
    assert isinstance(failed.error.error(), WorkerDied)


def test_of_an_indexable_feed_only_the_turn_fails_that_was_being_made() -> None:
    machine = Machine(workers=1, length=64, static_splits=False)
    first, second = (filling(machine, ticket) for ticket in machine.tickets[:2])
    commands = machine.tell(on.RunFailed(first.run, GeneratorError("wrong")))
    assert [command.ticket for command in commands if isinstance(command, do.Fill)] == [second.ticket]
    assert machine.turn().error is not None


def test_the_ranges_of_a_worker_that_stood_in_for_another_are_each_handed_over_once() -> None:
    machine = Machine(workers=3, credit=8, length=64, static_splits=False)
    tickets = list(machine.tickets)
    machine.tell(on.RetireWorkers((2,), now=True))
    filled = [filling(machine, ticket) for ticket in tickets]
    assert len({fill.run for fill in filled if fill.worker == 0}) == 2  # including those of worker 2
    machine.tell(on.WorkerAdded(2))
    machine.tell(on.Imported(2, (machine.plan,)))
    again = [command for command in machine.tell(on.WorkerDied(0, "was killed", None)) if isinstance(command, do.Fill)]
    assert sorted(fill.ticket for fill in again) == [fill.ticket for fill in filled if fill.worker == 0]
    machine.tell(on.Imported(0, (machine.plan,)))
    lost = [fill.ticket for fill in again if fill.worker == 2]
    commands = machine.tell(on.WorkerDied(2, "was killed", None))
    assert sorted(command.ticket for command in commands if isinstance(command, do.Fill)) == sorted(lost)


def test_an_epoch_begins_and_ends_with_what_the_consumer_says() -> None:
    machine = Machine()
    consumer = machine.coordinator.consumers[1]
    machine.begin()
    assert consumer.state is ConsumerState.READING
    (refused,) = machine.tell(on.Begin(1, 0))
    assert isinstance(refused, do.Refuse)
    assert isinstance(refused.error, ProtocolError)
    machine.tell(on.Leave(1, 0, 0))
    assert consumer.state is ConsumerState.IDLE
    machine.tell(on.Close(1, 0))
    assert consumer.state is ConsumerState.GONE


def test_an_epoch_ends_when_the_samples_that_are_compared_do_not_show_that_rows_are_lost() -> None:
    for lost in (False, True):
        machine = Machine()
        machine.begin()
        fill = filling(machine, machine.tickets[0])
        for _ in range(2):
            machine.tell(on.CheckBegan(fill.run))
        commands = [do.FindSlot(ticket, 0) for ticket in machine.tickets[2:]]
        commands += machine.made(fill, record=b"r")
        commands += machine.made(filling(machine, machine.tickets[1]), batches=0, ended=True)
        for command in commands:  # visits that were made ahead
            if isinstance(command, do.FindSlot):
                commands += machine.tell(on.SlotFound(command.ticket))
        commands += machine.tell(on.CheckEnded(fill.run))
        assert [kind for kind in kinds(commands) if kind is do.SendSlab] == [do.SendSlab]
        assert not any(isinstance(one, do.Tell) and isinstance(one.message, m.End) for one in commands)
        commands = machine.tell(on.StreamFailed(1, FeedError("rows are lost"))) if lost else []
        commands += machine.tell(on.CheckEnded(fill.run))
        said = [command.message for command in commands if isinstance(command, do.Tell)]
        assert [type(message) for message in said] == [m.Failed if lost else m.End]


def test_a_daemon_that_stops_waits_for_slabs_whose_end_is_acknowledged_before_they_are_handed_over() -> None:
    machine = Machine()
    machine.begin()
    commands = [do.FindSlot(ticket, 0) for ticket in machine.tickets[2:]]
    commands += machine.made(filling(machine, machine.tickets[0]), record=b"r")
    commands += machine.made(filling(machine, machine.tickets[1]), batches=0, ended=True)
    for command in commands:  # visits that were made ahead
        if isinstance(command, do.FindSlot):
            commands += machine.tell(on.SlotFound(command.ticket))
    assert m.End(0, slabs=1, batches=1, rows=4) in [one.message for one in commands if isinstance(one, do.Tell)]
    assert machine.tell(on.Stop(DaemonStopped("stops"))) == []
    assert machine.tell(on.Acknowledge(1, 0, (), 1)) == []
    assert not machine.coordinator.stopped
    (failed, *_) = machine.tell(on.Acknowledge(1, 1, (), 1))
    assert isinstance(failed, do.Tell)
    assert isinstance(failed.message, m.Failed)
    assert machine.coordinator.stopped


def test_a_daemon_that_stops_admits_nobody_but_consumers_for_which_a_saved_group_waits() -> None:
    def opens(number: int, identity: bytes, group: str = "g") -> list[do.Command]:
        ask = OpenRequest(1, 1 << 40, 2, group=group, identity=identity, again=True)
        return machine.tell(on.Open(number, "train", ask))

    position = Position(Machine().coordinator.feeds["train"].info, 0)
    machine = Machine(group="g", saved=SavedGroup(position, (), frozenset({b"one", b"two"})))
    machine.begin()
    machine.made(filling(machine, machine.tickets[0]), record=b"r")
    assert machine.tell(on.Stop(DaemonStopped("stops"))) == []
    refused = [*opens(2, b"three"), *opens(3, b"two", "another"), *opens(4, b"one")]
    assert [type(command.error) for command in refused if isinstance(command, do.Refuse)] == [DaemonStopped] * 3
    admitted = opens(5, b"two")[:4]
    assert kinds(admitted) == [do.SaveGroup, do.Tell, do.SaveGroup, do.SendSlab], "it was all that the batch waited for"
    assert kinds(opens(6, b"two")) == [do.Refuse]
    assert not machine.coordinator.stopped


@pytest.mark.parametrize(("released", "ended"), [((), 1), ((1,), 0)])
def test_an_acknowledgement_that_is_refused_writes_nothing_to_the_state_file(
    released: tuple[int, ...], ended: int
) -> None:
    machine = Machine(group="g")
    machine.begin()
    sent, *_ = machine.made(filling(machine, machine.tickets[0]), record=b"r")
    assert isinstance(sent, do.SendSlab)
    assert kinds(machine.tell(on.Acknowledge(1, 1, released, ended))) == [do.Refuse]
    assert do.SaveGroup in kinds(machine.tell(on.Acknowledge(1, 1, (), 0)))


def test_a_consumer_that_is_lost_gives_all_its_slots_back() -> None:
    machine = Machine()
    machine.begin()
    fill = filling(machine, machine.tickets[0])
    machine.made(fill)
    commands = machine.tell(on.Lost(1, 0))
    assert do.Free(fill.ticket) in commands
    assert machine.coordinator.streams == {}
    assert machine.coordinator.consumers == {}


@pytest.mark.parametrize(
    ("first", "then", "state"),
    [
        (["drop"], ["start", "on_answered"], LaneState.RUNNING),
        (["drop"], ["wait"], LaneState.PAUSED),
        (["drop"], ["fail"], LaneState.FAILED),
        (["wait"], ["start", "end_pause"], LaneState.RUNNING),
        (["drop", "wait"], ["end_pause"], LaneState.DROPPING),
        (["wait"], ["fail"], LaneState.FAILED),
        (["fail"], ["take_error"], LaneState.FREE),
    ],
)
def test_a_lane_goes_through_rare_states(first: list[str], then: list[str], state: LaneState) -> None:
    lane = Lane(0)
    calls: dict[str, Any] = {"drop": (0, 1), "start": (1, 2), "wait": 1, "fail": WorkerDied("again and again")}
    for name in [*first, *then]:
        getattr(lane, name)(*([calls[name]] if name in calls else []))
    assert lane.state is state


@pytest.mark.parametrize(("kind", "table"), [(Turn, TURN_STATES), (Lane, LANE_STATES), (Consumer, CONSUMER_STATES)])
def test_a_transition_that_is_in_no_table_raises(kind: type, table: Table[Any]) -> None:
    for before in table:
        for after in set(table) - {before}:
            thing = object.__new__(kind)
            thing.state = before
            if after not in table[before]:
                with pytest.raises(ImpossibleTransition, match=f"no way from {before.name} to {after.name}"):
                    thing.become(after)


def test_all_rows_of_all_tables_are_walked_by_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: set[tuple[Enum, Enum]] = set()

    def noting(become: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def noted(self: Any, state: Enum) -> None:
            before = self.state
            become(self, state)
            if state is not before:
                walked.add((before, state))

        return noted

    for kind in (Turn, Lane, Consumer):
        monkeypatch.setattr(kind, "become", noting(kind.become))
    for history in histories():
        history()
    missing = ROWS - walked
    assert not missing, sorted(f"{type(a).__name__}: {a.name} to {b.name}" for a, b in missing)


def histories() -> Iterator[Callable[[], None]]:
    """Return the tests of this file that need no fixture, with each set of their parameters."""
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
        if not marks and not inspect.signature(test).parameters:
            yield test
        for mark in marks:
            names, values = mark.args
            yield from (partial(test, *(value if isinstance(names, tuple) else [value])) for value in values)


def test_a_slot_has_one_owner_at_a_time_and_is_freed_by_the_last() -> None:
    from penstock_server.coordinator.model.leases import Leases

    done: list[do.Command] = []
    slots = Leases(iter(range(7, 9)), 100, done.append)
    lease = slots.acquire()
    slots.hold(lease)
    slots.release(lease)
    assert done == [do.FindSlot(7, 100)]
    slots.resize(300)
    slots.enlarge(lease)
    assert slots.nbytes == 300
    slots.release(lease)
    assert done[1:] == [do.FindSlot(7, 300), do.Free(7)]
    assert (slots.nbytes, len(slots)) == (0, 0)
    with pytest.raises(AssertionError, match="the slot of ticket 7 was freed"):
        slots.release(lease)


def test_a_bug_before_a_stream_exists_is_reported_and_refuses_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    machine = Machine()
    monkeypatch.setattr(machine.coordinator._admission, "open", broken)
    reported, refused = machine.tell(on.Open(2, "train", OpenRequest(1, 1 << 40, 2)))
    assert isinstance(reported, do.ReportBug)
    assert isinstance(refused, do.Refuse)
    assert refused.consumer == 2
    assert machine.coordinator.streams[1].error is None


@pytest.mark.parametrize("why", ["a bug", "the daemon's own error", "user code"])
def test_a_stream_that_a_bug_keeps_from_failing_leaves_all_the_same_and_all_bugs_are_reported(why: str) -> None:
    def broken(*_: object) -> None:
        raise KeyError("another bug")

    machine = Machine(lanes=2, credit=2)
    machine.begin()
    sent, filled, *waiting = machine.tickets
    fill = filling(machine, sent)
    assert do.SendSlab in kinds(machine.made(fill, record=b"r"))
    written = filling(machine, filled)
    event: on.Event = on.RunFailed(written.run, GeneratorError(why))
    if why != "user code":
        event = on.StreamFailed(1, KeyError(why) if why == "a bug" else FeedError(why))
    with patch.object(machine.coordinator.streams[1].production, "close_epoch", broken):
        commands = machine.tell(event)
    bugs = [str(command.error) for command in commands if isinstance(command, do.ReportBug)]
    assert bugs == (["'a bug'"] if why == "a bug" else []) + ["'another bug'"]
    (failed,) = [command.message for command in commands if isinstance(command, do.Tell)]
    assert isinstance(failed, m.Failed)
    assert why in failed.error.message
    assert machine.coordinator.streams == {}
    assert machine.coordinator.stopped
    assert {fill.run, written.run} == {command.run for command in commands if isinstance(command, do.DropRun)}
    freed = {command.ticket for command in commands if isinstance(command, do.Free)}
    assert freed >= set(waiting)
    assert sent not in freed, "a tensor lives over it"
    assert (filled in freed) == (why == "user code"), "otherwise a worker writes to it"
    assert machine.made(written) == []
    assert machine.tell(on.Lost(1, 1)) == [do.Free(sent)]
    assert machine.coordinator.consumers == {}
