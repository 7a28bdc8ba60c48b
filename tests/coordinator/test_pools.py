"""Pools, in which lanes mix their rows: the order, the commands of the coordinator, and positions."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._state import progress
from penstock._state.progress import EpochCheck, Progress
from penstock_proto import GeneratorError, PenstockError, ProtocolError, StateMismatch
from penstock_proto import messages as m
from penstock_proto.batches.layout import POOL_LANE, TAIL_LANE
from penstock_proto.batches.position import EndedLane, Place, Position, differences, pack, unpack
from penstock_server import Feed, Leaf
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.consumer import SentSlab
from penstock_server.coordinator.model.group_log import GroupLog
from penstock_server.coordinator.model.positions import check
from penstock_server.coordinator.model.turn import Part, Turn, TurnState
from penstock_server.coordinator.order.pooled_order import PooledOrder
from penstock_server.coordinator.order.visits import LaneVisits
from penstock_server.feed.options.plan_sizes import fixed_slots, pooled_lanes
from penstock_server.shuffling.pool_order import source_rows
from penstock_server.worker.reading.loaded_feed import LoadedFeed
from penstock_server.worker.tasks import pooling
from penstock_server.worker.tasks.memfds import Memfds
from tests.coordinator.test_coordinator_tables import Machine, filling, kinds
from tests.reference.reference import batches_of_pools

Row = tuple[int, int]


# --- the order ---


def close(order: PooledOrder, turn: Turn, length: int = 0, batch_size: int = 1) -> None:
    """Complete a turn; for a visit, to a lane of `length` samples."""
    turn.become(TurnState.WAITING)
    turn.become(TurnState.COMPLETE)
    if turn.lane >= 0:
        full, rest = divmod(length, batch_size)
        turn.made = max(0, min(turn.batches, full - turn.index))
        if turn.made:
            turn.parts.append(Part(0, turn.made, turn.made * batch_size, (), b"%d" % (turn.index + turn.made)))
        turn.ended = turn.made < turn.batches
        turn.leftover = rest if turn.ended else 0
    order.on_completed(turn)


def rows_of(turn: Turn, lengths: list[int], batch_size: int) -> list[tuple[Row, ...]]:
    """Return the batches of a pool's turn or the merged batch, with samples as (lane, number)."""
    if turn.lane == TAIL_LANE:
        rows: list[Row] = []
        for part in turn.leftovers:
            first = lengths[part.lane] // batch_size * batch_size + part.start
            rows += [(part.lane, number) for number in range(first, first + part.count)]
        return [tuple(rows)]
    pool = turn.pool
    assert pool is not None
    rows = [
        (visit.lane, number)
        for visit in pool.visits
        for number in range(visit.index * batch_size, (visit.index + visit.made) * batch_size)
    ]
    first = (turn.index - pool.index) * batch_size
    order = source_rows(0, 0, pool.number, pool.part, len(rows), first, turn.batches * batch_size)
    mixed = [rows[number] for number in order]
    return [tuple(mixed[at : at + batch_size]) for at in range(0, len(mixed), batch_size)]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(
    st.lists(st.integers(0, 30), max_size=9),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(2, 5),
    st.booleans(),
    st.integers(1, 12),
    st.integers(0, 999),
)
def test_the_order_is_that_of_the_reference_whatever_is_ready_first(
    lengths: list[int], batch_size: int, turn: int, pool: int, drop: bool, ahead: int, seed: int
) -> None:
    chance = random.Random(seed)
    visits = LaneVisits(len(lengths), turn, pool=pool)
    order = PooledOrder(visits, turn, batch_size=batch_size, drop_remainder=drop)
    stream: list[tuple[Row, ...]] = []
    while not order.finished:
        while order.more and sum(one.lane >= 0 for one in order.window) < ahead + pool:
            assert order.visit() is not None
        waiting = [one for one in order.window if not one.complete]
        if waiting:
            one = chance.choice(waiting)
            close(order, one, lengths[one.lane] if one.lane >= 0 else 0, batch_size)
        assert order.awaited is None or not order.awaited.complete or order.next() is not None
        while (ready := order.next()) is not None and (ahead % 2 or chance.random() < 0.7):
            order.take(ready)
            if ready.lane < 0:
                stream += rows_of(ready, lengths, batch_size)
    lanes = [[(lane, number) for number in range(length)] for lane, length in enumerate(lengths)]

    def mix(visit: int, part: int, rows: list[Row]) -> list[Row]:
        return [rows[number] for number in source_rows(0, 0, visit, part, len(rows), 0, len(rows))] if rows else []

    expected = batches_of_pools(lanes, batch_size=batch_size, turn=turn, pool=pool, mix=mix, drop_remainder=drop)
    assert stream == list(expected)
    assert order.dropped_rows == (sum(lengths) % batch_size if drop else 0)


