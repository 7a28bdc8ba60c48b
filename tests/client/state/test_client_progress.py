"""Positions that the client adds up: after any batch, with any slabs, and in bounded memory."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock._state import progress
from penstock._state.progress import EpochCheck, Progress
from penstock_proto.batches.position import Place, Position, pack, unpack
from penstock_proto.messages import End, FeedInfo, LaneEnded, LanePlace, SentElsewhere, Slab
from tests.fakes.fake_daemon import Made, dealt, record, standing

lanes = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum)


def slabs(info: FeedInfo, plan: list[Made | LaneEnded], cuts: list[int]) -> list[tuple[Slab, list[LaneEnded]]]:
    """Return the plan's slabs, some of them split further, each with the lanes' ends before it."""
    found: list[tuple[Slab, list[LaneEnded]]] = []
    before: list[LaneEnded] = []
    for item in plan:
        if isinstance(item, LaneEnded):
            before.append(item)
            continue
        parts = [item]
        while parts[-1].batches > 1 and cuts and cuts.pop():
            parts[-1:] = parts[-1].split(1)
        for made in parts:
            lane = made.lane if made.lane is not None else 0
            message = Slab(0, 0, lane, made.index, made.batches, made.rows, len(made.data), record=made.record())
            found.append((message, before))
            before = []
    return found


def within(position: Position, consumed: int, cut: list[tuple[Slab, list[LaneEnded]]]) -> Position:
    """Return the position after `consumed` batches, given the position before their slab. It names that slab's end."""
    skip, at = consumed - position.batches, 0
    places = {place.lane: place for place in position.places}
    for slab, _ in cut:
        if skip and at == position.batches and slab.lane >= 0:
            place = places.get(slab.lane, Place(slab.lane, 0, b""))
            places[slab.lane] = msgspec.structs.replace(place, ahead=slab.record)
        at += slab.batches
    return msgspec.structs.replace(position, skip=skip, places=tuple(places[lane] for lane in sorted(places)))


def test_a_rank_that_has_read_part_of_several_rounds_is_behind_as_many_whole_rounds() -> None:
    info, _ = dealt([40], turn=1)
    follow = Progress(info)
    places = (LanePlace(0, 5, b"five"), LanePlace(1, 6, b"six"))
    follow.on_handed(Slab(0, 0, 0, 0, 2, 8, 128, lanes=(0, 1), places=places, stride=3, first=1), ())
    follow.on_handed(
        Slab(1, 0, 0, 3, 1, 4, 64, lanes=(0,)),
        (SentElsewhere(0, 1, 3, 1, 4, lanes=(1,)), SentElsewhere(0, 0, 4, 1, 4, lanes=(0,))),
    )
    begun = follow.position(1)
    assert (begun.batches, begun.rows, begun.skip) == (0, 0, 3)
    assert begun.places == (Place(0, 0, b"", b"five"), Place(1, 0, b"", b"six"))
    whole = follow.position(2)
    assert (whole.batches, whole.rows, whole.skip) == (6, 24, 0)
    assert whole.places == (Place(0, 3, b"five"), Place(1, 3, b"six"))
    after = follow.position(3)
    assert (after.batches, after.rows, after.skip) == (9, 36, 0)
    assert after.places == (Place(0, 5, b"five"), Place(1, 4, b"six"))


@given(lanes, st.integers(1, 4), st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 60), max_size=20))
@example(rows=[12], turn=3, cuts=[1], asked=[2])
@settings(max_examples=100, deadline=None)
def test_the_position_behind_any_batch_is_that_of_the_stream(
    rows: list[int], turn: int, cuts: list[int], asked: list[int]
) -> None:
    info, epoch = dealt(rows, turn=turn)
    plan = epoch(0)
    follow = Progress(info)
    borders, cut = [0], slabs(info, plan, cuts)
    for slab, before in cut:
        follow.on_handed(slab, tuple(before))
        borders.append(follow.consumed)
    for consumed in sorted(n for n in asked if n <= follow.consumed):
        border = max(b for b in borders if b <= consumed)
        position = follow.position(consumed)
        assert position == within(standing(info, 0, plan, border, within=consumed > border), consumed, cut)
        assert unpack(pack(position)) == position
    assert follow.newest() == standing(info, 0, plan, follow.consumed)
    follow.on_epoch_ended(0)
    follow.begin(1)
    assert follow.position(follow.consumed) == standing(info, 0, plan, follow.consumed), (
        "the state of a consumer that has not seen the end"
    )
    assert follow.newest() == Position(info, 1)


