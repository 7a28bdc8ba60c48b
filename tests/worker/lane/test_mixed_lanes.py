"""A lane of a mix: drawn with the weights, each sample at most once, and the same from every restart record."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import GeneratorError, ProtocolError
from penstock_proto.batches import arrays
from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Leaf, TupleSpec
from penstock_server import Feed, Shuffle
from penstock_server.feed.combined.mixed import Mixed
from penstock_server.feed.options.plan_sizes import segment_count
from penstock_server.shuffling.permutation import uniform
from penstock_server.worker.batch.collate import Rows
from penstock_server.worker.isolation.randomness import GlobalRandomness
from penstock_server.worker.lane.mixed_lane import Component, MixedLane, live_lanes
from penstock_server.worker.lane.mixed_splits import Draws
from penstock_server.worker.reading.loaded_feed import LoadedFeed
from penstock_server.worker.reading.opening import opener_of
from penstock_server.worker_state.activity import ActivityPage

SPEC = TupleSpec((Leaf("int64", (3,)), Leaf("float64", ())))
Sample = tuple[int, int, int, float]
Batch = list[Sample]


def rows(split: tuple[int, int, int]) -> Iterator[Any]:
    component, number, length = split
    for i in range(length):
        yield np.array([component, number, i]), np.random.random()


def rows_with_rng(split: tuple[int, int, int], rng: np.random.Generator) -> Iterator[Any]:
    component, number, length = split
    for i in range(length):
        yield np.array([component, number, i]), rng.random()


def failing(split: tuple[int, int, int]) -> Iterator[Any]:
    """Yield a split's samples. Every third split raises instead of yielding its fourth."""
    for i, sample in enumerate(rows(split)):
        if split[1] % 3 == 0 and i == 3:
            raise OSError("broken")
        yield sample