def test_of_several_visits_that_failed_the_first_in_the_order_is_told_once_those_before_it_are_made() -> None:
    order = PooledOrder(LaneVisits(3, 1, pool=3), 1, batch_size=2, drop_remainder=False)
    first, second, third = (order.visit() for _ in range(3))
    assert first is not None
    assert second is not None
    assert third is not None
    third.error = GeneratorError("the third")
    close(order, third)
    assert order.next() is None
    assert order.awaited is first
    second.error = GeneratorError("the second")
    close(order, second, 2, 2)
    assert order.next() is None
    assert order.awaited is first
    close(order, first, 2, 2)
    assert order.next() is second
    assert not second.deliverable, "its batches belong to a pool that is never formed"


@pytest.mark.parametrize("other", [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)])
def test_each_pool_of_each_epoch_and_seed_has_an_order_of_its_own(other: tuple[int, int, int, int]) -> None:
    one, another = (source_rows(*key, 100, 0, 100).tolist() for key in ((0, 0, 0, 0), other))
    assert sorted(one) == sorted(another) == list(range(100))
    assert one != another


# --- what a worker does ---


@pytest.mark.parametrize("large", [False, True], ids=["small-rows", "large-rows"])
def test_a_worker_copies_each_row_of_the_pool_to_the_place_that_the_order_gives_it(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if large:
        monkeypatch.setattr(pooling, "_LARGE", 1)
    declared = Feed(rows, splits=range(9), batch_size=4, shuffle=8, lanes=3, turn=2, seed=5, spec=Leaf("int64", (3,)))
    feed, memfds = LoadedFeed(declared, declared.plan("train")), Memfds()
    assert feed.layout is not None
    for memfd in range(5):
        memfds.put(memfd, np.full(feed.layout.nbytes, 255, np.uint8))
    counts = (2, 1, 2)
    for memfd, batches in enumerate(counts):
        numbers = 100 * memfd + np.arange(batches * 4).reshape(batches, 4, 1)
        memfds.batches(feed.layout, memfd).leaves[0][:batches] = numbers
    sources = tuple(m.PooledVisit(memfd, batches) for memfd, batches in enumerate(counts))
    mixed, first = [], 0
    for memfd, batches in ((3, 2), (4, 2), (3, 1)):
        message = m.PoolRows(
            run=1, ticket=1, memfd=memfd, nbytes=feed.layout.nbytes, feed="train", epoch=6, visit=7, part=8,
            sources=sources, first=first, batches=batches, index=50 + first,
        )  # fmt: skip
        pooling.pool_rows(message, feed, memfds)
        target = memfds.batches(feed.layout, memfd)
        assert target.headers[:batches, :4].tolist() == [[4, 6, POOL_LANE, 50 + first + n] for n in range(batches)]
        mixed += target.leaves[0][:batches].reshape(-1, 3).tolist()
        first += batches
    pool = [[100 * memfd + number] * 3 for memfd, batches in enumerate(counts) for number in range(4 * batches)]
    assert mixed == [pool[number] for number in source_rows(5, 6, 7, 8, 20, 0, 20)]


# --- what the coordinator does ---

POOL = {"shuffle": 8, "lanes": 2, "turn": 2}


def pool_of(machine: Machine) -> tuple[list[do.Fill], list[do.Command]]:
    """Make both visits of the first pool: 2 batches of lane 0, and 1 of lane 1, which ends with 3 rows left over.
    Return the fills, and the commands that follow."""
    machine.begin()
    fills = [filling(machine, ticket) for ticket in machine.tickets[:2]]
    machine.made(fills[0], 2, record=b"a")
    return fills, machine.made(fills[1], 1, record=b"b", ended=True, leftover=3)


def test_a_pool_is_told_and_its_rows_are_copied_when_all_of_its_visits_are_made() -> None:
    machine = Machine(credit=4, **POOL)
    fills, commands = pool_of(machine)
    (told,) = [command.message for command in commands if isinstance(command, do.Tell)] or [None]
    slots = [command for command in commands if isinstance(command, do.FindSlot)]
    assert told is None, "a pool is told when its first batch is there, or at once if it has none"
    assert len(slots) >= 2, "a turn of two batches, and one of one"
    (mix,) = machine.tell(on.SlotFound(slots[0].ticket))
    assert isinstance(mix, do.PoolRows)
    assert (mix.visit, mix.part, mix.first, mix.batches, mix.index) == (0, 0, 0, 2, 0)
    assert mix.sources == ((fills[0].ticket, 2), (fills[1].ticket, 1))
    tell, send, *_ = machine.tell(m.RowsWritten(mix.run, mix.ticket))
    assert isinstance(tell, do.Tell)
    assert isinstance(send, do.SendSlab)
    lanes = (m.LaneInPool(0, 2, b"a"), m.LaneInPool(1, 1, b"b", 0, 3))
    assert tell.message == m.PoolBegun(0, 0, 3, 12, lanes)
    assert (send.lane, send.index, send.batches, send.rows, send.record) == (POOL_LANE, 0, 2, 8, b"")


def test_the_slots_of_the_visits_are_free_when_all_turns_of_the_pool_are_there() -> None:
    machine = Machine(credit=4, **POOL)
    fills, commands = pool_of(machine)
    slots = [command.ticket for command in commands if isinstance(command, do.FindSlot)][:2]
    for ticket in slots:
        (mix,) = machine.tell(on.SlotFound(ticket))
        assert isinstance(mix, do.PoolRows)
        commands = machine.tell(m.RowsWritten(mix.run, mix.ticket))
        freed = {command.ticket for command in commands if isinstance(command, do.Free)}
        assert freed == ({fill.ticket for fill in fills} if ticket == slots[-1] else set())


def test_when_the_worker_that_copies_rows_dies_another_one_does_it_and_a_late_answer_is_ignored() -> None:
    machine = Machine(credit=4, **POOL)
    _, commands = pool_of(machine)
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    again = [one for one in machine.tell(on.WorkerDied(mix.worker, "died")) if isinstance(one, do.PoolRows)]
    assert [one.worker for one in again] == [1 - mix.worker]
    assert msgspec.structs.replace(again[0], worker=mix.worker, run=mix.run) == mix
    assert not any(isinstance(one, do.SendSlab) for one in machine.tell(m.RowsWritten(mix.run, mix.ticket)))
    assert any(isinstance(one, do.SendSlab) for one in machine.tell(m.RowsWritten(again[0].run, mix.ticket)))


def test_when_rows_cannot_be_copied_the_stream_fails_there() -> None:
    machine = Machine(credit=4, **POOL)
    _, commands = pool_of(machine)
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    machine.tell(on.RunFailed(mix.run, PenstockError("no such slot")))
    error = machine.coordinator.streams[1].error
    assert error is not None
    assert error.message == "no such slot"


def test_an_epoch_that_is_left_while_rows_are_copied_lets_go_of_its_slots_when_that_is_done() -> None:
    machine = Machine(credit=4, **POOL)
    _, commands = pool_of(machine)
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    machine.tell(on.Close(1, 0))
    assert do.Free(ticket) not in machine.opened
    assert kinds(machine.tell(m.RowsWritten(mix.run, mix.ticket))) == [do.Free]


def test_a_visit_without_a_full_batch_is_no_source_and_a_pool_of_such_visits_needs_no_copy() -> None:
    machine = Machine(credit=4, **POOL)
    machine.begin()
    fills = [filling(machine, ticket) for ticket in machine.tickets[:3]]
    machine.made(fills[0], 2, record=b"a2")
    commands = machine.made(fills[1], 0, record=b"b", ended=True, leftover=1)
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    assert mix.sources == ((fills[0].ticket, 2),)
    machine.tell(m.RowsWritten(mix.run, ticket))
    machine.made(fills[2], 0, record=b"a2", ended=True, leftover=2)
    (told,) = [one.message for one in machine.tell(on.SlotFound(machine.tickets[3])) if isinstance(one, do.Tell)]
    assert told == m.PoolBegun(0, 1, 0, 0, (m.LaneInPool(0, 2, b"a2", 1, 2),))


def test_restart_records_that_are_large_come_in_several_messages() -> None:
    machine = Machine(credit=4, **POOL)
    machine.begin()
    records = b"a" * 40_000, b"b" * 40_000
    for ticket, record in zip(machine.tickets[:2], records, strict=True):
        commands = machine.made(filling(machine, ticket), 2, record=record)
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    told = [one.message for one in machine.tell(m.RowsWritten(mix.run, ticket)) if isinstance(one, do.Tell)]
    assert told == [
        m.PoolBegun(0, 0, 4, 16, (m.LaneInPool(lane, 2, record),), more=not lane) for lane, record in enumerate(records)
    ]


def test_a_pool_names_the_record_behind_its_own_batches_though_the_lane_is_further() -> None:
    machine = Machine(credit=4, **POOL)
    machine.begin()
    fills = [filling(machine, ticket) for ticket in machine.tickets[:3]]
    machine.made(fills[0], 2, record=b"a2")
    machine.made(fills[2], 2, record=b"a4")
    commands = machine.made(fills[1], 2, record=b"b2")
    ticket = next(command.ticket for command in commands if isinstance(command, do.FindSlot))
    (mix,) = machine.tell(on.SlotFound(ticket))
    assert isinstance(mix, do.PoolRows)
    (told,) = [one.message for one in machine.tell(m.RowsWritten(mix.run, ticket)) if isinstance(one, do.Tell)]
    assert told == FIRST


# --- which feeds have pools ---


def rows(split: int) -> object:
    raise NotImplementedError


def plan(**options: object) -> m.FeedPlan:
    return Feed(rows, splits=range(40), **{"batch_size": 32, "shuffle": 10_000, **options}).plan("train")


def test_feeds_that_shuffle_splits_in_exact_order_have_pools_and_large_slots_smaller_ones() -> None:
    small = Leaf("uint8", (100,))
    assert pooled_lanes(plan(), small) == 16
    assert pooled_lanes(plan(lanes=64), small) == m.MAX_POOLED
    assert pooled_lanes(plan(), Leaf("uint8", (1 << 20,))) == 8, "256 MiB of batches of 32 MiB"
    assert pooled_lanes(plan(), Leaf("uint8", (1 << 24,))) == 1
    for none in ({"shuffle": 0}, {"order": "fast"}, {"lanes": 1}, {"batch_size": None, "shuffle": 100}):
        assert pooled_lanes(plan(**none), small) == 1
    assert pooled_lanes(plan(), Leaf("uint8", (None,), ragged=True)) == 1


def test_a_turn_is_at_most_a_block_where_lanes_mix_their_rows_and_four_batches_where_they_do_not() -> None:
    small = Leaf("uint8", (100,))
    assert fixed_slots(plan(shuffle=16 * 32 * 5), small, 32).batches == 5
    assert fixed_slots(plan(shuffle=16 * 32 * 5, order="fast"), small, 32).batches == 4
    assert fixed_slots(plan(shuffle=1), small, 32).batches == 1


# --- positions ---

INFO = m.FeedInfo(
    name="train",
    spec=Leaf("int64", ()),
    batch_size=4,
    turn=2,
    drop_remainder=False,
    order="exact",
    lanes=2,
    seed=0,
    epochs=None,
    batches=None,
    samples=None,
    shuffle=8,
    pool=2,
)
FIRST = m.PoolBegun(0, 0, 4, 16, (m.LaneInPool(0, 2, b"a2"), m.LaneInPool(1, 2, b"b2")))
SECOND = m.PoolBegun(0, 4, 3, 12, (m.LaneInPool(0, 4, b"a4"), m.LaneInPool(1, 3, b"b3", 0, 1)))


def slab(seq: int, index: int, batches: int) -> m.Slab:
    return m.Slab(seq, 0, POOL_LANE, index, batches, 4 * batches, 100)


def test_a_position_within_a_pool_is_its_start_with_the_records_behind_it() -> None:
    track = Progress(INFO)
    track.on_handed(slab(0, 0, 2), (FIRST,))
    track.on_handed(slab(1, 2, 2), ())
    track.on_handed(slab(2, 4, 2), (SECOND,))
    track.on_handed(slab(3, 6, 1), ())
    assert track.position(1) == Position(INFO, 0, places=(Place(0, 0, b"", b"a2"), Place(1, 0, b"", b"b2")), skip=1)
    assert track.position(3).skip == 3
    behind = track.position(4)
    assert behind == Position(INFO, 0, 4, 16, places=(Place(0, 2, b"a2"), Place(1, 2, b"b2")))
    within = track.position(5)
    assert (within.batches, within.skip) == (4, 1)
    assert within.places == (Place(0, 2, b"a2", b"a4"), Place(1, 2, b"b2", b"b3"))
    end = track.position(7)
    assert (end.batches, end.rows, end.skip) == (7, 28, 0)
    assert end.places == (Place(0, 4, b"a4"),)
    assert [(lane.lane, lane.index, lane.leftover) for lane in end.ended] == [(1, 3, 1)]
    assert unpack(pack(within)) == within


@pytest.mark.parametrize("passed", [1, 3])
def test_a_stream_that_goes_on_within_a_pool_is_told_of_it_again(passed: int) -> None:
    start = Position(INFO, 0, places=(Place(0, 0, b"", b"a2"), Place(1, 0, b"", b"b2")), skip=passed)
    track = Progress(INFO, start, consumed=passed)
    assert track.position(passed) == start
    parts = [m.SentElsewhere(0, POOL_LANE, at, 1, 4) for at in range(passed)]
    track.on_handed(slab(0, passed, 4 - passed), (FIRST, *parts))
    if passed < 3:
        assert track.position(passed + 1) == msgspec.structs.replace(start, skip=passed + 1)
    assert track.position(4) == Position(INFO, 0, 4, 16, places=(Place(0, 2, b"a2"), Place(1, 2, b"b2")))
    check_ = EpochCheck(start)
    check_.on_pool(FIRST)
    for part in parts:
        check_.on_batches(part)
    check_.on_batches(slab(0, passed, 4 - passed))
    assert check_.fault(m.End(0, 1, 4, 16)) == "is over, but its lane 0, with 2 batches so far, has not ended"


def test_a_rank_hears_of_the_next_pool_before_its_own_batch_of_this_one() -> None:
    track = Progress(INFO)
    for seq, (index, before) in enumerate([(0, (FIRST,)), (2, ())]):
        track.on_handed(slab(seq, index, 1), (*before, m.SentElsewhere(0, POOL_LANE, index + 1, 1, 4)))
    assert track.position(2).batches == 4
    last_of_first = Progress(INFO)
    last_of_first.on_handed(slab(0, 0, 1), (FIRST, *(m.SentElsewhere(0, POOL_LANE, at, 1, 4) for at in (1, 2))))
    last_of_first.on_handed(slab(1, 3, 1), (SECOND, *(m.SentElsewhere(0, POOL_LANE, at, 1, 4) for at in (4, 5))))
    found = last_of_first.position(2)
    assert (found.batches, found.skip) == (4, 2)
    assert found.places == (Place(0, 2, b"a2", b"a4"), Place(1, 2, b"b2", b"b3"))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_pool_that_begins_again_after_a_lost_connection_begins_again_in_the_position(ahead: bool) -> None:
    track = Progress(INFO)
    track.on_handed(slab(0, 0, 3), (FIRST, SECOND) if ahead else (FIRST,))
    assert track.newest().skip == 3
    again = [m.SentElsewhere(0, POOL_LANE, 0, 2, 8), m.SentElsewhere(0, POOL_LANE, 2, 1, 4)]
    track.on_handed(slab(0, 3, 1), (FIRST, *again))
    assert track.newest() == Position(INFO, 0, 4, 16, places=(Place(0, 2, b"a2"), Place(1, 2, b"b2")))


def test_a_merged_batch_of_another_rank_that_comes_before_the_last_batch_of_a_pool_is_not_of_the_pool() -> None:
    track = Progress(INFO)
    merged = m.SentElsewhere(0, TAIL_LANE, 0, 1, 4)
    track.on_handed(slab(0, 0, 2), (FIRST,))
    track.on_handed(slab(1, 3, 1), (m.SentElsewhere(0, POOL_LANE, 2, 1, 4), merged))
    found = track.newest()
    assert (found.batches, found.merged, found.skip) == (5, 1, 0)


def test_a_rank_keeps_the_ends_of_all_pools_without_a_batch_that_begin_before_its_own_batch() -> None:
    track = Progress(INFO)
    ends = [m.PoolBegun(0, 5 + n, 0, 0, (m.LaneInPool(n, 2, b"r", n, 1),)) for n in range(2)]
    track.on_handed(slab(0, 3, 1), (FIRST, m.SentElsewhere(0, POOL_LANE, 0, 3, 12), *ends))
    found = track.newest()
    assert (found.batches, found.skip, found.places) == (4, 0, ())
    assert [lane.lane for lane in found.ended] == [0, 1]


def test_the_lanes_of_a_pool_may_come_in_several_messages() -> None:
    track = Progress(INFO)
    halves = [msgspec.structs.replace(FIRST, lanes=(lane,), more=not n) for n, lane in enumerate(FIRST.lanes)]
    track.on_handed(slab(0, 0, 4), tuple(halves))
    assert track.newest() == Position(INFO, 0, 4, 16, places=(Place(0, 2, b"a2"), Place(1, 2, b"b2")))


def test_a_pool_without_batches_moves_its_lanes_at_once() -> None:
    track = Progress(INFO)
    track.on_handed(slab(0, 0, 4), (FIRST,))
    empty = m.PoolBegun(0, 4, 0, 0, (m.LaneInPool(0, 2, b"a2", 0, 3), m.LaneInPool(1, 2, b"b2", 1, 1)))
    track.on_handed(m.Slab(1, 0, TAIL_LANE, 0, 1, 4, 100), (empty,))
    found = track.newest()
    assert (found.batches, found.merged, found.places) == (5, 1, ())
    assert [lane.lane for lane in found.ended] == [0, 1]


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 9)), min_size=1, max_size=12), st.data())
def test_slabs_of_pools_that_nobody_asks_for_are_thinned_out_and_positions_stay_right(
    pools: list[tuple[int, int]], data: st.DataObject
) -> None:
    """`pools`: for each pool its number of batches, and the number of merged ones that follow."""
    stream: list[tuple[m.Slab, tuple[m.PoolBegun, ...]]] = []
    pooled = merged = 0
    for number, (batches, more) in enumerate(pools):
        lanes = (m.LaneInPool(0, 2 * number + 2, b"a%d" % number), m.LaneInPool(1, 2 * number + 2, b"b%d" % number))
        before: tuple[m.PoolBegun, ...] = (m.PoolBegun(0, pooled, batches, 4 * batches, lanes),)
        for lane, index in [(POOL_LANE, pooled + n) for n in range(batches)] + [
            (TAIL_LANE, merged + n) for n in range(more)
        ]:
            stream.append((m.Slab(len(stream), 0, lane, index, 1, 4, 100), before))
            before = ()
        pooled, merged = pooled + batches, merged + more
    thinned, whole = Progress(INFO), Progress(INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "SPAN", 6)
        for slab, before in stream:
            whole.on_handed(slab, before)
        patch.setattr(progress, "KEEP", 8)
        for slab, before in stream:
            thinned.on_handed(slab, before)
    assert thinned.newest() == whole.newest()
    consumed = data.draw(st.integers(thinned.oldest, len(stream)))
    found, exact = thinned.position(consumed), whole.position(consumed)
    assert found.batches + found.skip == exact.batches + exact.skip == consumed
    assert found.places == exact.places
    assert found.skip <= 7 + 6