def plan_index(plan: list[Made | LaneEnded], slab: Slab) -> int:
    """Return the number of batches before the slab."""
    before = 0
    for item in plan:
        if isinstance(item, Made):
            if (item.lane if item.lane is not None else 0, item.index) == (slab.lane, slab.index):
                return before
            before += item.batches
    raise AssertionError(slab)


@given(lanes, st.integers(1, 3), st.data())
@settings(max_examples=50, deadline=None)
def test_slabs_that_nobody_asks_for_are_thinned_out_and_what_is_kept_stays_right(
    rows: list[int], turn: int, data: st.DataObject
) -> None:
    info, epoch = dealt(rows, turn=turn)
    plan = epoch(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "KEEP", 8)
        patch.setattr(progress, "SPAN", 6)
        follow = Progress(info)
        for e in range(3):
            follow.begin(e)
            for slab, before in slabs(info, epoch(e), []):
                follow.on_handed(msgspec.structs.replace(slab, epoch=e), tuple(before))
                assert len(follow._steps) <= 9
        count = follow.consumed // 3
        consumed = data.draw(st.integers(follow.oldest, follow.consumed))
        position = follow.position(consumed)
    batches = position.epoch * count + position.batches + position.skip
    assert batches == consumed
    assert position.skip < 6 + turn
    whole = standing(info, position.epoch, plan, position.batches, within=position.skip > 0)
    places = tuple(msgspec.structs.replace(place, ahead=b"") for place in position.places if place.index)
    assert (places, position.merged, position.rows) == (whole.places, whole.merged, whole.rows)
    ahead = {place.lane: place for place in position.places if place.ahead}
    at, behind = position.batches, position.batches + position.skip
    passed = [slab for slab, before in slabs(info, plan, []) if at <= plan_index(plan, slab) < behind]
    for slab in passed:  # the position names a later place of each lane whose batches are passed over
        if slab.lane >= 0:
            later = range(slab.index + slab.batches, 100)
            assert ahead[slab.lane].ahead in [record(slab.lane, index) for index in later]
    assert bool(ahead) == any(slab.lane >= 0 for slab in passed)


def test_asking_for_what_was_not_handed_or_is_forgotten_names_both_numbers() -> None:
    info, epoch = dealt([20, 20])
    follow = Progress(info, consumed=100)
    for slab, before in slabs(info, epoch(0), []):
        follow.on_handed(slab, tuple(before))
    follow.position(105)
    with pytest.raises(ValueError, match=r"consumed=104, but the oldest state that is kept is after 105"):
        follow.position(104)
    with pytest.raises(ValueError, match=r"consumed=200, but only 110 batches were handed over"):
        follow.position(200)


def test_batches_that_were_not_read_when_their_epoch_was_left_are_not_counted() -> None:
    info, epoch = dealt([40], turn=4)
    follow = Progress(info)
    (slab, before), *_ = slabs(info, epoch(0), [])
    follow.on_handed(slab, tuple(before))
    assert follow.position(1).skip == 1
    follow.begin(1, unread=3)
    assert follow.consumed == 1
    assert follow.position(1) == Position(info, 1)


def test_a_lane_that_lacks_a_batch_or_does_not_end_is_named() -> None:
    info, epoch = dealt([8, 9])
    plan = epoch(0)
    for missing, says in (
        (lambda lane: lane.lane == 1, "is over, but its lane 1, with 2 batches so far, has not ended"),
        (lambda lane: False, "had 2 batches of lane 0, but that lane ended with 3"),
    ):
        check = EpochCheck()
        for slab, before in slabs(info, plan, []):
            for lane in before:
                if not missing(lane):
                    check.on_lane_ended(msgspec.structs.replace(lane, index=lane.index + (lane.lane == 0)))
            check.on_batches(slab)
        if "not ended" in says:
            check.on_lane_ended(LaneEnded(0, 0, 0, 2, 0, b""))
        assert check.fault(End(0, check.slabs, check.batches, check.rows)) == says
