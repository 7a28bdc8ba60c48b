"""A lane's order: every sample once, the same each time, the same when it goes on from a record, and mixed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_proto import FeedError, ProtocolError, arrays
from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Leaf, TupleSpec
from penstock_server import Feed
from penstock_server.worker.collate import ReadyBatches, Rows
from penstock_server.worker.indexed import IndexRun
from penstock_server.worker.lane import LaneRun
from penstock_server.worker.randomness import GlobalRandomness
from penstock_server.worker.splits import SplitOpener

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


@dataclass
class Lanes:
    """The lanes of one epoch of a feed, all in one process, as a worker reads them."""

    feed: Feed
    plan: FeedPlan
    splits: list[tuple[int, int]]
    epoch: int = 0

    def __post_init__(self) -> None:
        self.randomness = GlobalRandomness()
        self.opener = SplitOpener(self.feed, self.plan, self.randomness)
        self.count = min(self.plan.lanes, len(self.splits))
        self.rows = Rows(SPEC)

    def lane(self, lane: int, record: bytes = b"") -> LaneRun:
        return LaneRun(
            self.plan,
            epoch=self.epoch,
            lane=lane,
            n_splits=len(self.splits),
            collate=self.rows,
            open_split=lambda i: self.opener.open(self.splits[i], i, self.epoch),
            record=record,
        )

    def next_batch(self, run: LaneRun) -> Batch:
        assert self.plan.batch_size is not None
        target = self.rows.store(self.plan.batch_size)
        return as_list(target, run.next_batch(target))

    def rest(self, run: LaneRun) -> list[Batch]:
        """All further batches, and the leftover if there is any."""
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
        shuffle=draw(st.integers(1, 60)) if shuffles else 0,
        interleave=draw(st.integers(1, 5)) if shuffles else None,
        seed=draw(st.integers(0, 3)),
    )
    return Lanes(feed, feed.plan("feed"), splits, draw(st.integers(0, 2)))


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


@settings(max_examples=300)
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
    opener = SplitOpener(feed, plan, GlobalRandomness())
    collate = ReadyBatches(Leaf("int64", (None, 2)), copy=shuffle > 0)

    def lane(record: bytes = b"") -> LaneRun:
        return LaneRun(
            plan,
            epoch=0,
            lane=0,
            n_splits=3,
            collate=collate,
            open_split=lambda i: opener.open(i, i, 0),
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
    "less": lambda r: r.pop("block"),
    "more": lambda r: r.update(more=1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_of_another_lane_is_refused(change: str) -> None:
    splits = [(i, 20) for i in range(6)]
    feed = Feed(plain, splits=splits, batch_size=4, lanes=2, shuffle=24, interleave=3)
    lanes = Lanes(feed, feed.plan("feed"), splits)
    run = lanes.lane(0)
    for _ in range(4):
        lanes.next_batch(run)
    with pytest.raises(ProtocolError, match="restart record"):
        lanes.lane(0, _changed(run.record(), CHANGES[change]))
    with pytest.raises(ProtocolError):
        lanes.lane(0, b"nonsense")


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


# --- indexable sources ---


class Squares:
    def __len__(self) -> int:
        return 11

    def __getitem__(self, i: int) -> Any:
        return np.array([i, i * i]), np.random.random()


def indexed(shuffle: int, epoch: int = 0) -> tuple[IndexRun, Rows]:
    source = Squares()
    plan = Feed(source, batch_size=4, shuffle=shuffle, seed=5).plan("feed")  # type: ignore[arg-type]
    rows = Rows(SPEC)
    return IndexRun(plan, source, epoch=epoch, collate=rows, randomness=GlobalRandomness()), rows


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
    order = [i for each in in_order for i, _, _ in each]
    assert sorted(order) == list(range(11))
    assert (order == sorted(order)) == (shuffle == 0)
    if shuffle:
        later, rows = indexed(shuffle, epoch=1)
        assert [i for j in range(3) for i, _, _ in batch(later, rows, j)] != order
