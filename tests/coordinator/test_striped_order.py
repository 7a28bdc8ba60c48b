"""Stripes, tested alone: batches leave the order as if each turn had one batch, whichever of them are made first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_proto.batches.cursor import Cursor
from penstock_proto.batches.position import Position
from penstock_proto.messages import SentElsewhere
from penstock_server.coordinator.model.stripe import Stripe
from penstock_server.coordinator.model.turn import Part, Turn, TurnState
from penstock_server.coordinator.order.striped_order import StripedOrder
from penstock_server.coordinator.order.visits import LaneVisits
from tests.coordinator.test_order import complete, lengths_of_lanes, merged, quick
from tests.reference.reference import batches_of_lanes
from tests.simulation.simulation import SimFeed

Batch = tuple[tuple[int, int], ...]
INFO = SimFeed(lanes=8, room=9).info()


def order_of(
    lanes: int,
    batches: int,
    *,
    most: int = 100,
    batch_size: int = 1,
    drop: bool = False,
    position: Position | None = None,
) -> StripedOrder:
    visits = LaneVisits(lanes, 1, position=position)
    return StripedOrder(
        visits,
        batches=batches,
        most=most,
        batch_size=batch_size,
        drop_remainder=drop,
        singly=False,
        position=position,
    )


def make(order: StripedOrder, visit: Turn, count: int, full: int, rest: int) -> None:
    """Make up to `count` batches of a visit to a lane with `full` batches and `rest` rows left over, as a worker would
    report them. The record of a lane is the number of its batches before it."""
    count = min(count, visit.batches - visit.made, full - visit.index - visit.made)
    if count > 0:
        visit.made += count
        order.on_record(visit, b"%d" % (visit.index + visit.made))
    if visit.made == visit.batches or visit.index + visit.made >= full:
        visit.ended = visit.made < visit.batches
        visit.leftover = rest if visit.ended else 0
        complete(visit)
        order.on_completed(visit)


def play(
    order: StripedOrder, lengths: list[int], batch_size: int, *, ahead: int, seed: int, stop: int | None = None
) -> tuple[list[Batch], Cursor]:
    """Plan up to `ahead` stripes in advance, make batches at random, and return the stream, or its first `stop` slabs.
    Also return where a consumer's position is after them."""
    chance, stream, planned = random.Random(seed), list[Batch](), list[Stripe]()
    cursor = Cursor(Position(INFO, 0))
    slabs = 0
    while not order.finished:
        planned = [stripe for stripe in planned if not stripe.is_over]
        while order.more and len(planned) < ahead and (stripe := order.plan()) is not None:
            planned.append(stripe)
        making = [turn for turn in order.window if not turn.complete]
        firsts = {turn.lane: turn for turn in reversed(making)}
        if firsts:
            turn = chance.choice(list(firsts.values()))
            if turn.merged:
                complete(turn)
                order.on_completed(turn)
            else:
                make(order, turn, chance.randint(1, 4), *divmod(lengths[turn.lane], batch_size))
        while (ready := order.next()) is not None and chance.random() < 0.8:
            if slabs == stop:
                return stream, cursor
            slabs += 1
            if isinstance(ready, Stripe):
                part = ready.parts.popleft()
                for place in range(part.first, part.first + part.batches):
                    lane, first = ready.lane_at(place), ready.index_at(place) * batch_size
                    assert part.lanes[(place - part.first) % len(part.lanes)] == lane
                    stream.append(tuple((lane, number) for number in range(first, first + batch_size)))
                at = ready.lane_at(part.first), ready.index_at(part.first)
                cursor.read(SentElsewhere(0, *at, part.batches, part.rows, b"", part.lanes, part.places))
                order.on_delivered(ready, part)
            elif ready.merged:
                order.take(ready)
                stream.append(merged(ready, lengths, batch_size))
            else:
                order.take(ready)
                ready.become(TurnState.DONE)
    return stream, cursor


@quick
@given(lengths_of_lanes, st.integers(1, 5), st.integers(2, 20), st.booleans(), st.integers(1, 3), st.integers(0, 999))
def test_the_order_is_that_of_turns_of_one_batch_whatever_is_made_first(
    lengths: list[int], batch_size: int, batches: int, drop: bool, ahead: int, seed: int
) -> None:
    order = order_of(len(lengths), batches, batch_size=batch_size, drop=drop)
    stream, _ = play(order, lengths, batch_size, ahead=ahead, seed=seed)
    lanes = [[(lane, number) for number in range(length)] for lane, length in enumerate(lengths)]
    assert stream == list(batches_of_lanes(lanes, batch_size=batch_size, turn=1, drop_remainder=drop))