@pytest.mark.parametrize(
    ("places", "fits"),
    [
        ((), True),
        ((2, 2, 2, 2), True),
        ((2, 2, 0, 0), True),
        ((2, 0, 0, 0), False),
        ((0, 0, 2, 2), False),
        ((4, 4, 0, 0), False),
        ((1, 1, 1, 1), False),
        ((2, None, 0, 0), True),
    ],
)
def test_a_position_that_is_not_between_two_pools_is_refused(places: tuple[int | None, ...], fits: bool) -> None:
    """Four lanes in two pools. None: the lane has ended."""
    machine = Machine(shuffle=8, lanes=4, turn=2)
    feed = machine.coordinator.feeds["train"]
    assert feed.static_splits is not None
    position = Position(
        msgspec.structs.replace(feed.info, pool=2),
        0,
        places=tuple(Place(lane, index, b"r") for lane, index in enumerate(places) if index),
        ended=tuple(EndedLane(lane, 1, 0, b"r") for lane, index in enumerate(places) if index is None),
    )
    if fits:
        check(position, feed.plan, feed.static_splits)
        return
    with pytest.raises(StateMismatch, match="damaged"):
        check(position, feed.plan, feed.static_splits)


def test_a_position_that_passes_over_more_than_a_pool_is_refused() -> None:
    most = INFO.turn * INFO.pool + 512
    Position(INFO, 0, skip=most)
    with pytest.raises(ProtocolError):
        unpack(msgspec.msgpack.encode({"feed": msgspec.to_builtins(INFO), "epoch": 0, "skip": most + 1}))


