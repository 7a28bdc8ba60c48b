"""The window of a shared stream: which entry comes next for a job, and how a part of a slab is cut for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock_proto.batches.position import Place, Position
from penstock_proto.messages import LaneEnded, LanePlace
from penstock_server.coordinator.delivery.shared_delivery import SharedDelivery
from penstock_server.coordinator.delivery.window import Entry, EpochEnd, LeftEarly, Window, cut
from penstock_server.coordinator.model.consumer import Consumer
from penstock_server.coordinator.model.known_lists import SplitsInfo
from penstock_server.coordinator.model.leases import Leases
from penstock_server.coordinator.model.memory import Share
from penstock_server.coordinator.model.stripe import Stripe
from penstock_server.coordinator.model.turn import Part, Turn
from tests.simulation.simulation import SimFeed

A, B, C = 0, 1, 2


def new_slots() -> Leases:
    return Leases(itertools.count(1), 4096, lambda command: None)


def a_turn(slots: Leases, lane: int = A, index: int = 0, batches: int = 9) -> Turn:
    turn = Turn(lane, index, batches, lane)
    turn.slot = slots.acquire()
    return turn


def test_a_part_of_a_stripe_is_cut_with_the_lanes_and_the_records_of_each_piece() -> None:
    visits = [Turn(lane, 10 * lane, 3, lane, place=lane, step=3, striped=True) for lane in (A, B, C)]
    stripe = Stripe(1, visits, 9, 9)
    records = (LanePlace(B, 12, b"b"), LanePlace(C, 21, b"c"), LanePlace(A, 2, b"a"))
    part = Part(1, 6, 24, (), lanes=(B, C, A), places=records)  # b0 c0 a1 b1 c1 a2
    left, right = cut(stripe, part, 2, 4)
    assert left == Part(1, 2, 8, (), lanes=(B, C), places=(LanePlace(C, 21, b"c"),))
    assert right == Part(3, 4, 16, (), lanes=(A, B, C), places=records)
    assert cut(stripe, part, 6, 4) == (part, None)
    one, _ = cut(stripe, part, 1, 4)
    assert (one.lanes, one.places) == ((B,), ())


def test_the_first_piece_of_a_turns_part_does_not_have_the_record_after_all_of_it() -> None:
    slots = new_slots()
    left, right = cut(a_turn(slots), Part(2, 5, 20, (), b"r"), 3, 4)
    assert left == Part(2, 3, 12, (), lanes=(0,))
    assert right == Part(5, 2, 8, (), b"r")


def ended(epoch: int, at: int, lane: int) -> Entry:
    return Entry(epoch, at, LaneEnded(epoch, lane, lane, at, 0, b""))


def test_a_job_goes_on_where_everything_after_its_place_is_kept() -> None:
    slots = new_slots()
    window = Window(slots)
    entries = [
        Entry(0, 10, Part(0, 5, 20, ()), a_turn(slots)),
        ended(0, 15, A),
        ended(0, 15, B),
        Entry(0, 15, Part(0, 1, 4, ()), a_turn(slots)),
        Entry(0, 16, EpochEnd(16, 64)),
        Entry(1, 0, Part(0, 2, 8, ()), a_turn(slots)),
        Entry(1, 2, LeftEarly()),
        Entry(2, 0, Part(0, 2, 8, ()), a_turn(slots)),
    ]
    for entry in entries:
        window.append(entry)
    found = {place: window.find(*place) for place in [(0, 9), (0, 10), (0, 12), (0, 15), (0, 16), (1, 0), (1, 1)]}
    assert found == {(0, 9): None, (0, 10): 0, (0, 12): 0, (0, 15): 1, (0, 16): 4, (1, 0): 5, (1, 1): 5}
    assert [window.find(*place) for place in [(1, 2), (2, 0), (2, 2), (2, 3), (3, 0)]] == [None, 7, 8, None, None]
    window.drop_first()
    assert window.find(0, 12) is None
    assert window.find(0, 15) == 1
    window.drop_first()
    assert window.find(0, 15) is None, "it has only one of the two ends that come there"
    assert window.find(0, 16) == 4
    window.clear()
    assert (window.nbytes, window.slots) == (0, 0)


def test_nobody_joins_where_the_stream_leaves_the_epoch_before_another_batch() -> None:
    slots = new_slots()
    window = Window(slots)
    for entry in (Entry(0, 3, Part(0, 2, 8, ()), a_turn(slots)), ended(0, 5, A), Entry(0, 5, LeftEarly())):
        window.append(entry)
    assert [window.find(0, batches) for batches in (3, 4, 5)] == [0, 0, None]


def test_the_window_holds_a_slot_as_long_as_an_entry_has_it() -> None:
    slots = new_slots()
    window = Window(slots)
    turn = a_turn(slots)
    window.append(Entry(0, 0, Part(0, 2, 8, ()), turn))
    window.append(Entry(0, 2, Part(2, 2, 8, ()), turn))
    slots.release(turn.slot)  # the turn has left production
    assert (window.slots, window.nbytes, turn.slot.holders) == (1, 4096, 2)
    window.drop_first()
    assert turn.slot.ticket in slots
    window.drop_first()
    assert turn.slot.ticket not in slots


def test_nobody_joins_at_a_batch_that_a_job_has_for_itself() -> None:
    slots = new_slots()
    window = Window(slots)
    for at, shared in ((0, True), (2, False), (4, False)):
        window.append(Entry(0, at, Part(0, 2, 8, ()), a_turn(slots), shared))
    assert [window.find(0, at) for at in (0, 2, 4, 5)] == [None] * 4
    window.drop_first()
    assert [window.find(0, at) for at in (2, 4, 5)] == [None] * 3
    window.append(Entry(0, 6, Part(0, 2, 8, ()), a_turn(slots)))
    assert [window.find(0, at) for at in (5, 6, 7, 8)] == [None, 3, 3, 4]
    assert [window.slots_from(number) for number in (1, 3, 4)] == [3, 1, 0]


@pytest.mark.parametrize(("batches", "skip", "passed", "sent"), [(12, 0, 0, 3), (12, 2, 2, 1), (11, 9, 4, 0)])
def test_a_job_that_joins_within_a_slab_gets_the_rest_of_it(batches: int, skip: int, passed: int, sent: int) -> None:
    slots = new_slots()
    said: list[tuple[str, Part]] = []
    feed = SimFeed(batch_size=4, turn=9).served()
    consumer = Consumer(1, 1, "train", Share(1, 4, 4, 1), credit_bytes=1 << 40, holds_handed=True)
    outlet = SimpleNamespace(
        slots=slots,
        feed=feed,
        consumers=[consumer],
        live=True,
        first_epoch=SimpleNamespace(number=0, batches=15, skip=0, order=object()),
        tell_elsewhere=lambda epoch, source, part, consumers: said.append(("elsewhere", part)),
        send=lambda epoch, consumer, source, part, nbytes, shared: said.append(("slab", part)),
    )
    shared = SharedDelivery(cast(Any, outlet), lambda: (1 << 30, 100), lambda epoch, splits: None)
    shared.keep_for_others(True)
    shared.window.append(Entry(0, 10, Part(0, 5, 20, ()), a_turn(slots)))
    position = Position(feed.info, 0, batches=batches, places=(Place(A, batches, b"r"),), skip=skip)
    assert shared.covers((0, batches))
    shared.join([consumer], position)
    consumer.begin(0)
    shared.catch_up()
    assert sum(part.batches for what, part in said if what == "elsewhere") == passed
    assert sum(part.batches for what, part in said if what == "slab") == sent
    if sent:
        assert said[-1][1].first == 5 - sent


def test_a_stream_that_is_abandoned_releases_the_lists_of_splits_that_its_window_needs() -> None:
    slots = new_slots()
    released: list[Any] = []
    splits = SplitsInfo(7, 4, bytes(32))
    feed = SimFeed().served()
    outlet = SimpleNamespace(
        slots=slots, feed=feed, consumers=[], hold_list=lambda *held: None, release_list=released.append
    )
    shared = SharedDelivery(cast(Any, outlet), lambda: (1 << 30, 100), lambda epoch, splits: None)
    shared.keep_for_others(True)
    shared.window.append(Entry(0, 0, Part(0, 2, 8, ()), a_turn(slots)))
    shared.forget(cast(Any, SimpleNamespace(number=0, batches=2, splits=splits)))
    shared.abandon()
    assert released == [splits]
