"""The order of an epoch, tested alone: turns may complete in any sequence, and leave it in the reference's order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import GeneratorError
from penstock_proto.batches.layout import TAIL_LANE
from penstock_server.coordinator.model.turn import Leftover, Part, Turn, TurnState
from penstock_server.coordinator.order.order import EpochOrder, ExactOrder, FastOrder
from penstock_server.coordinator.order.visits import LaneVisits, RangeVisits
from tests.reference.reference import batches_of_lanes, epoch_length

quick = settings(derandomize=True, deadline=None, max_examples=300)


def complete(turn: Turn) -> None:
    """Complete the turn: no run fills it now."""
    turn.become(TurnState.WAITING)
    turn.become(TurnState.COMPLETE)


lengths_of_lanes = st.lists(st.integers(0, 20), max_size=8)


def close(order: EpochOrder, turn: Turn, length: int, batch_size: int) -> None:
    """Complete a visit to a lane of `length` samples, as a worker would report it."""
    full, rest = divmod(length, batch_size)
    complete(turn)
    turn.ended = full < turn.index + turn.batches
    turn.leftover = rest if turn.ended else 0
    order.on_completed(turn)


def rows_of(turn: Turn, length: int, batch_size: int) -> list[tuple[tuple[int, int], ...]]:
    """Return the batches of a visit, with samples as (lane, number)."""
    full = length // batch_size
    return [
        tuple((turn.lane, number) for number in range(batch * batch_size, (batch + 1) * batch_size))
        for batch in range(turn.index, min(full, turn.index + turn.batches))
    ]


def merged(turn: Turn, lengths: list[int], batch_size: int) -> tuple[tuple[int, int], ...]:
    """Return the rows of a merged batch."""
    rows: list[tuple[int, int]] = []
    for part in turn.leftovers:
        first = lengths[part.lane] // batch_size * batch_size + part.start
        rows += [(part.lane, number) for number in range(first, first + part.count)]
    return tuple(rows)


def play(
    order: EpochOrder, lengths: list[int], batch_size: int, *, ahead: int, seed: int
) -> list[tuple[tuple[int, int], ...]]:
    """Make up to `ahead` visits in advance, complete turns at random, and return the stream."""
    chance = random.Random(seed)
    stream: list[tuple[tuple[int, int], ...]] = []
    while not order.finished:
        while order.more and len(order.window) < ahead:
            assert order.visit() is not None
        open_turns = [turn for turn in order.window if not turn.complete]
        if open_turns:
            turn = chance.choice(open_turns)
            if turn.lane == TAIL_LANE:
                complete(turn)
                order.on_completed(turn)
            else:
                close(order, turn, lengths[turn.lane], batch_size)
        while (ready := order.next()) is not None and (ahead % 2 or chance.random() < 0.7):
            turn = ready
            order.take(turn)
            if turn.lane == TAIL_LANE:
                stream.append(merged(turn, lengths, batch_size))
            else:
                stream += rows_of(turn, lengths[turn.lane], batch_size)
    return stream


@quick
@given(lengths_of_lanes, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(1, 12), st.integers(0, 999))
def test_exact_order_is_that_of_the_reference_whatever_is_ready_first(
    lengths: list[int], batch_size: int, turn: int, drop_remainder: bool, ahead: int, seed: int
) -> None:
    order = ExactOrder(LaneVisits(len(lengths), turn), batch_size=batch_size, drop_remainder=drop_remainder)
    stream = play(order, lengths, batch_size, ahead=ahead, seed=seed)
    lanes = [[(lane, number) for number in range(length)] for lane, length in enumerate(lengths)]
    assert stream == list(batches_of_lanes(lanes, batch_size=batch_size, turn=turn, drop_remainder=drop_remainder))
    dropped = sum(lengths) - sum(map(len, stream))
    assert order.dropped_rows == dropped == (sum(lengths) % batch_size if drop_remainder else 0)


@quick
@given(lengths_of_lanes, st.integers(1, 5), st.integers(1, 3), st.booleans(), st.integers(1, 12), st.integers(0, 999))
def test_fast_order_has_every_sample_once_in_as_many_batches(
    lengths: list[int], batch_size: int, turn: int, drop_remainder: bool, ahead: int, seed: int
) -> None:
    order = FastOrder(LaneVisits(len(lengths), turn), batch_size=batch_size, drop_remainder=drop_remainder)
    stream = play(order, lengths, batch_size, ahead=ahead, seed=seed)
    assert len(stream) == epoch_length(sum(lengths), batch_size, drop_remainder=drop_remainder)
    came = Counter(row for batch in stream for row in batch)
    assert came <= Counter((lane, number) for lane, length in enumerate(lengths) for number in range(length))
    assert came.total() + order.dropped_rows == sum(lengths)


@quick
@given(lengths_of_lanes, st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_a_visit_is_given_its_first_batchs_number_as_far_as_lanes_have_ended(
    lengths: list[int], batch_size: int, turn: int, drop_remainder: bool
) -> None:
    order = ExactOrder(LaneVisits(len(lengths), turn), batch_size=batch_size, drop_remainder=drop_remainder)
    delivered = 0
    while not order.finished:
        visit = order.visit()
        if visit is not None:
            assert visit.foreseen == delivered
            visit.made = max(0, min(visit.batches, lengths[visit.lane] // batch_size - visit.index))
            close(order, visit, lengths[visit.lane], batch_size)
        while order.window:
            first = order.window[0]
            assert order.awaited is first
            if first.merged:
                complete(first)
                order.ungranted.clear()
                order.on_completed(first)
            delivered += first.batches if first.merged else first.made
            order.take(first)
    assert delivered == epoch_length(sum(lengths), batch_size, drop_remainder=drop_remainder)


def test_leftovers_come_right_behind_the_visit_that_completes_a_batch() -> None:
    order = ExactOrder(LaneVisits(3, 1), batch_size=4, drop_remainder=False)
    turns = [order.visit() for _ in range(3)]
    for turn, length in zip(reversed(turns), (9, 2, 3), strict=True):  # lanes 2, 1, 0: the head is complete last
        assert turn is not None
        close(order, turn, length, 4)
    assert [turn.lane for turn in order.window] == [0, 1, TAIL_LANE, 2]
    assert order.window[2].leftovers == (Leftover(0, 0, 3), Leftover(1, 0, 1))
    assert list(order.ungranted) == [order.window[2]]


def test_in_fast_order_visits_come_as_they_are_ready_and_merged_batches_one_after_the_other() -> None:
    order = FastOrder(LaneVisits(4, 1), batch_size=2, drop_remainder=False)
    turns = [order.visit() for _ in range(4)]
    for turn in reversed(turns):
        assert turn is not None
        close(order, turn, 1, 2)
    for turn in reversed(turns):
        assert order.next() is turn
        order.take(turn)
    first, second = order.ungranted
    assert [part.lane for part in (*first.leftovers, *second.leftovers)] == [3, 2, 1, 0]
    complete(second)
    order.on_completed(second)
    assert order.next() is None
    first.parts.append(Part(0, 1, 2, ()))
    order.on_ready(first)
    assert order.next() is first
    first.parts.clear()
    assert order.next() is None
    complete(first)
    order.on_completed(first)
    for turn in (first, second):
        assert order.next() is turn
        order.take(turn)
    assert order.finished


def test_a_lane_that_ends_with_a_whole_turn_ends_at_its_next_visit() -> None:
    order = ExactOrder(LaneVisits(2, 2), batch_size=1, drop_remainder=False)
    assert play(order, [2, 5], 1, ahead=1, seed=0) == [
        ((0, 0),),
        ((0, 1),),
        ((1, 0),),
        ((1, 1),),
        ((1, 2),),
        ((1, 3),),
        ((1, 4),),
    ]


@pytest.mark.parametrize("kind", [ExactOrder, FastOrder])
def test_an_epoch_without_lanes_or_without_batches_is_finished_at_once(kind: type[ExactOrder | FastOrder]) -> None:
    assert kind(LaneVisits(0, 1), batch_size=4, drop_remainder=False).finished
    assert kind(RangeVisits(0, 1), batch_size=4, drop_remainder=True).finished


@pytest.mark.parametrize("kind", [ExactOrder, FastOrder])
def test_nothing_is_merged_behind_an_error(kind: type[ExactOrder | FastOrder]) -> None:
    order = kind(LaneVisits(2, 1), batch_size=4, drop_remainder=False)
    first, second = order.visit(), order.visit()
    assert first is not None
    assert second is not None
    close(order, second, 3, 4)
    first.error = GeneratorError("no")
    complete(first)
    order.on_completed(first)
    assert list(order.window) == [first, second]
    assert order.more


def test_each_group_of_lanes_has_its_own_order() -> None:
    visits = LaneVisits(5, 3, sets=2)
    visits.on_lane_ended(2)
    made = [visits.next(group) for group in (0, 0, 0, 1, 1, 1)]
    assert [(turn.lane, turn.index, turn.batches) for turn in made if turn] == [
        (0, 0, 3),
        (4, 0, 3),
        (0, 3, 3),
        (1, 0, 3),
        (3, 0, 3),
        (1, 3, 3),
    ]
    for lane in (1, 3):
        visits.on_lane_ended(lane)
    assert visits.next(1) is None
    assert not visits.exhausted
    for lane in (0, 4, 4):
        visits.on_lane_ended(lane)
    assert visits.exhausted


@pytest.mark.parametrize(("batches", "ranges"), [(0, []), (5, [(0, 2), (2, 2), (4, 1)]), (4, [(0, 2), (2, 2)])])
def test_an_indexable_epoch_is_cut_into_ranges_of_a_turn(batches: int, ranges: list[tuple[int, int]]) -> None:
    visits = RangeVisits(batches, 2)
    made = []
    while not visits.exhausted:
        turn = visits.next()
        made.append((turn.index, turn.batches))
    assert made == ranges