def test_a_state_from_before_there_were_pools_is_refused_with_both_values() -> None:
    before = msgspec.msgpack.decode(pack(Position(INFO, 0, 2, 8)))
    del before["feed"]["pool"]
    position = unpack(msgspec.msgpack.encode(before))
    assert list(differences(position.feed, INFO)) == ["pool was 1 and is 2 now"]


# --- a group with a state file ---


def test_the_file_of_a_group_has_lanes_where_their_pool_begins_until_all_of_it_was_handed_over() -> None:
    saved: list[do.Command] = []
    log = GroupLog(INFO, "g", None, saved.append)
    log.begin(0, b"digest")
    log.on_pool_begun(FIRST)
    first, second = Turn(POOL_LANE, 0, 2), Turn(POOL_LANE, 2, 2)
    for turn in (first, second):
        log.on_delivery(0, turn, Part(0, 2, 8, ()))
    for turn, batch in ((first, 1), (first, 0), (second, 0)):
        log.on_handed([SentSlab(0, 100, 0, turn, Part(batch, 1, 4, ()))])
        now = saved[-1]
        assert isinstance(now, do.SaveGroup)
        assert (now.batches, now.places, now.passed) == (0, (), ())
        assert now.beyond == ((POOL_LANE, turn.index + batch, 1),)
    log.on_handed([SentSlab(0, 100, 0, second, Part(1, 1, 4, ()))])
    now = saved[-1]
    assert isinstance(now, do.SaveGroup)
    assert (now.batches, now.places, now.beyond) == (4, ((0, 2, b"a2"), (1, 2, b"b2")), ())
    assert dict(now.passed) == {0: 2, 1: 2, POOL_LANE: 4}


def test_the_file_of_a_group_has_the_lanes_that_end_in_a_pool_without_batches() -> None:
    saved: list[do.Command] = []
    log = GroupLog(INFO, "g", None, saved.append)
    log.begin(0, b"digest")
    log.on_pool_begun(m.PoolBegun(0, 0, 0, 0, (m.LaneInPool(0, 0, b"a", 0, 3), m.LaneInPool(1, 0, b"b", 1, 1))))
    merged = Turn(TAIL_LANE, 0, 1)
    log.on_delivery(0, merged, Part(0, 1, 4, ()))
    log.on_handed([SentSlab(0, 100, 0, merged, Part(0, 1, 4, ()))])
    now = saved[-1]
    assert isinstance(now, do.SaveGroup)
    assert now.merged == 1
    assert now.ended == ((0, 0, 0, 3, b"a"), (1, 1, 0, 1, b"b"))
