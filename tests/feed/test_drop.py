"""A transform leaves samples out with `DROP`, or yields several for one, and the stream keeps every promise."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
import penstock_server
from penstock_server import Feed
from penstock_server.to_daemon import control
from penstock_server.worker.reading.item_splits import ItemSplits
from tests.conftest import Serve
from tests.reference.one_stream import digests

FEEDS = """
    import os
    import random

    import numpy as np
    from penstock import DROP
    from penstock_server import Feed, Leaf, Pad, Weights

    SIZES = [7, 0, 31, 1, 16, 64, 5, 12]
    S = range(8)

    def rows(split):
        for i in range(SIZES[split]):
            yield np.int64(1000 * split + i)

    def whole():
        yield from map(np.int64, range(136))

    def endless(rng):
        while True:
            yield rng.integers(1000)

    def odd(x):
        return DROP if x % 3 == 0 else x

    def drawn(x, rng):
        return (x, rng.integers(2**62)) if rng.random() < 0.7 else DROP

    def globally(x):
        return (x, random.randrange(2**62)) if np.random.random() < 0.7 else DROP

    def patches(x, rng):
        for k in range(int(x) % 4):
            yield 10 * x + k, rng.integers(2**62)

    def but_first(sample):
        return DROP if sample[0] % 10 == 0 else sample

    def long(x):
        return np.full(int(x) % 7, x) if x % 5 else DROP

    class Table:
        def __len__(self):
            return 203
        def __getitem__(self, i):
            if i % 29 == 7:
                raise OSError(f"{i}.jpg is no image")
            return np.int64(i), np.random.randint(2**62)

    class Together(Table):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    class Gaps:
        def __len__(self):
            return 203
        def __getitem__(self, i):
            return DROP if i % 10 == 3 else np.int64(i)

    def splits(transform, **options):
        options = {"batch_size": 8, "lanes": 3, "seed": 3, "epochs": 1, **options}
        return Feed(rows, splits=S, transform=transform, **options)

    plain = splits(odd)
    pools = splits(drawn, shuffle=40)
    blocks = splits([odd, globally], shuffle=40, order="exact", batching="stack", turn=1, lanes=1)
    several = splits(patches)
    several_pools = splits([odd, patches, but_first], shuffle=40)
    segments = Feed(endless, transform=[odd, patches], segment=10, batch_size=7, lanes=3)
    shared = Feed(whole, transform=[globally], batch_size=8, lanes=3)
    padded = splits(long, batching="pad")
    buckets = splits(long, batching=Pad(buckets=[2, 4], too_long="drop"), shuffle=40)
    kept = splits(drawn, cache=os.environ.get("DATA", "cache"))
    odds, others = splits(odd, seed=0, lanes=16, epochs=None), Feed(rows, splits=S, batch_size=8)
    mixed = Feed.mix({"a": odds, "b": others}, seed=1, shuffle=40)
    batches = Feed(lambda split: (np.full(n % 4 + 1, n) for n in rows(split)), splits=S, batch_size=None,
                   transform=lambda batch: DROP if batch[0] % 3 == 0 else batch)
    items = Feed(Table(), batch_size=8, on_error="skip", lanes=4, transform=drawn)
    shuffled = Feed(Together(), batch_size=8, on_error="skip", lanes=5, shuffle=1, epochs=1)
    weighted = Feed(Gaps(), batch_size=8, drops=True, weights=range(203), lanes=4, transform=globally)
    left, right = Feed(range(203), batch_size=8, transform=odd), Feed(range(203), batch_size=8)
    zipped = Feed.zip(left, right, drops=True, epochs=1)
