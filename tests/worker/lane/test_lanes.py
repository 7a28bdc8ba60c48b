"""A lane's order: every sample comes once, well mixed, and in the same order each time, also from a restart record."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import FeedError, GeneratorError, ProtocolError, SpecError
from penstock_proto.batches import arrays
from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Leaf, TupleSpec
from penstock_server import Feed, Shuffle
from penstock_server.feed.options.plan_sizes import ENDLESS, block_samples, segment_count
from penstock_server.worker.batch.collate import Rows
from penstock_server.worker.batch.ready_batches import ReadyBatches
from penstock_server.worker.isolation.randomness import GlobalRandomness
from penstock_server.worker.items.items import items_of
from penstock_server.worker.lane.lane import LaneRun
from penstock_server.worker.lane.restart_record import MAX_SKIPPED
from penstock_server.worker.reading.indexed import IndexRun
from penstock_server.worker.reading.split_opener import SplitOpener
from penstock_server.worker_state.activity import ActivityPage

SPEC = TupleSpec((Leaf("int64", (2,)), Leaf("float64", ())))
Batch = list[tuple[int, int, float]]


def plain(split: tuple[int, int]) -> Iterator[Any]:
    number, length = split
    for i in range(length):
        yield np.array([number, i]), 0.0


def with_rng(split: tuple[int, int], rng: np.random.Generator) -> Iterator[Any]:
    number, length = split
    for i in range(length):
        yield np.array([number, i]), rng.random()


def with_globals(split: tuple[int, int]) -> Iterator[Any]:
    number, length = split
    for i in range(length):
        yield np.array([number, i]), random.random() + np.random.standard_normal()


def failing(split: tuple[int, int, int | None]) -> Iterator[Any]:
    """Raise instead of yielding sample `at`; with -1, when the generator is made."""
    number, length, at = split
    if at == -1:
        raise OSError(f"split {number} cannot be opened")

    def generate() -> Iterator[Any]:
        for i in range(length):
            if i == at:
                raise ValueError(f"sample {i} of split {number} is broken")
            yield np.array([number, i]), random.random() + np.random.standard_normal()

    return generate()


def good_samples(split: tuple[int, int, int | None]) -> int:
    """Return the number of samples that a failing split yields before it raises."""
    _, length, at = split
    return length if at is None else max(0, min(length, at))


@dataclass
class Lanes:
    """The lanes of one epoch of a feed, all in one process, as a worker reads them.

    `told`: for each skipped split its lane, its number within the lane, and the number of samples after which it ended.
    `in_slots`: whether each block is a visit of a pool.
    """

    feed: Feed
    plan: FeedPlan
    splits: Sequence[Any]
    epoch: int = 0
    told: list[tuple[int, int, int]] = field(default_factory=list)
    in_slots: bool = False

    def __post_init__(self) -> None:
        self.randomness = GlobalRandomness()
        self.opener = SplitOpener(self.feed, self.plan, self.randomness, ActivityPage())
        self.count = min(self.plan.lanes, len(self.splits))
        self.rows = Rows(SPEC)

    def lane(self, lane: int, record: bytes = b"", skip: Iterable[int] = (), ahead: bytes = b"") -> LaneRun:
        return LaneRun(
            self.plan,
            epoch=self.epoch,
            lane=lane,
            n_splits=len(self.splits),
            collate=self.rows,
            open_split=lambda _, i: self.opener.open(self.splits[i], i, self.epoch),
            record=record,
            ahead=ahead,
            skip=skip,
            on_skip=lambda number, _, samples, __: self.told.append((lane, number, samples)),
            in_slots=self.in_slots,
        )

    def cut(self, lane: int) -> Lanes:
        """Return the same feed, with splits that end where they were skipped."""
        splits = [(split[0], good_samples(split)) for split in self.splits]
        for of, number, samples in self.told:
            if of == lane:
                index = self.lane(lane)._splits.index_of(number)
                splits[index] = splits[index][0], samples
        feed = dataclasses.replace(self.feed, generate=with_globals, splits=splits, on_error="raise")
        return Lanes(feed, feed.plan("feed"), splits, self.epoch, in_slots=self.in_slots)

    def next_batch(self, run: LaneRun) -> Batch:
        assert self.plan.batch_size is not None
        target = self.rows.store(self.plan.batch_size)
        return as_list(target, run.next_batch(target))

    def rest(self, run: LaneRun) -> list[Batch]:
        """Return all further batches, and the leftover if there is any."""
        batches = list(iter(functools.partial(self.next_batch, run), []))
        return batches + [as_list(run.leftover_rows, run.leftover)] * (run.leftover > 0)


def as_list(store: Any, rows: int) -> Batch:
    return [(int(n), int(i), float(r)) for (n, i), r in zip(store[0][:rows], store[1][:rows], strict=True)]


@st.composite
def feeds(
    draw: st.DrawFn, *, shuffle: bool | None = None, generates: tuple[Any, ...] = (plain, with_rng, with_globals)
) -> Lanes:
    splits = list(enumerate(draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))))
    shuffles = draw(st.booleans()) if shuffle is None else shuffle
    feed = Feed(
        draw(st.sampled_from(generates)),
        splits=splits,
        batch_size=draw(st.integers(1, 6)),
        lanes=draw(st.integers(1, 5)),
        shuffle=Shuffle(draw(st.integers(1, 60)), interleave=draw(st.integers(1, 5))) if shuffles else 0,
        seed=draw(st.integers(0, 3)),
    )
    in_slots = shuffles and draw(st.booleans())
    return Lanes(feed, feed.plan("feed"), splits, draw(st.integers(0, 2)), in_slots=in_slots)


@given(feeds())
def test_every_sample_comes_exactly_once(lanes: Lanes) -> None:
    seen = []
    for lane in range(lanes.count):
        run = lanes.lane(lane)
        *full, last = [*lanes.rest(run), []]
        assert all(len(batch) == lanes.plan.batch_size for batch in full[: len(full) - (run.leftover > 0)])
        assert run.leftover < (lanes.plan.batch_size or 1)
        assert run.ended
        seen += [(number, i) for batch in [*full, last] for number, i, _ in batch]
    assert sorted(seen) == [(number, i) for number, length in lanes.splits for i in range(length)]


@given(feeds(), st.data())
def test_a_lane_is_the_same_whatever_runs_beside_it(lanes: Lanes, data: st.DataObject) -> None:
    alone = [lanes.rest(lanes.lane(lane)) for lane in range(lanes.count)]
    runs = [lanes.lane(lane) for lane in range(lanes.count)]
    mixed: list[list[Batch]] = [[] for _ in runs]
    for lane in data.draw(st.lists(st.integers(0, lanes.count - 1), max_size=20)):
        if batch := lanes.next_batch(runs[lane]):
            mixed[lane].append(batch)
    for lane, run in enumerate(runs):
        mixed[lane] += lanes.rest(run)
    assert mixed == alone


@settings(max_examples=150)
@given(feeds(), st.data())
def test_a_lane_goes_on_from_a_record_as_if_nothing_had_happened(lanes: Lanes, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, lanes.count - 1))
    whole = lanes.rest(lanes.lane(lane))
    cut = data.draw(st.integers(0, len(whole)))
    run = lanes.lane(lane)
    for _ in range(cut):
        lanes.next_batch(run)
    record = run.record()
    again = lanes.lane(lane, record)
    at = again.index
    assert at == run.index
    assert again.record() == record
    assert lanes.rest(again) == whole[at:]


@given(feeds(shuffle=True), st.data())
def test_a_block_that_is_filled_in_its_slot_has_the_same_batches(lanes: Lanes, data: st.DataObject) -> None:
    lanes.in_slots = True
    rows = lanes.plan.batch_size or 1
    block = block_samples(lanes.plan.shuffle, lanes.count, rows)
    for lane in range(lanes.count):
        expected, run, turns = lanes.rest(lanes.lane(lane)), lanes.lane(lane), []
        before, at = 0, 0
        while not run.ended:
            slot = lanes.rows.store(block)
            if data.draw(st.booleans(), "a slot is offered"):
                run.offer(lambda slot=slot: slot, block // rows)  # type: ignore[misc]
            for first in range(0, block, rows):
                if not run.next_batch([leaf[first : first + rows] for leaf in slot]):
                    break
                at += 1
                if data.draw(st.integers(0, 5), "another worker goes on") == 0:
                    run = lanes.lane(lane, run.record())
            turns += [as_list([leaf[first : first + rows] for leaf in slot], rows) for first in range(0, block, rows)][
                : at - before
            ]
            before = at
        leftover = [as_list(run.leftover_rows, run.leftover)] * (run.leftover > 0)
        assert turns + leftover == expected


def test_a_block_that_fills_a_slot_is_not_copied_and_comes_in_the_order_of_its_splits() -> None:
    feed = Feed(plain, splits=[(0, 8), (1, 9)], batch_size=2, lanes=1, shuffle=Shuffle(8, interleave=2))
    lanes = Lanes(feed, feed.plan("feed"), [(0, 8), (1, 9)], in_slots=True)
    run, slot = lanes.lane(0), lanes.rows.store(8)
    run.offer(lambda: slot, 4)
    while not run.prepare():
        pass
    filled = as_list(slot, 8)
    assert [i for _, i, _ in filled] == [0, 1, 2, 3, 0, 1, 2, 3], "half of the block is from each split"
    lanes.next_batch(run)
    assert as_list(slot, 8) == filled
    run.offer(lambda: pytest.fail("this is not a whole block"), 3)


@given(feeds(shuffle=False))
def test_without_shuffling_the_order_of_the_input_is_kept(lanes: Lanes) -> None:
    for lane in range(lanes.count):
        order = [(number, i) for batch in lanes.rest(lanes.lane(lane)) for number, i, _ in batch]
        mine = lanes.splits[lane :: lanes.count]
        assert order == [(number, i) for number, length in mine for i in range(length)]


def test_splits_and_blocks_are_mixed() -> None:
    splits = [(i, 100) for i in range(64)]
    feed = Feed(plain, splits=splits, batch_size=10, lanes=4, shuffle=800, seed=1)
    lanes = Lanes(feed, feed.plan("feed"), splits)
    batches = lanes.rest(lanes.lane(0))
    assert np.mean([len({number for number, _, _ in batch}) for batch in batches]) > 3
    first = [number for batch in batches for number, _, _ in batch]
    assert first != sorted(first)
    later = Lanes(feed, feed.plan("feed"), splits, epoch=1)
    other = {number for batch in later.rest(later.lane(0)) for number, _, _ in batch}
    assert other != {number for batch in batches for number, _, _ in batch}


def test_a_generators_own_random_state_does_not_depend_on_what_else_runs() -> None:
    splits = [(i, 6) for i in range(4)]
    feed = Feed(with_globals, splits=splits, batch_size=2, lanes=4)
    lanes = Lanes(feed, feed.plan("feed"), splits)
    alone = [lanes.rest(lanes.lane(lane)) for lane in range(4)]
    runs = [lanes.lane(lane) for lane in range(4)]
    for step in range(3):
        for lane, run in enumerate(runs):
            assert lanes.next_batch(run) == alone[lane][step]
            lanes.randomness.seed(1, 2)
            random.random()
    values = [value for batches in alone for batch in batches for _, _, value in batch]
    assert len(set(values)) == len(values)


def test_an_epoch_draws_other_numbers() -> None:
    splits = [(0, 3)]
    feed = Feed(with_rng, splits=splits, batch_size=3)
    first, second = (Lanes(feed, feed.plan("feed"), splits, epoch).rest for epoch in (0, 1))
    lanes = [Lanes(feed, feed.plan("feed"), splits, epoch) for epoch in (0, 1)]
    assert first(lanes[0].lane(0)) != second(lanes[1].lane(0))


@pytest.mark.parametrize("shuffle", [0, 5])
def test_ready_batches_go_on_from_a_record_too(shuffle: int) -> None:
    def ready(split: int) -> Iterator[Any]:
        for i in range(1, 5):
            yield np.full((i, 2), 10 * split + i)

    feed = Feed(ready, splits=[0, 1, 2], batch_size=None, shuffle=shuffle, lanes=1)
    plan = feed.plan("feed")
    opener = SplitOpener(feed, plan, GlobalRandomness(), ActivityPage())
    collate = ReadyBatches(Leaf("int64", (None, 2)), copy=shuffle > 0)

    def lane(record: bytes = b"") -> LaneRun:
        return LaneRun(
            plan,
            epoch=0,
            lane=0,
            n_splits=3,
            collate=collate,
            open_split=lambda _, i: opener.open(i, i, 0),
            record=record,
        )

    def read(run: LaneRun, count: int = 99) -> list[list[int]]:
        seen: list[list[int]] = []
        target: list[Any] = [None]
        while len(seen) < count and run.next_batch(target):
            seen.append(target[0][0][:, 0].tolist())
        return seen

    whole = read(lane())
    assert sorted(map(tuple, whole)) == sorted(tuple([10 * s + i] * i) for s in range(3) for i in range(1, 5))
    for cut in range(len(whole) + 1):
        run = lane()
        read(run, cut)
        assert read(lane(run.record())) == whole[cut:]


def _changed(record: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    value = arrays.unpack(record)
    change(value)
    return arrays.pack(value)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more splits": lambda r: r.update(next=99),
    "other interleave": lambda r: r.update(seats=[]),
    "a split not yet read": lambda r: r.update(seats=[[2, 0], *r["seats"][1:]], next=2),
    "a split read twice": lambda r: r.update(seats=[r["seats"][0]] * len(r["seats"])),
    "beyond the block": lambda r: r.update(made=1000),
    "negative": lambda r: r.update(made=-1),
    "text": lambda r: r.update(index="x"),
    "a split skipped that it has not": lambda r: r.update(skipped=[[3, 0]]),
    "a split skipped twice": lambda r: r.update(skipped=[[0, 99], [0, 99]]),
    "a split read beyond its end": lambda r: r.update(skipped=[[seat[0], seat[1] - 1] for seat in r["seats"]]),
    "too many skipped": lambda r: r.update(skipped=[[0, 0]] * 1025),
    "less": lambda r: r.pop("block"),
    "more": lambda r: r.update(more=1),
    "places of other splits": lambda r: r.update(places=[[3, 0, 0]]),
    "places of no splits": lambda r: r.update(places=[None] * len(r["seats"])),
    "a negative place": lambda r: r.update(places=[[-1, 0, 0]] * len(r["seats"])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_of_another_lane_is_refused(change: str) -> None:
    splits = [(i, 20) for i in range(6)]
    feed = Feed(plain, splits=splits, batch_size=4, lanes=2, shuffle=Shuffle(24, interleave=3))
    lanes = Lanes(feed, feed.plan("feed"), splits)
    run = lanes.lane(0)
    for _ in range(4):
        lanes.next_batch(run)
    with pytest.raises(ProtocolError, match="restart record"):
        lanes.lane(0, _changed(run.record(), CHANGES[change]))
    with pytest.raises(ProtocolError):
        lanes.lane(0, b"nonsense")


@pytest.mark.parametrize("place", [[2**40, 0, 0], [3, 2**40, 0], [2, 1, 0]])
def test_a_place_that_a_split_never_reaches_ends_the_lane_at_once(place: list[int]) -> None:
    def twice_or_never(sample: Any) -> Iterator[Any]:
        yield from [sample] * (2 * int(sample[0][1] % 2))

    splits = [(0, 20)]
    feed = Feed(plain, splits=splits, batch_size=3, transform=twice_or_never)
    lanes = Lanes(feed, feed.plan("feed"), splits)
    run = lanes.lane(0)
    first = lanes.next_batch(run)
    record = run.record()
    assert arrays.unpack(record)["places"] == [[3, 1, 2]], "the second of the two that were made of sample 3 is next"
    assert lanes.next_batch(lanes.lane(0, record)) != first
    with pytest.raises(FeedError, match=r"when (it was run|its splits were read) again"):
        lanes.next_batch(lanes.lane(0, _changed(record, lambda r: r.update(places=[place]))))


@pytest.mark.parametrize("shuffle", [0, 8])
def test_a_generator_that_yields_less_when_run_again_is_an_error(shuffle: int) -> None:
    splits = [(0, 20)]
    feed = Feed(plain, splits=splits, batch_size=4, shuffle=shuffle)
    lanes = Lanes(feed, feed.plan("feed"), splits)
    run = lanes.lane(0)
    for _ in range(3):
        lanes.next_batch(run)
    record = run.record()
    lanes.splits = [(0, 5 if shuffle else 11)]
    with pytest.raises(FeedError, match=r"when (it was run|its splits were read) again"):
        lanes.next_batch(lanes.lane(0, record))


@st.composite
def failing_feeds(draw: st.DrawFn) -> Lanes:
    drawn = draw(st.lists(st.tuples(st.integers(0, 12), st.none() | st.integers(-1, 12)), min_size=1, max_size=9))
    splits = [(number, length, at) for number, (length, at) in enumerate(drawn)]
    shuffles = draw(st.booleans())
    feed = Feed(
        failing,
        splits=splits,
        batch_size=draw(st.integers(1, 6)),
        lanes=draw(st.integers(1, 5)),
        shuffle=Shuffle(draw(st.integers(1, 60)), interleave=draw(st.integers(1, 5))) if shuffles else 0,
        seed=draw(st.integers(0, 3)),
        on_error="skip",
    )
    return Lanes(feed, feed.plan("feed"), splits, draw(st.integers(0, 2)))


def only_lane(generate: Callable[..., Any], splits: list[Any], **options: Any) -> Lanes:
    feed = Feed(generate, splits=splits, **{"batch_size": 2, "lanes": 1, "on_error": "skip", **options})
    return Lanes(feed, feed.plan("feed"), splits)


# --- what is read after the last full batch ---


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_sample_is_lost_or_doubled_where_user_code_raises_within_a_batch(data: st.DataObject) -> None:
    """The record of a lane that failed is that of its last full batch, and so is the next attempt's."""
    lengths = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    splits = list(enumerate(lengths))
    raises: set[tuple[int, int]] = data.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4))

    def at_times(split: tuple[int, int]) -> Iterator[Any]:
        number, length = split
        for i in range(length):
            if (number, i) in raises:
                raises.remove((number, i))  # the cause goes away
                if i % 3:
                    raise OSError("the disk is away")
                yield "another thing than a sample"
            yield np.array([number, i]), random.random()

    shuffle = data.draw(st.sampled_from([0, 0, 5, 30]))
    batch_size = data.draw(st.integers(1, 6))
    feed = Feed(at_times, splits=splits, batch_size=batch_size, lanes=1, shuffle=shuffle, on_error="retry")
    lanes = Lanes(feed, feed.plan("feed"), splits)
    wanted = len(raises)
    run, seen = lanes.lane(0), []
    for _ in range(wanted + 1):
        try:
            while batch := lanes.next_batch(run):
                seen.append(batch)
            break
        except (GeneratorError, SpecError):
            assert run.index == len(seen)
            with pytest.raises(ProtocolError, match="has failed and cannot go on"):
                lanes.next_batch(run)
            run = lanes.lane(0, run.record())
    seen.append(as_list(run.leftover_rows, run.leftover))
    raises.clear()
    assert [batch for batch in seen if batch] == lanes.rest(lanes.lane(0))