@quick
@given(lengths_of_lanes, st.integers(2, 20), st.integers(1, 3), st.integers(0, 999), st.integers(0, 20))
def test_a_position_has_the_true_index_of_each_lane_and_a_record_at_or_before_it(
    lengths: list[int], batches: int, ahead: int, seed: int, stop: int
) -> None:
    stream, cursor = play(order_of(len(lengths), batches), lengths, 1, ahead=ahead, seed=seed, stop=stop)
    for lane in range(len(lengths)):
        index, record = cursor.places.get(lane, (0, b""))
        assert index == sum(batch[0][0] == lane for batch in stream)
        assert int(record or b"0") <= index
    place = cursor.position(INFO)
    goes_on = order_of(len(lengths), 7, position=place)
    live = sorted(range(len(lengths)), key=lambda lane: (cursor.places.get(lane, (0, b""))[0], lane))
    stripe = goes_on.plan()
    if stripe is not None:
        first = stripe.visits[0]
        assert first.index == min(cursor.places.get(lane, (0, b""))[0] for lane in live)


def test_what_is_ready_in_a_row_is_one_part_up_to_the_most() -> None:
    order = order_of(3, 8, most=4)
    stripe = order.plan()
    assert stripe is not None
    a, b, c = stripe.visits
    assert [(visit.place, visit.step, visit.batches) for visit in (a, b, c)] == [(0, 3, 3), (1, 3, 3), (2, 3, 2)]
    make(order, b, 3, 100, 0)
    assert order.next() is None, "a is first"
    make(order, a, 1, 100, 0)
    assert (order.next(), stripe.parts[0].batches, stripe.grows) == (stripe, 2, True)
    make(order, c, 2, 100, 0)
    assert (order.next(), stripe.parts[0].batches, stripe.grows) == (stripe, 3, True)
    make(order, a, 2, 100, 0)
    assert (order.next(), stripe.parts[0].batches, stripe.grows) == (stripe, 4, False)
    assert order.next(3) is stripe
    assert stripe.parts[0].lanes == (0, 1, 2)
    order.on_delivered(stripe, stripe.parts[0])
    assert order.next() is stripe
    assert (stripe.parts[0].first, stripe.parts[0].batches, stripe.parts[0].lanes) == (3, 4, (0, 1, 2))


def test_records_are_told_when_the_stream_has_come_to_them() -> None:
    order = order_of(2, 6)
    stripe = order.plan()
    assert stripe is not None
    a, b = stripe.visits
    make(order, a, 3, 100, 0)
    make(order, b, 1, 100, 0)

    def told() -> list[tuple[int, int]]:
        assert order.next() is stripe
        part: Part = stripe.parts[0]
        order.on_delivered(stripe, part)
        return [(place.lane, place.index) for place in part.places]

    assert told() == [(1, 1)], "three batches: a's record is after its third batch, and only two of them came"
    make(order, b, 2, 100, 0)
    assert told() == [(1, 3), (0, 3)]


def test_lanes_take_turns_if_their_records_do_not_fit_into_a_message() -> None:
    order, told = order_of(4, 8, most=4), []
    for _ in range(4):
        stripe = order.plan()
        assert stripe is not None
        for visit in stripe.visits:
            for _ in range(2):
                visit.made += 1
                order.on_record(visit, bytes(30 << 10))
            complete(visit)
            order.on_completed(visit)
        while isinstance(ready := order.next(), Stripe):
            part = ready.parts[0]
            told.append([(place.lane, place.index) for place in part.places])
            order.on_delivered(ready, part)
        while isinstance(ready, Turn):
            order.take(ready)
            ready.become(TurnState.DONE)
            ready = order.next()
    assert told == [[(lane, index), (lane + 1, index)] for index in range(1, 9) for lane in ((0, 2)[index % 2 - 1],)]
    assert all(len(records) < 2 for records in order._records.values()), "older records are forgotten"


@pytest.mark.parametrize("lanes", [1, 5, 40])
def test_a_stripe_may_have_fewer_batches_than_there_are_lanes(lanes: int) -> None:
    order = order_of(lanes, 6)
    first, second = order.plan(), order.plan()
    assert first is not None
    assert second is not None
    places = [(visit.lane, visit.index) for stripe in (first, second) for visit in stripe.visits]
    expected = [(batch % lanes, batch // lanes) for batch in range(12)]
    made = [(stripe.lane_at(place), stripe.index_at(place)) for stripe in (first, second) for place in range(6)]
    assert made == expected
    assert len(places) == 2 * min(lanes, 6)