"""
NAMES = re.findall(r"^    (\w+) = (?:Feed|splits)\S*\(", FEEDS.partition("def splits")[2], re.MULTILINE)
DROPPED = {"plain": 46, "several": 36, "shuffled": 7, "zipped": 68}


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_from_any_place(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "local.py").write_text(textwrap.dedent(FEEDS))
    env = {"DATA": str(tmp_path / "cache")}
    daemon = serve(FEEDS, *NAMES, workers=3, env=env)
    for number, name in enumerate(NAMES):
        path = f"{tmp_path / 'local.py'}:{name}"
        quiet, states = [], []
        with penstock.connect(path, workers=0) as connection:
            for batch in itertools.islice(connection.batches(), 120):
                quiet += digests([batch])
                states.append(connection.state_dict())
        with penstock.connect(daemon.urls[name], transport="tcp") as connection:
            assert connection.cardinality in (None, math.inf), "nobody knows how many samples are left"
            reading = connection.batches()
            seen = digests(itertools.islice(reading, 3))
            if number % 4 == 0:
                daemon.workers()[0].kill()
            seen += digests(itertools.islice(reading, len(quiet) - 3))
            assert seen == quiet, name
            assert name == "segments" or not [*reading], name
        for at in sorted({0, 4, len(quiet) // 2, len(quiet) - 2}):
            with penstock.connect(path, workers=0, state=states[at]) as connection:
                rest = digests(itertools.islice(connection.batches(), len(quiet) - at - 1))
            assert rest == quiet[at + 1 :], f"{name} from batch {at + 1} on"
    assert not re.search("a different first sample|gave another sample|please report", daemon.stderr())
    figures = {feed.name: feed.dropped for feed in control.status(daemon.urls["plain"], 60).feeds}
    for name, dropped in DROPPED.items():
        assert figures[name] == dropped, f"a sample that was made twice counts once: {name}"
    assert figures["items"] > 40


def epoch(feed: Feed) -> list[Any]:
    with penstock.connect(feed, workers=0) as connection:
        return list(connection.batches())


def test_samples_are_left_out_and_all_others_come_once_in_full_batches() -> None:
    def numbers(split: int) -> Any:
        yield from range(100 * split, 100 * split + 20)

    def odd(x: int) -> Any:
        return penstock.DROP if x % 3 == 0 else x

    for shuffle in (0, 30):
        batches = epoch(Feed(numbers, splits=range(9), transform=odd, batch_size=7, lanes=4, shuffle=shuffle))
        left = [x for split in range(9) for x in numbers(split) if x % 3]
        assert sorted(np.concatenate(batches).tolist()) == left
        assert {len(batch) for batch in batches[:-1]} == {7}


def test_a_transform_that_yields_makes_any_number_of_samples_each_with_its_own_random_numbers() -> None:
    def numbers(split: int) -> Any:
        yield from range(5)

    def repeated(x: int, rng: np.random.Generator) -> Any:
        for _ in range(x):
            yield x, rng.random()

    def more(sample: Any, rng: np.random.Generator) -> Any:
        return sample[0], sample[1], rng.random()

    batches = epoch(Feed(numbers, splits=range(3), transform=[repeated, more], batch_size=4))
    assert sorted(np.concatenate([x for x, _, _ in batches]).tolist()) == sorted([1, 2, 2, 3, 3, 3, 4, 4, 4, 4] * 3)
    for column in (1, 2):
        assert len(set(np.concatenate([batch[column] for batch in batches]).tolist())) == 30


class Items:
    def __init__(self, broken: Any = ()) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> Any:
        if index in self.broken:
            raise OSError(f"{index}.png is cut off")
        return np.int64(index), np.int64(index * index)


@pytest.mark.parametrize("shuffle", [0, 1, penstock.Shuffle(20, block=5)])
def test_items_that_may_be_left_out_keep_the_order_of_the_feed(shuffle: Any, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"batch_size": 8, "lanes": 4, "shuffle": shuffle, "seed": 2}
    expected = np.concatenate([x for x, _ in epoch(Feed(Items(), **options))]).tolist()
    same = epoch(Feed(Items(), on_error="skip", **options))
    assert np.concatenate([x for x, _ in same]).tolist() == expected, "nothing is left out, so nothing changes"
    assert {len(x) for x, _ in same[:-1]} == {8}

    broken = epoch(Feed(Items({17, 60, 102}), on_error="skip", **options))
    assert [len(x) for x, _ in broken] == [8] * 12 + [4]
    rows = np.concatenate([x for x, _ in broken]).tolist()
    assert sorted(rows) == [x for x in range(103) if x not in (17, 60, 102)]
    if not shuffle:
        assert rows[:9] == [*range(9)], "a batch that lacks an item takes the next one of its lane"
    said = [record.getMessage() for record in caplog.records]
    assert sum("1 item was left out, all others are served: item 17 (raised OSError: 17.png is" in s for s in said) == 1


def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path: Path, serve: Serve) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / "pets" / name / f"{number:02}.png")
    (tmp_path / "pets/cat/07.png").write_bytes(b"")
    folder = str(tmp_path / "pets")
    source = f"""
        from penstock import Feed
        feed = Feed.from_folder({folder!r}, batch_size=4, shuffle=1, on_error="skip", epochs=1, size=(8, 8))
    """
    daemon = serve(source)
    with penstock.connect(daemon.url) as connection:
        batches = list(connection.batches())
    assert [len(labels) for _, labels in batches] == [4] * 9 + [3]
    assert np.concatenate([labels for _, labels in batches]).sum() == 20
    (feed,) = control.status(daemon.url, 60).feeds
    assert feed.dropped == 1 == feed.skipped_count
    assert "item 7 (raised OSError: " in feed.skipped[0].why
    assert "pets/cat/07.png cannot be decoded" in feed.skipped[0].why
    assert re.search(r"WARNING .* feed feed, part \d+ of 10, 3 samples: 1 item was left out", daemon.stderr())


@pytest.mark.parametrize("shuffle", [0, 8])
def test_a_state_where_a_split_raised_behind_dropped_samples_is_accepted(shuffle: int) -> None:
    def breaks(split: int) -> Any:
        for i in range(10):
            if split == 1 and i == 7:
                raise ValueError("broken")
            yield np.int64(split * 100 + i)

    def without_5_and_6(sample: Any) -> Any:
        return penstock.DROP if sample % 100 in (5, 6) else sample

    feed = Feed(
        breaks, splits=range(3), transform=without_5_and_6, batch_size=2, lanes=1, on_error="skip", shuffle=shuffle
    )
    with penstock.connect(feed, workers=0) as connection:
        whole = [(batch.tolist(), connection.state_dict()) for batch in connection.batches()]
    for at, (_, state) in enumerate(whole[:-1], start=1):
        with penstock.connect(feed, workers=0, state=state) as connection:
            assert [batch.tolist() for batch in connection.batches()] == [batch for batch, _ in whole[at:]]


def test_where_a_feed_promises_its_length_the_message_says_what_to_do() -> None:
    def numbers(split: int) -> Any:
        yield from range(5)

    with pytest.raises(penstock.FeedError, match=r"samples= promises the length of an epoch: leave samples= out"):
        epoch(Feed(numbers, splits=range(3), transform=lambda x: penstock.DROP, samples=15, batch_size=4))
    with pytest.raises(penstock.GeneratorError, match=r"give Feed\(drops=True\), and the length"):
        epoch(Feed(range(20), transform=lambda x: x if x < 9 else penstock.DROP, batch_size=4))
    with pytest.raises(ValueError, match=r"samples= promises the length .* drops=True cannot keep it"):
        Feed(range(20), batch_size=4, samples=20, drops=True)
    assert len(epoch(Feed(range(20), transform=lambda x: x if x < 9 else penstock.DROP, batch_size=4, drops=True))) == 3


class PyDataset:
    """A stand-in for that of Keras."""

    def on_epoch_begin(self) -> None: ...

    def on_epoch_end(self) -> None: ...

    @property
    def num_batches(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return np.full(3, index)


def test_batches_of_a_keras_dataset_can_be_dropped_if_its_length_may_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PyDataset, "__module__", "keras.trainers")

    def even(batch: Any) -> Any:
        return penstock.DROP if batch[0] % 2 else batch

    with pytest.raises(penstock.GeneratorError, match=r"as many batches as the Keras dataset says.*fixed_length=False"):
        epoch(Feed(PyDataset(), batch_size=None, transform=even))
    with pytest.raises(ValueError, match=r"Keras dataset.* give fixed_length=False too"):
        Feed(PyDataset(), batch_size=None, transform=even, drops=True)
    feed = Feed(PyDataset(), batch_size=None, transform=even, fixed_length=False)
    assert [batch.tolist() for batch in epoch(feed)] == [[0] * 3, [2] * 3, [4] * 3]


def test_a_source_that_yields_drop_says_where_it_belongs() -> None:
    def numbers(split: int) -> Any:
        yield from (1, penstock.DROP)

    for source, options in ((numbers, {"splits": [1, 2]}), ([1, penstock.DROP], {})):
        with pytest.raises(
            penstock.FeedError, match=r"sample is penstock.DROP, which leaves a sample out if a transform"
        ):
            epoch(Feed(source, batch_size=2, **options))


def test_a_feed_of_which_everything_is_left_out_names_the_first_reasons() -> None:
    with pytest.raises(penstock.FeedError, match=r"nothing: no item could be read.* item 0 \(raised OSError: 0\.png"):
        epoch(Feed(Items(range(103)), batch_size=8, on_error="skip"))
    with pytest.raises(penstock.FeedError, match=r"none yielded a sample, as all 20 samples were dropped"):
        epoch(Feed(range(20), transform=lambda x: penstock.DROP, batch_size=1, drops=True))


def test_a_transform_of_one_part_of_a_zip_drops_the_pair_and_may_not_yield() -> None:
    def odd(x: int) -> Any:
        return x if x % 2 else penstock.DROP

    def twice(x: int) -> Any:
        yield x
        yield x

    one, other = Feed(range(20), batch_size=4, transform=odd), Feed(range(20), batch_size=4)
    pairs = epoch(Feed.zip(one, other, drops=True))
    assert all((a == b).all() and (a % 2 == 1).all() for a, b in pairs)
    with pytest.raises(ValueError, match=r"the transform of part 0 yields, and Feed\.zip pairs samples one by one"):
        Feed.zip(Feed(range(20), batch_size=4, transform=twice), other)


def test_drop_is_one_object() -> None:
    drop = penstock.DROP
    assert drop is penstock_server.DROP is copy.deepcopy(drop) is pickle.loads(pickle.dumps(drop))
    assert repr(drop) == "penstock.DROP"


def test_positions_of_items_are_divided_without_gaps() -> None:
    for length, batch, turn, lanes in [(0, 4, None, 3), (1, 4, None, 3), (103, 8, 2, 4), (1_000_003, 16, None, 16)]:
        plan = Feed(range(max(1, length)), batch_size=batch, turn=turn, lanes=lanes, drops=True).plan("a")
        splits = ItemSplits(length, plan)
        assert splits.count <= 4096 + lanes
        places: list[int] = []
        for split in range(splits.count):
            of_split = itertools.takewhile(
                lambda place: place is not None, (splits.position(split, n) for n in itertools.count())
            )
            found = [place for place in of_split if place is not None]
            assert splits.size(split) == len(found)
            places += found
        assert np.array_equal(np.sort(places), np.arange(length))