def test_a_record_in_the_middle_of_a_batch_would_be_noticed() -> None:
    """The worker that makes it and the one that gets it both notice: the samples before it are not those of its
    batches."""
    lanes = only_lane(failing, [(0, 9, 6), (1, 9, None)], on_error="raise", batch_size=4)
    run = lanes.lane(0)
    lanes.next_batch(run)
    good = run.record()
    with pytest.raises(GeneratorError):
        lanes.next_batch(run)
    assert run.record() == good
    torn = run._record = run._splits.record(0, run.index)
    assert torn.taken == 6
    with pytest.raises(ProtocolError, match="has 6 samples before batch 1 in its restart record"):
        run.record()
    for change in (
        lambda r: r.update(seats=[[0, 6]]),
        lambda r: r.update(done=1),
        lambda r: r.update(index=2),
        lambda r: r.update(seats=[None], done=3),
    ):
        with pytest.raises(ProtocolError, match="does not add up"):
            lanes.lane(0, _changed(good, change))


def test_a_block_of_which_some_was_delivered_must_be_filled_by_the_same_splits() -> None:
    lanes = only_lane(
        plain, [(0, 3), (1, 9), (2, 9)], on_error="raise", shuffle=Shuffle(12, interleave=2), batch_size=4
    )
    run = lanes.lane(0)
    lanes.next_batch(run)
    record = run.record()
    lanes.splits = [(0, 5), (1, 9), (2, 9)]
    with pytest.raises(FeedError, match="splits that had ended by block 0 of lane 0 had 3 samples, and 5 when"):
        lanes.next_batch(lanes.lane(0, record))


