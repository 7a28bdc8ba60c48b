"""A feed's first sample is made once if it takes long: the lane that reads its split goes on behind it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.spec import flatten
from penstock_server import Feed, Pad
from penstock_server.coordinator.model.workers import VACANT, Workers
from penstock_server.worker.lane.restart_record import SourcePlace
from penstock_server.worker.reading import first_split
from penstock_server.worker.reading.first_split import FirstSplit
from penstock_server.worker.reading.loaded_feed import LoadedFeed
from penstock_server.worker.tasks.memfds import Memfds
from penstock_server.worker.tasks.tasks import Tasks
from penstock_server.worker_state.activity import ActivityPage
from tests.conftest import UNCHECKED, Serve

FEED = """
    import os, time
    import numpy as np
    from penstock_server import Feed

    def slow(split):
        with open(os.environ["STARTS"], "a") as file:
            file.write(f"{split}\\n")
        if split == 0:
            time.sleep(0.4)
        for i in range(10):
            yield np.int64(10 * split + i)

    feed = Feed(slow, splits=range(4), batch_size=2, epochs=1)
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_a_first_sample_that_took_long_is_not_made_again(serve: Serve, tmp_path: Path, workers: int) -> None:
    starts = tmp_path / "starts"
    daemon = serve(FEED, workers=workers, env={"STARTS": str(starts)}, patched=UNCHECKED)
    read = []
    for times in (1, 2):
        with penstock.connect(daemon.url) as connection:
            read.append([batch.tolist() for batch in connection.batches()])
        assert sorted(starts.read_text().split()) == sorted(times * ["0", "1", "2", "3"])
    assert read[0] == read[1]
    assert sorted(sample for batch in read[0] for sample in batch) == list(range(40))


# --- the stream is the same, whatever the feed is ---

SPLITS = list(range(4))


def drawn(split: int, rng: np.random.Generator) -> Iterator[Any]:
    sample = np.zeros(2)
    for _ in range(split + 5):
        sample[:] = split, rng.random()
        yield sample  # each time the same array


def drawn_globally(split: int) -> Iterator[Any]:
    for _ in range(5):
        yield np.array([split, np.random.random()])


def whole() -> Iterator[Any]:
    for i in range(21):
        yield np.array([i, np.random.random()])


def batches(split: int) -> Iterator[Any]:
    for i in range(3):
        yield np.full((5, 2), 10 * split + i, "float64")


def in_place(sample: Any, rng: np.random.Generator) -> Any:
    sample += rng.random()
    return sample


def endless(rng: np.random.Generator) -> Iterator[Any]:
    while True:
        yield rng.random(2)


DRAWN = Feed(drawn, splits=SPLITS, batch_size=4)
OTHER = Feed(drawn_globally, splits=SPLITS, batch_size=4)
FEEDS = {
    "own rng": DRAWN,
    "global": OTHER,
    "shuffled": Feed(drawn, splits=SPLITS, batch_size=4, shuffle=8, lanes=2),
    "transform": Feed(drawn, splits=SPLITS, batch_size=4, transform=in_place),
    "global, transform": Feed(drawn_globally, splits=SPLITS, batch_size=4, transform=in_place),
    "in shares": Feed(whole, batch_size=4, lanes=3, transform=in_place),
    "segments": Feed(endless, segment=5, samples=20, batch_size=4, lanes=2),
    "rebatched": Feed(batches, splits=SPLITS, batch_size=None, rebatch=4, transform=in_place),
    "ready": Feed(batches, splits=SPLITS, batch_size=None),
    "zip": Feed.zip(DRAWN, OTHER),
    "mix": Feed.mix({"a": DRAWN, "b": OTHER}, stop="all"),
    "drop": Feed(drawn, splits=SPLITS, batch_size=4, batching=Pad(buckets=[2], too_long="drop"), shuffle=8),
}


def read(feed: Feed) -> list[Any]:
    with penstock.connect(feed, workers=0) as connection:
        spec = connection.info.spec
        return [[leaf.tobytes() for leaf in flatten(spec, batch)] for _ in range(2) for batch in connection.batches()]