def forever(segment: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in itertools.count():
        yield np.array([9, segment, i]), rng.random()


@dataclass
class Lanes:
    """The lanes of one epoch of a mix, all in one process, as a worker reads them."""

    feed: Feed
    epoch: int = 0
    told: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plan: FeedPlan = self.feed.plan("mix")
        self.loaded = LoadedFeed(self.feed, self.plan)
        self.mixed: Mixed = self.loaded.mixed
        self.lists: list[Any] = [
            range(segment_count(part.plan)) if part.plan.segment else part.declared.splits
            for part in self.loaded.parts.values()
        ]
        self.count = live_lanes(self.plan, map(len, self.lists))
        self.randomness = GlobalRandomness()
        self.rows = Rows(SPEC)

    def lane(self, lane: int, record: bytes = b"", skip: Iterable[int] = (), ahead: bytes = b"") -> MixedLane:
        components = []
        for (label, part), splits in zip(self.loaded.parts.items(), self.lists, strict=True):
            opener = opener_of(part, self.randomness, ActivityPage(), 1)
            components.append(
                Component(
                    part.plan,
                    self.mixed.weights[label],
                    len(splits),
                    lambda number, i, opener=opener, splits=splits: opener.open(splits[i], i, self.epoch, number),
                    lambda number, _, samples, __: self.told.append((number, samples)),
                )
            )
        return MixedLane(
            self.plan,
            components,
            stop_first=self.mixed.stop == "first",
            epoch=self.epoch,
            lane=lane,
            collate=self.rows,
            record=record,
            ahead=ahead,
            skip=skip,
        )

    def next_batch(self, run: MixedLane) -> Batch:
        assert self.plan.batch_size is not None
        target = self.rows.store(self.plan.batch_size)
        return as_list(target, run.next_batch(target))

    def rest(self, run: MixedLane) -> list[Batch]:
        """Return all further batches, and the leftover if there is any."""
        batches = list(iter(functools.partial(self.next_batch, run), []))
        return batches + [as_list(run.leftover_rows, run.leftover)] * (run.leftover > 0)

    def samples(self, lane: int) -> list[Sample]:
        return [sample for batch in self.rest(self.lane(lane)) for sample in batch]


def as_list(store: Any, count: int) -> Batch:
    return [(*map(int, key), float(r)) for key, r in zip(store[0][:count], store[1][:count], strict=True)]


@st.composite
def mixes(
    draw: st.DrawFn, *, stops: tuple[str, ...] = ("first", "all"), generators: tuple[Any, ...] = (rows, rows_with_rng)
) -> Lanes:
    count = draw(st.integers(2, 4))
    batch_size = draw(st.integers(1, 6))
    parts = {
        f"part{k}": Feed(
            draw(st.sampled_from(generators)),
            splits=[
                (k, number, length)
                for number, length in enumerate(draw(st.lists(st.integers(0, 12), min_size=1, max_size=7)))
            ],
            batch_size=batch_size,
        )
        for k in range(count)
    }
    shuffles = draw(st.booleans())
    feed = Feed.mix(
        parts,
        weights={label: draw(st.sampled_from([1, 2, 0.3, 10])) for label in parts},
        stop=draw(st.sampled_from(stops)),
        lanes=draw(st.integers(1, 4)),
        shuffle=Shuffle(draw(st.integers(1, 60)), interleave=draw(st.integers(1, 3))) if shuffles else 0,
        seed=draw(st.integers(0, 3)),
        on_error="skip" if failing in generators else "raise",
    )
    return Lanes(feed, draw(st.integers(0, 2)))


def mine(lanes: Lanes, k: int, lane: int) -> int:
    """Return the number of samples of component `k` in a lane that reads to its end, without shuffling."""
    return sum(split[2] for split in lanes.lists[k][lane :: lanes.count])


@settings(deadline=None)
@given(mixes(stops=("all",)))
def test_with_all_every_sample_comes_exactly_once(lanes: Lanes) -> None:
    seen = [sample[:3] for lane in range(lanes.count) for sample in lanes.samples(lane)]
    assert sorted(seen) == sorted(
        (k, number, i) for splits in lanes.lists for k, number, length in splits for i in range(length)
    )


@settings(deadline=None)
@given(mixes(stops=("first",)))
def test_with_first_a_lane_ends_at_the_first_draw_that_finds_nothing(lanes: Lanes) -> None:
    weights = list(lanes.mixed.weights.values())
    for lane in range(lanes.count):
        seen = lanes.samples(lane)
        assert len({sample[:3] for sample in seen}) == len(seen)
        if lanes.plan.shuffle:  # the lane's splits are permuted, so take the lengths of the splits that it reads
            run = lanes.lane(lane)
            left = [
                sum(lanes.lists[k][part.index_of(n)][2] for n in range(part.count))
                for k, part in enumerate(run._splits._parts)  # type: ignore[union-attr]
            ]
        else:
            left = [mine(lanes, k, lane) for k in range(len(weights))]
        draws = Draws(weights, lanes.plan.seed, lanes.epoch, lane)
        expected: Counter[int] = Counter()
        order = []
        for position in itertools.count():
            (k,) = draws.at(np.array([position]), (), 0).tolist()
            if not left[k]:
                break
            left[k] -= 1
            expected[k] += 1
            order.append(k)
        assert Counter(sample[0] for sample in seen) == expected
        if not lanes.plan.shuffle:
            assert [sample[0] for sample in seen] == order
            for k in expected:
                of_part = [sample[1:3] for sample in seen if sample[0] == k]
                assert of_part == sorted(of_part), "samples of one feed keep their order"


@settings(max_examples=40, deadline=None)
@given(mixes(), st.integers(0, 100))
def test_a_lane_goes_on_from_any_record_as_if_nothing_had_happened(lanes: Lanes, offset: int) -> None:
    for lane in {0, lanes.count - 1}:
        whole = lanes.rest(lanes.lane(lane))
        run = lanes.lane(lane)
        records = [run.record()]
        while lanes.next_batch(run):
            records.append(run.record())
        step = 1 + len(records) // 10  # reading all of a long rest again from every record would take long
        for at, record in enumerate(records):
            again = lanes.lane(lane, record)
            assert (again.index, again.record()) == (at, record)
            if at % step == offset % step:
                assert lanes.rest(again) == whole[at:]
        middle = len(records) // 2
        behind = lanes.lane(lane, records[middle], ahead=records[-1])
        assert lanes.rest(behind) == whole[middle:]
        assert behind.replayed


@settings(max_examples=40, deadline=None)
@given(mixes(generators=(failing,)), st.integers(0, 100))
def test_a_lane_with_skipped_splits_goes_on_from_any_record(lanes: Lanes, offset: int) -> None:
    whole = lanes.rest(lanes.lane(0))
    told = set(lanes.told)
    run = lanes.lane(0)
    step = 1 + len(whole) // 10
    for at in range(len(whole)):
        if at % step == offset % step:
            again = lanes.lane(0, run.record())
            assert lanes.rest(again) == whole[at:]
        lanes.next_batch(run)
    count = len(lanes.lists)
    for number, samples in told:
        part = lanes.lane(0)._splits._parts[number % count]  # type: ignore[union-attr]
        split = lanes.lists[number % count][part.index_of(number // count)]
        assert (split[1] % 3, samples) == (0, 3)


def endless(shuffle: int = 0, **weights: float) -> Lanes:
    parts = {label: Feed(forever, segment=7, batch_size=10) for label in weights}
    feed = Feed.mix(parts, weights=weights, lanes=2, shuffle=shuffle, seed=1)
    return Lanes(feed)


@pytest.mark.parametrize("shuffle", [0, 40])
def test_an_endless_mix_goes_on_from_any_record_and_reads_no_more_than_its_open_segments_again(shuffle: int) -> None:
    lanes = endless(shuffle, a=3, b=1)
    assert lanes.plan.endless
    assert lanes.plan.drop_remainder
    assert lanes.plan.segment == 28
    run = lanes.lane(1)
    records, batches = [run.record()], []
    for _ in range(200):
        batches.append(lanes.next_batch(run))
        records.append(run.record())
    assert max(map(len, records)) < 200
    for at in (0, 1, 57, 198):
        again = lanes.lane(1, records[at])
        assert [lanes.next_batch(again) for _ in range(min(5, 200 - at))] == batches[at : at + 5]


def test_draws_are_near_the_weights_in_every_window() -> None:
    draws = Draws([0.7, 0.25, 0.05], seed=3, epoch=1, lane=2)
    found = draws.at(np.arange(200_000), (), 0)
    for start in range(0, 200_000, 2000):
        window = np.bincount(found[start : start + 2000], minlength=3) / 2000
        assert np.abs(window - [0.7, 0.25, 0.05]).max() < 0.05
    assert np.abs(np.bincount(found) / 200_000 - [0.7, 0.25, 0.05]).max() < 0.004
    repeats = np.mean(found[1:] == found[:-1])
    assert abs(repeats - (0.7**2 + 0.25**2 + 0.05**2)) < 0.005, "each draw is independent of the one before"
    assert found.tolist()[777:999] == draws.at(np.arange(777, 999), (), 0).tolist()


def test_draws_differ_in_each_lane_epoch_and_seed_and_when_made_again() -> None:
    positions = np.arange(1000)
    drawn = [Draws([1, 1], *key).at(positions, (), 0) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    drawn.append(Draws([1, 1], 0, 0, 0).at(positions, (), 1))
    for one, other in itertools.combinations(drawn, 2):
        assert 400 < np.count_nonzero(one == other) < 600
    left_out = Draws([1, 5, 1], 0, 0, 0).at(positions, {1}, 0)
    assert set(left_out.tolist()) == {0, 2}
    assert set(Draws([1, 5, 1], 0, 0, 0).at(positions, {0, 2}, 0).tolist()) == {1}


def test_the_numbers_behind_the_draws_stay_as_they_are() -> None:
    """Users' streams depend on them."""
    assert uniform(1, np.array([0, 1, 2**62])).tolist() == [0.5665615751722809, 0.7457817572627011, 0.5760953568200242]
    drawn = Draws([0.5, 0.3, 0.2], 1, 2, 3).at(np.arange(20), (), 0)
    assert "".join(map(str, drawn.tolist())) == "22122200100111002000"


def test_weights_hold_to_the_end_with_first_and_the_rest_is_drawn_as_weighed_with_all() -> None:
    sizes = {"a": 3000, "b": 3000, "c": 300}
    parts = {label: Feed(rows, splits=[(k, 0, size)], batch_size=10) for k, (label, size) in enumerate(sizes.items())}
    weights = {"a": 3, "b": 1, "c": 1}
    first = Lanes(Feed.mix(parts, weights=weights, lanes=1)).samples(0)
    assert 1300 < len(first) < 1700, "c ends the epoch"
    assert abs(sum(sample[0] == 0 for sample in first) / len(first) - 0.6) < 0.05
    every = Lanes(Feed.mix(parts, weights=weights, lanes=1, stop="all")).samples(0)
    assert len(every) == 6300
    last_c = max(i for i, sample in enumerate(every) if sample[0] == 2)
    behind = [sample[0] for sample in every[last_c + 1 : last_c + 1001]]
    assert abs(behind.count(0) / 1000 - 0.75) < 0.05, "without c, 3 of 4 draws are from a"


def _changed(record: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    value = arrays.unpack(record)
    change(value)
    return arrays.pack(value)


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "more splits": lambda r: r.update(next=99, parts=[[97, r["parts"][0][1]], [2, r["parts"][1][1]]]),
    "sums that do not add up": lambda r: r.update(next=r["next"] + 1),
    "samples that do not add up": lambda r: r.update(done=r["done"] + 1),
    "other components": lambda r: r.update(parts=[*r["parts"], [0, 0]]),
    "none": lambda r: r.pop("parts"),
    "seats of each other": lambda r: r.update(seats=r["seats"][::-1]),
    "a split read twice": lambda r: r.update(seats=[r["seats"][0]] * len(r["seats"])),
    "a split skipped that it has not": lambda r: r.update(skipped=[[99, 0]]),
    "beyond the block": lambda r: r.update(made=1000),
    "text": lambda r: r.update(index="x"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("shuffle", [0, 24])
def test_a_record_of_another_lane_is_refused(change: str, shuffle: int) -> None:
    parts = {f"p{k}": Feed(rows, splits=[(k, n, 20) for n in range(6)], batch_size=4) for k in range(2)}
    lanes = Lanes(Feed.mix(parts, lanes=2, shuffle=shuffle))
    run = lanes.lane(0)
    for _ in range(4):
        lanes.next_batch(run)
    with pytest.raises(ProtocolError, match="restart record"):
        lanes.lane(0, _changed(run.record(), CHANGES[change]))
    with pytest.raises(ProtocolError):
        lanes.lane(0, b"nonsense")
    with pytest.raises(ProtocolError):
        lanes.lane(0, skip=[99])


def test_a_split_that_is_to_be_skipped_is_that_of_its_component() -> None:
    parts = {f"p{k}": Feed(rows, splits=[(k, n, 5) for n in range(4)], batch_size=4) for k in range(3)}
    lanes = Lanes(Feed.mix(parts, lanes=1, stop="all"))
    seen = {sample[:2] for batch in lanes.rest(lanes.lane(0, skip=[2 * 3 + 1])) for sample in batch}
    assert {(k, n) for k in range(3) for n in range(4)} - seen == {(1, 2)}
    assert lanes.told == [(2 * 3 + 1, 0)]


def test_a_block_that_cannot_be_read_again_as_it_was_is_an_error() -> None:
    """A split is not skipped within samples that were delivered before."""
    broken: set[int] = set()

    def breaks(split: tuple[int, int, int]) -> Iterator[Any]:
        for i, sample in enumerate(rows(split)):
            if split[0] in broken and i == 2:
                raise OSError("broken")
            yield sample

    parts = {f"p{k}": Feed(breaks, splits=[(k, 0, 20)], batch_size=4) for k in range(2)}
    lanes = Lanes(Feed.mix(parts, lanes=1, shuffle=16, on_error="skip"))
    run = lanes.lane(0)
    lanes.next_batch(run)
    broken.add(1)
    with pytest.raises(GeneratorError, match="broken"):
        lanes.next_batch(lanes.lane(0, run.record()))
    assert lanes.told == []


def test_an_error_names_the_component() -> None:
    parts = {
        "good": Feed(rows, splits=[(0, 0, 9)], batch_size=4),
        "bad": Feed(failing, splits=[(1, 0, 9)], batch_size=4),
    }
    lanes = Lanes(Feed.mix(parts, stop="all"))
    with pytest.raises(GeneratorError, match=r"failing raised OSError: broken\n  in split \(1, 0, 9\) of bad"):
        lanes.samples(0)