# --- a place ahead, up to which batches were consumed ---


def ahead_of(lanes: Lanes, at: int, ahead: int) -> tuple[bytes, bytes, list[Batch]]:
    """Return the records of lane 0 after `at` and after `ahead` batches, and all batches of the lane."""
    run = lanes.lane(0)
    records = [run.record()]
    batches = []
    while batch := lanes.next_batch(run):
        batches.append(batch)
        records.append(run.record())
    return records[at], records[ahead], batches


@settings(max_examples=100, deadline=None)
@given(failing_feeds(), st.data())
def test_a_lane_comes_by_the_place_ahead_with_the_same_splits_left_out(lanes: Lanes, data: st.DataObject) -> None:
    run = lanes.lane(0)
    records, batches = [run.record()], []
    while batch := lanes.next_batch(run):
        batches.append(batch)
        records.append(run.record())
    last = as_list(run.leftover_rows, run.leftover)
    at = data.draw(st.integers(0, len(batches)))
    ahead = data.draw(st.integers(0, len(batches)))
    known = dict(arrays.unpack(records[ahead])["skipped"])
    for number, samples in known.items():  # splits that broke then are whole now
        index = run._splits.index_of(number)
        if samples == good_samples(lanes.splits[index]):
            lanes.splits[index] = (lanes.splits[index][0], lanes.splits[index][1], None)  # type: ignore[index]
    again = lanes.lane(0, records[at], ahead=records[ahead])
    assert again.replayed == (ahead <= at)
    if ahead > at:
        assert [lanes.next_batch(again) for _ in range(at, ahead)] == batches[at:ahead]
        assert again.replayed
        assert again.record() == records[ahead]
        assert lanes.rest(again) == [*batches[ahead:], *([last] if last else [])]