@pytest.mark.parametrize("name", FEEDS)
def test_the_stream_is_the_same_whether_the_first_split_stays_open(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = FirstSplit.take

    def noted(*args: Any) -> Any:
        found = take(*args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(FirstSplit, "take", noted)
    closed = read(FEEDS[name])
    assert not any(taken)
    monkeypatch.setattr(first_split, "SLOW", -1.0)
    assert read(FEEDS[name]) == closed
    assert any(taken)


def test_zipped_generators_of_different_lengths_are_reported_also_in_the_split_that_stays_open(
    serve: Serve,
) -> None:
    source = """
        import time
        from penstock_server import Feed

        def slow(split):
            time.sleep(0.4)
            yield from range(5)

        short = Feed(lambda split: iter(range(3)), splits=[0], batch_size=1)
        feed = Feed.zip(Feed(slow, splits=[0], batch_size=1), short)
    """
    daemon = serve(source, workers=1)
    with penstock.connect(daemon.url) as connection:
        assert len(list(connection.batches())) == 3
    assert "is left out after 3 samples" in daemon.stderr()


# --- which split is kept ---


class Opened:
    closed = 0
    source_place = SourcePlace(1, 0, 0)

    def close(self) -> None:
        self.closed += 1


def test_a_split_is_kept_for_the_one_that_asks_for_it_in_time() -> None:
    now = 0.0
    kept, opened, other = FirstSplit(lambda: now), Opened(), Opened()
    asked: Any = lambda split="a", index=0, epoch=0: kept.take(split, index, epoch, lambda samples, why: None)  # noqa: E731
    assert asked() is None
    assert not kept.keep("a", 0, 0, opened, 1, 0.2), "it was quick"  # type: ignore[arg-type]
    assert kept.keep("a", 0, 0, opened, 1, 0.3)  # type: ignore[arg-type]
    assert asked("b") is asked(index=1) is asked(epoch=1) is None
    assert asked() == (opened, 1)
    assert asked() is None, "it has one owner"
    assert kept.keep("a", 0, 0, opened, 1, 0.3)  # type: ignore[arg-type]
    assert kept.keep("b", 0, 0, other, 2, 0.3)  # type: ignore[arg-type]
    assert opened.closed == 1
    now = first_split.KEEP_SECONDS
    assert asked("b") is None
    assert other.closed == 1
    kept.drop()
    assert other.closed == 1


def test_a_worker_ends_the_generator_that_no_lane_of_it_reads_in_time() -> None:
    now = 10.0
    loaded = LoadedFeed(DRAWN, DRAWN.plan("drawn"))
    loaded.first_split = FirstSplit(lambda: now)
    daemon: Any = SimpleNamespace(send=None)
    work = Tasks(None, {"drawn": loaded}, Memfds(), ActivityPage(), daemon)
    assert work.patience is None
    opened = Opened()
    loaded.first_split.keep(0, 0, 0, opened, 1, 0.3)  # type: ignore[arg-type]
    assert work.patience == first_split.KEEP_SECONDS
    now += 1
    assert work.patience == first_split.KEEP_SECONDS - 1
    work.tidy()
    assert not opened.closed
    now += first_split.KEEP_SECONDS
    assert work.patience == 0
    work.tidy()
    assert (opened.closed, work.patience) == (1, None)


def test_lanes_begin_with_the_worker_that_has_the_first_split_open() -> None:
    workers = Workers(3)
    workers.begin_with(1)
    assert [workers.pick(lane) for lane in range(4)] == [1, 2, 0, 1]
    workers.on_died(1)
    assert [workers.pick(lane) for lane in range(3)] == [0, 2, 0]
    workers.let_leave([0, 2])
    workers.remove(0, 2)
    assert workers.pick(0) == VACANT


CHANGES_ITS_SPLIT = """
    import numpy as np
    from penstock_server import Feed

    def pops(part):
        while part:
            yield np.int64(part.pop())

    feed = Feed(pops, splits=[[1, 2, 3], [4, 5, 6]], batch_size=3, lanes=1, epochs=2)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_the_look_at_the_first_sample_takes_nothing_from_a_split(serve: Serve, tmp_path: Path, workers: int) -> None:
    (tmp_path / "pops.py").write_text(textwrap.dedent(CHANGES_ITS_SPLIT))
    url = serve(CHANGES_ITS_SPLIT, patched=UNCHECKED).url if workers else f"{tmp_path}/pops.py:feed"
    with penstock.connect(url, **({} if workers else {"workers": 0})) as connection:
        for _ in range(2):
            assert [batch.tolist() for batch in connection.batches()] == [[3, 2, 1], [6, 5, 4]]