@pytest.mark.parametrize("shuffle", [0, 8])
@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([7, 10, 10], "was 2 samples into split 1, and when it was read again it is 3 samples into split 1"),
        ([8, 5, 2], "had 4 full batches or more, and only 3 when its splits were read again"),
        ([8, 10, 9], None),  # a change after the consumed batches does not matter here
    ],
)
def test_a_split_that_has_changed_in_what_was_consumed_is_noticed(
    lengths: list[int], says: str | None, shuffle: int
) -> None:
    ahead = 4 if says and "full" in says else 2
    lanes = only_lane(
        plain,
        [(0, 8), (1, 10), (2, 10)],
        on_error="raise",
        batch_size=5,
        shuffle=Shuffle(shuffle, interleave=1 if shuffle else None),
    )
    record, later, batches = ahead_of(lanes, 0, ahead)
    lanes.splits = list(enumerate(lengths))
    run = lanes.lane(0, record, ahead=later)
    if says is None:
        assert [lanes.next_batch(run) for _ in range(2)] == batches[:2]
        return
    with pytest.raises(FeedError, match=says):
        lanes.rest(run)
    assert run.index < ahead


# --- steps ---


def test_what_is_read_again_is_read_in_steps() -> None:
    made = []

    def counting(split: int) -> Iterator[Any]:
        for i in range(1000):
            made.append(i)
            yield np.array([split, i]), 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_server.worker.lane.lane_splits.STEP_SECONDS", 0.0)  # one sample a step
        lanes = only_lane(counting, [0, 1], on_error="raise")
        run = lanes.lane(0)
        for _ in range(300):
            lanes.next_batch(run)
        record = run.record()
        expected = lanes.next_batch(run)
        made.clear()
        again = lanes.lane(0, record)
        for step in range(1, 600):
            assert not again.prepare()
            assert len(made) == step
            assert again.record() == record
        while not again.prepare():
            pass
        assert len(made) == 600
        assert lanes.next_batch(again) == expected


@pytest.mark.parametrize("fresh", [True, False])
def test_a_block_of_slow_samples_is_filled_in_steps_of_a_batch(fresh: bool) -> None:
    lanes = only_lane(failing, [(i, 50, None) for i in range(4)], shuffle=Shuffle(60, interleave=3), batch_size=4)
    run = lanes.lane(0)
    first = lanes.next_batch(run)
    again = lanes.lane(0, b"" if fresh else run.record())
    steps = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock_server.worker.lane.lane_splits.STEP_SECONDS", 0.0)  # any sample takes longer
        while not again.prepare():
            steps += 1
    assert steps >= 60 / 4
    assert lanes.next_batch(again) == (first if fresh else lanes.next_batch(run))


def test_a_record_that_says_more_than_a_split_ever_yields_ends_with_the_split() -> None:
    lanes = only_lane(failing, [(7, 40, None)], on_error="raise")
    run = lanes.lane(0)
    lanes.next_batch(run)
    far = _changed(run.record(), lambda r: r.update(seats=[[0, 2**53]], index=2**52))
    with pytest.raises(FeedError, match=rf"yielded {2**53} samples of a split, and only 40 when it was run") as caught:
        lanes.next_batch(lanes.lane(0, far))
    assert caught.value.split == "(7, 40, None)"
    with pytest.raises(ProtocolError, match="malformed restart record"):
        lanes.lane(0, _changed(run.record(), lambda r: r.update(seats=[[0, 2**62]], index=2**61)))


# --- splits that are skipped ---


@given(failing_feeds())
def test_a_lane_with_broken_splits_is_as_if_they_ended_where_they_break(lanes: Lanes) -> None:
    for lane in range(lanes.count):
        batches = lanes.rest(lanes.lane(lane))
        assert batches == lanes.cut(lane).rest(lanes.cut(lane).lane(lane))
    assert len({(lane, number) for lane, number, _ in lanes.told}) == len(lanes.told)
    assert len(lanes.told) == sum(at is not None and at < length for _, length, at in lanes.splits)


@settings(max_examples=200)
@given(failing_feeds(), st.data())
def test_a_lane_is_the_same_however_often_its_worker_dies(lanes: Lanes, data: st.DataObject) -> None:
    """The worker dies at any batch. Some splits are skipped because they raise, and others because they ended a
    worker."""
    lane = data.draw(st.integers(0, lanes.count - 1))
    numbers = range(lane, len(lanes.splits), lanes.count)
    run, batches = lanes.lane(lane), []
    for _ in range(data.draw(st.integers(0, 4))):
        for _ in range(data.draw(st.integers(0, 5))):
            if batch := lanes.next_batch(run):
                batches.append(batch)
        record = run.record()
        skip = data.draw(st.sets(st.integers(0, len(numbers) - 1), max_size=2))
        told = len(lanes.told)
        run = lanes.lane(lane, record, skip)
        assert (run.index, run.record()) == (len(batches), record)
        place = arrays.unpack(record)
        if batch := lanes.next_batch(run):
            batches.append(batch)
        if not place["made"]:
            read = {seat[0]: seat[1] for seat in place["seats"] if seat is not None}
            known = {number for number, _ in place["skipped"]}
            asked_now = [(n, s) for _, n, s in lanes.told[told:] if n in skip]
            expected = [n for n in skip - known if n in read or n >= place["next"]]
            assert sorted(asked_now) == sorted((n, read.get(n, 0)) for n in expected)
    batches += lanes.rest(run)
    cut = lanes.cut(lane)
    assert batches == cut.rest(cut.lane(lane))
    assert len({number for _, number, _ in lanes.told}) == len(lanes.told)


@pytest.mark.parametrize("shuffle", [0, 4])
def test_a_skipped_split_is_never_run_beyond_its_end_again(shuffle: int) -> None:
    run_to: list[tuple[int, int]] = []

    def watched(split: int) -> Iterator[Any]:
        for i in range(5):
            run_to.append((split, i))
            if i == 3 and split == 1:
                raise ValueError
            yield np.array([split, i]), 0.0

    lanes = only_lane(watched, [0, 1, 2, 3], shuffle=Shuffle(shuffle, interleave=2 if shuffle else None))
    whole = lanes.rest(lanes.lane(0))
    for cut in range(len(whole) + 1):
        run = lanes.lane(0)
        for _ in range(cut):
            lanes.next_batch(run)
        record, (told, lanes.told) = run.record(), (lanes.told, [])
        run_to.clear()
        assert lanes.rest(lanes.lane(0, record)) == whole[cut:]
        skipped = dict(arrays.unpack(record)["skipped"])
        assert len(skipped) + len(lanes.told) == 1
        for number, samples in skipped.items():
            assert (0, number, samples) in told
            assert samples == 3
            assert (1, 3) not in run_to


def test_a_split_that_no_longer_opens_when_its_lane_goes_on_ends_where_it_stood() -> None:
    lanes = only_lane(failing, [(0, 9, None), (1, 3, None)])
    run = lanes.lane(0)
    seen = [lanes.next_batch(run) for _ in range(2)]
    record = run.record()
    for at in (-1, 0, 3):
        lanes.told.clear()
        lanes.splits[0] = (0, 9, at)
        rest = lanes.rest(lanes.lane(0, record))
        assert [(number, i) for batch in [*seen, *rest] for number, i, _ in batch] == [
            *((0, i) for i in range(4)),
            *((1, i) for i in range(3)),
        ]
        assert lanes.told == [(0, 0, 4)]


@pytest.mark.parametrize("shuffle", [0, 4])
def test_a_split_is_not_skipped_where_it_was_whole_when_these_batches_were_consumed(shuffle: int) -> None:
    lanes = only_lane(failing, [(0, 9, 5)], shuffle=shuffle)
    passes = lanes.lane(0)
    passes.pass_to(3)
    with pytest.raises(GeneratorError, match="sample 5 of split 0 is broken"):
        for _ in range(3):
            lanes.next_batch(passes)
    assert lanes.told == []
    goes_on = lanes.lane(0)
    goes_on.pass_to(2)
    assert len(lanes.rest(goes_on)) == 3
    assert lanes.told == [(0, 0, 5)]


@pytest.mark.parametrize(("shuffle", "batch"), [(0, 2), (Shuffle(8, interleave=1), 0)])
def test_a_lane_says_for_which_batch_a_split_was_skipped(shuffle: int | Shuffle, batch: int) -> None:
    lanes = only_lane(failing, [(0, 9, 5), (1, 9, 5), (2, 9, 5)], shuffle=shuffle)
    run = lanes.lane(0)
    said = []
    while lanes.next_batch(run):
        said.append(run.skipped)
    assert len(said) == 7
    assert said[:4] == [at == batch for at in range(4)]  # a block has 4 batches


def test_a_block_that_cannot_be_read_again_as_it_was_is_an_error() -> None:
    lanes = only_lane(failing, [(0, 9, None), (1, 9, None)], shuffle=Shuffle(8, interleave=2))
    run = lanes.lane(0)
    lanes.next_batch(run)
    lanes.splits[1] = (1, 9, 2)
    with pytest.raises(GeneratorError, match="sample 2 of split 1 is broken"):
        lanes.next_batch(lanes.lane(0, run.record()))
    assert lanes.told == []


@pytest.mark.parametrize("on_error", ["raise", "retry"])
def test_a_broken_split_fails_the_run_unless_splits_are_to_be_skipped(on_error: str) -> None:
    lanes = only_lane(failing, [(0, 9, 3), (1, 9, None)], on_error=on_error)
    run = lanes.lane(0)
    lanes.next_batch(run)
    record = run.record()
    with pytest.raises(GeneratorError, match="sample 3 of split 0 is broken"):
        lanes.next_batch(run)
    lanes.splits[0] = (0, 9, None)  # the next attempt
    assert len(lanes.rest(lanes.lane(0, record))) == 8
    lanes.splits[0] = (0, 9, 3)
    assert len(lanes.rest(lanes.lane(0, record, skip=[0]))) == 5  # the coordinator may say to skip it all the same
    assert lanes.told == [(0, 0, 2)]


def test_a_sample_that_does_not_fit_is_never_skipped() -> None:
    def unfit(split: int) -> Iterator[Any]:
        yield np.array([split, 0]), 0.0
        yield np.array([split]), 0.0

    lanes = only_lane(unfit, [0, 1])
    with pytest.raises(SpecError, match="sample 1 of its split"):
        lanes.next_batch(lanes.lane(0))
    assert lanes.told == []


def test_when_too_many_splits_break_the_feed_is_wrong() -> None:
    lanes = only_lane(failing, [(i, 3, 0) for i in range(MAX_SKIPPED + 1)])
    run = lanes.lane(0)
    with pytest.raises(FeedError, match=r"(?s)too many splits were skipped: 1024 of lane 0, which has 1025"):
        lanes.next_batch(run)
    assert len(lanes.told) == MAX_SKIPPED
    assert len(run.record()) < 32 * 1024


def test_a_split_that_the_lane_has_not_cannot_be_skipped() -> None:
    lanes = only_lane(failing, [(0, 9, None)])
    with pytest.raises(ProtocolError, match="split 1 is to be skipped, but lane 0 has 1"):
        lanes.lane(0, skip=[1])


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit(), KeyboardInterrupt(), ValueError("x")])
def test_whatever_a_generator_raises_is_an_error_that_says_it(error: BaseException) -> None:
    said = {"SystemExit(3)": "called sys.exit(3)", "SystemExit()": "called sys.exit()"}

    def raises(split: int) -> Iterator[Any]:
        raise error
        yield

    def raises_at_once(split: int) -> Iterator[Any]:
        raise error

    for generate in (raises, raises_at_once):
        lanes = only_lane(generate, [0], on_error="raise")
        with pytest.raises(GeneratorError) as caught:
            lanes.next_batch(lanes.lane(0))
        assert said.get(repr(error), f"raised {type(error).__name__}") in caught.value.message


# --- borders ---


def test_without_shuffling_a_lane_can_move_while_its_split_has_given_no_more_than_a_batch() -> None:
    lanes = only_lane(failing, [(0, 5, None), (1, 4, None)])
    run = lanes.lane(0)
    borders = [run.at_border(1)]
    while lanes.next_batch(run):
        borders.append(run.at_border(1))
    assert borders == [True, True, False, True, False]  # 0, 2, 4 of split 0; 1, 3 of split 1
    assert lanes.lane(0, run.record()).at_border(1) == run.at_border(1)


@pytest.mark.parametrize("samples", [8, 9, 30])
def test_a_lane_comes_to_a_border_at_the_end_of_a_turn_in_each_split(samples: int) -> None:
    lanes = only_lane(failing, [(split, samples, None) for split in range(4)])
    run = lanes.lane(0)
    borders = []
    while all(lanes.next_batch(run) for _ in range(2)):  # turns of two batches of two samples
        borders.append(run.at_border(2))
    assert borders.count(True) == 4


def test_when_shuffling_a_lane_can_move_between_two_blocks() -> None:
    lanes = only_lane(failing, [(0, 7, None), (1, 7, None)], shuffle=Shuffle(6, interleave=2))
    run = lanes.lane(0)
    borders = [run.at_border(1)]
    while lanes.next_batch(run):
        borders.append(run.at_border(1))
        assert lanes.lane(0, run.record()).at_border(1) == run.at_border(1)
    assert borders == [True, False, False, True, False, False, True, False]


# --- indexable sources ---


class Squares:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> Any:
        return np.array([i, i * i]), np.random.random()


def indexed(shuffle: int, epoch: int = 0) -> tuple[IndexRun, Rows]:
    feed = Feed(Squares(), batch_size=4, shuffle=shuffle, seed=5)  # type: ignore[arg-type]
    plan = feed.plan("feed")
    rows = Rows(SPEC)
    return IndexRun(
        plan, items_of(feed), epoch=epoch, collate=rows, randomness=GlobalRandomness(), page=ActivityPage(), run=1
    ), rows


def batch(run: IndexRun, rows: Rows, index: int) -> Batch:
    run.index = index
    target = rows.store(4)
    return as_list(target, run.next_batch(target))


@pytest.mark.parametrize("shuffle", [0, 11])
def test_any_batch_of_an_indexable_source_can_be_made_at_any_time(shuffle: int) -> None:
    run, rows = indexed(shuffle)
    in_order = [batch(run, rows, j) for j in range(4)]
    again, rows = indexed(shuffle)
    assert [batch(again, rows, j) for j in (3, 1, 0, 2)] == [in_order[j] for j in (3, 1, 0, 2)]
    assert [len(each) for each in in_order] == [4, 4, 3, 0]
    assert run.at_border(1)
    order = [i for each in in_order for i, _, _ in each]
    assert sorted(order) == list(range(11))
    assert (order == sorted(order)) == (shuffle == 0)
    if shuffle:
        later, rows = indexed(shuffle, epoch=1)
        assert [i for j in range(3) for i, _, _ in batch(later, rows, j)] != order


# --- segments ---


def made_up(segment: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yield without end, except for some segments that end early or at once."""
    for i in itertools.islice(itertools.count(), segment % 4 if segment % 3 == 0 else None):
        yield np.array([segment, i]), rng.random()


def made_up_blindly() -> Iterator[Any]:
    """Yield without end, from nothing but global random numbers."""
    while True:
        yield np.array([random.randrange(1000), np.random.randint(1000)]), random.random()


@st.composite
def segmented_feeds(draw: st.DrawFn) -> Lanes:
    shuffle = draw(st.sampled_from([0, 1, 20, 60]))
    feed = Feed(
        draw(st.sampled_from([made_up, made_up_blindly])),
        segment=draw(st.integers(1, 9)),
        batch_size=draw(st.integers(1, 6)),
        lanes=draw(st.integers(1, 5)),
        shuffle=Shuffle(shuffle, interleave=draw(st.integers(1, 5)) if shuffle else None),
        seed=draw(st.integers(0, 3)),
    )
    plan = feed.plan("feed")
    return Lanes(feed, plan, range(segment_count(plan)), draw(st.integers(0, 2)))


@settings(deadline=None, max_examples=60)
@given(segmented_feeds(), st.data())
def test_an_endless_lane_goes_on_from_any_record(lanes: Lanes, data: st.DataObject) -> None:
    lane = data.draw(st.integers(0, lanes.count - 1))
    run = lanes.lane(lane)
    records, batches = [run.record()], []
    for _ in range(25):
        batches.append(lanes.next_batch(run))
        records.append(run.record())
    assert all(len(batch) == lanes.plan.batch_size for batch in batches)
    at = data.draw(st.integers(0, 25))
    again = lanes.lane(lane, records[at])
    assert again.record() == records[at]
    assert [lanes.next_batch(again) for _ in range(25 - at)] == batches[at:]
    assert [sample for batch in batches for sample in batch] != [batches[0][0]] * len(batches) * len(batches[0])


@given(st.integers(1, 60), st.integers(1, 9), st.sampled_from([0, 30]))
def test_with_a_number_of_samples_the_last_segment_is_cut_to_fit(samples: int, segment: int, shuffle: int) -> None:
    def endless(number: int) -> Iterator[Any]:
        for i in itertools.count():
            yield np.array([number, i]), 0.0

    feed = Feed(endless, segment=segment, samples=samples, batch_size=4, lanes=3, shuffle=shuffle)
    plan = feed.plan("feed")
    lanes = Lanes(feed, plan, range(segment_count(plan)))
    read = [(n, i) for lane in range(lanes.count) for batch in lanes.rest(lanes.lane(lane)) for n, i, _ in batch]
    assert sorted(read) == [divmod(at, segment) for at in range(samples)]


def test_deep_in_an_endless_lane_no_more_is_read_again_than_its_open_segment() -> None:
    started: list[int] = []
    made = []

    def counting(segment: int) -> Iterator[Any]:
        started.append(segment)
        for i in itertools.count():
            made.append((segment, i))
            yield np.array([segment, i]), 0.0

    feed = Feed(counting, segment=10, batch_size=4, lanes=2)
    lanes = Lanes(feed, feed.plan("feed"), range(ENDLESS))
    run = lanes.lane(1)
    for _ in range(1000):
        lanes.next_batch(run)
    assert started == list(range(1, 2 * len(started), 2))
    assert len(made) == 4000
    assert len(run.record()) < 100
    started.clear()
    made.clear()
    again = lanes.lane(1, run.record())
    assert run.at_border(1)
    lanes.next_batch(again)
    assert (started, len(made)) == ([801], 4)
    lanes.next_batch(again)
    started.clear()
    made.clear()
    assert lanes.next_batch(lanes.lane(1, again.record())) == lanes.next_batch(again)
    assert started == [801, 803, 803]
    assert len(made) == 8 + 4 + 4


@pytest.mark.parametrize("shuffle", [0, 20])
def test_what_was_left_out_of_an_endless_lane_does_not_add_up(shuffle: int) -> None:
    def breaking(segment: int) -> Iterator[Any]:
        yield np.array([segment, 0]), 0.0
        raise OSError("no more")

    feed = Feed(breaking, segment=10, batch_size=4, lanes=1, shuffle=shuffle, on_error="skip")
    lanes = Lanes(feed, feed.plan("feed"), range(ENDLESS))
    run = lanes.lane(0)
    batches = [lanes.next_batch(run) for _ in range(2 * MAX_SKIPPED // 4 + 1)]
    assert len(lanes.told) > 2 * MAX_SKIPPED
    assert len(run.record()) < 1000
    again = lanes.lane(0, run.record())
    assert lanes.next_batch(again) == lanes.next_batch(run)
    assert sorted(n for batch in batches for n, _, _ in batch)[:-40] == list(range(len(batches) * 4 - 40))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_segments_that_yield_nothing_are_an_error_in_the_end(on_error: str) -> None:
    def drying_up(segment: int) -> Iterator[Any]:
        if segment < 10:
            yield np.array([segment, 0]), 0.0

    feed = Feed(drying_up, segment=10, batch_size=4, lanes=1, on_error=on_error)
    lanes = Lanes(feed, feed.plan("feed"), range(ENDLESS))
    run = lanes.lane(0)
    assert len(lanes.next_batch(run) + lanes.next_batch(run)) == 8
    with pytest.raises(FeedError, match="has stopped yielding samples: 1001 segments of lane 0") as caught:
        lanes.next_batch(run)
    assert "\n  in segment 1010" in str(caught.value)


def test_an_endless_lane_leaves_out_again_what_was_left_out_before_the_place_ahead() -> None:
    broken = {2}

    class Segments(Sequence[Any]):
        def __getitem__(self, number: Any) -> Any:
            return number, 5, 0 if number in broken else None

        def __len__(self) -> int:
            return ENDLESS

    feed = Feed(failing, segment=5, batch_size=1, lanes=1, on_error="skip", spec=SPEC)
    lanes = Lanes(feed, feed.plan("feed"), Segments())
    run = lanes.lane(0)
    batches = [lanes.next_batch(run) for _ in range(8)]
    record = run.record()
    batches += [lanes.next_batch(run) for _ in range(6)]  # segment 2 is left out, and segment 3 is reached
    broken.clear()
    again = lanes.lane(0, record, ahead=run.record())
    assert [lanes.next_batch(again) for _ in range(6)] == batches[8:]
    assert again.record() == run.record()
