"""`Feed.mix`: samples drawn from several feeds, in one stream that keeps every promise."""

from __future__ import annotations

import dataclasses
import itertools
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import penstock
from penstock_server import Feed, Shuffle
from penstock_server.feed.combined.mixed import Mixed
from penstock_server.feed.feed_warnings import mixing_warning
from penstock_server.feed.options.transforms import checked_transforms
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Join, Serve
from tests.reference.every_way import read_every_way
from tests.reference.one_stream import digests

FEEDS = """
    import itertools
    import os
    import random

    import numpy as np
    from penstock_server import Feed, Pad

    SIZES = [30, 0, 31, 1, 16, 20, 25, 12]

    def rows(split, component):
        for i in range(SIZES[split]):
            yield {"id": 10000 * component + 100 * split + i, "x": np.random.normal(size=3)}

    def drawn(split, component, rng):
        for i in range(SIZES[split]):
            yield {"id": 10000 * component + 100 * split + i, "x": rng.normal(size=3)}

    def forever(segment, component):
        for i in itertools.count():
            yield {"id": 10000 * component + 100 * segment + i, "x": np.full(3, random.random())}

    def by_shard(component, shard):
        for i in range(shard[0], 90, shard[1]):
            yield {"id": 10000 * component + i, "x": np.zeros(3)}

    def whole(component):
        level = 0.0
        for i in range(93):
            level += random.random()
            yield {"id": 10000 * component + i, "x": np.full(3, level)}

    class Walk:
        def __init__(self, split, component):
            self.split, self.component, self.level = split, component, random.random()
        def generate(self):
            for i in range(SIZES[self.split]):
                yield {"id": 10000 * self.component + 100 * self.split + i, "x": np.full(3, self.level)}

    def ids(split, component):
        for i in range(SIZES[split]):
            yield 10000 * component + 100 * split + i

    def noise(split, rng):
        for i in range(SIZES[split]):
            yield rng.normal(size=3)

    def of_pair(pair):
        return {"id": pair[0], "x": pair[1]}

    def noisy(sample, rng):
        return {**sample, "x": sample["x"] + rng.normal(size=3)}

    def blurred(sample):
        return {**sample, "x": sample["x"] * np.random.random()}

    def ready(split, component, rng):
        for i in range(SIZES[split]):
            yield {"id": np.full(1 + i % 3, 10000 * component + 100 * split + i), "x": rng.normal(size=(1 + i % 3, 3))}

    def words(split, component, rng):
        for i in range(SIZES[split]):
            yield {"id": 10000 * component + 100 * split + i, "x": rng.normal(size=i % 5)}

    S, B = range(8), {"batch_size": 8}
    one = Feed(rows, args=(1,), splits=S, **B)
    two = Feed(drawn, args=(2,), splits=lambda: S, **B)
    endless = Feed(forever, args=(3,), segment=20, **B)
    some = Feed(forever, args=(4,), segment=20, samples=130, **B)
    zipped = Feed.zip(Feed(ids, args=(5,), splits=S, **B), Feed(noise, splits=S, **B), transform=of_pair)

    first = Feed.mix({"one": one, "two": two}, weights={"one": 3, "two": 1}, lanes=3, turn=1, seed=3)
    every = Feed.mix({"one": one, "two": two}, weights={"one": 3, "two": 1}, stop="all", lanes=3, turn=1, seed=3)
    shuffled = Feed.mix({"one": one, "two": two, "some": some}, stop="all", shuffle=60, lanes=3, turn=2)
    finite = Feed.mix({"one": one, "endless": endless}, weights={"one": 2, "endless": 1}, shuffle=50, lanes=3)
    forever_ = Feed.mix({"one": endless, "two": Feed(forever, args=(6,), segment=9, **B)}, lanes=3, shuffle=40)
    outlasting = Feed.mix({"one": one, "endless": endless}, stop="all", lanes=2, turn=3)
    kinds = Feed.mix(
        {
            "zipped": zipped,
            "walk": Feed(Walk, method="generate", args=(7,), splits=S, transform=noisy, **B),
            "shard": Feed(by_shard, args=(8,), **B),
            "share": Feed(whole, args=(9,), transform=blurred, **B),
            "noisy": Feed(rows, args=(10,), splits=S, transform=[noisy, blurred], **B),
        },
        stop="all", shuffle=50, lanes=3, transform=blurred,
    )
    nested = Feed.mix(
        {
            "m": Feed.mix({"one": one, "zipped": zipped}, weights={"one": 2, "zipped": 1}, stop="all", transform=noisy),
            "two": two,
        },
        weights={"m": 3, "two": 2}, stop="all", shuffle=40, lanes=3, transform=blurred,
    )
    batches = Feed.mix(
        {f"r{k}": Feed(ready, args=(k,), splits=S, batch_size=None) for k in range(2)}, stop="all", lanes=3
    )
    padded = Feed.mix(
        {f"w{k}": Feed(words, args=(k,), splits=S, **B) for k in range(2)}, batching="pad", stop="all", lanes=3
    )
    bucketed = Feed.mix(
        {f"w{k}": Feed(words, args=(k,), splits=S, **B) for k in range(3)},
        batching=Pad(buckets=[2, 3], too_long="drop"), shuffle=90, lanes=3,
    )
"""
NAMES = re.findall(r"^    (\w+) = Feed\.mix\(", FEEDS, re.MULTILINE)
SIZES = [30, 0, 31, 1, 16, 20, 25, 12]


def of(component: int) -> list[int]:
    return [10000 * component + 100 * split + i for split, n in enumerate(SIZES) for i in range(n)]


def ids_of(batches: list[Any]) -> list[int]:
    return [i for batch in batches for i in batch["id"].tolist()]


def test_a_mixed_stream_is_the_same_with_any_workers_through_kills_and_from_a_state(serve: Serve, join: Join) -> None:
    streams = read_every_way(serve, join, FEEDS, NAMES)
    assert sorted(ids_of(streams["every"])) == sorted((of(1) + of(2)) * 2)
    shuffled = Counter(ids_of(streams["shuffled"]))
    assert sum(shuffled.values()) == 2 * (2 * sum(SIZES) + 130)
    assert all(shuffled[i] == 2 for i in of(1) + of(2))
    kinds = Counter(ids_of(streams["kinds"]))
    for component in (5, 7, 10):
        assert all(kinds[i] == 2 for i in of(component))
    assert sum(kinds.values()) == 2 * (3 * sum(SIZES) + 90 + 93)

    epochs = ids_of(streams["first"])
    assert max(Counter(epochs).values()) == 2, "a sample comes at most once an epoch"
    share = sum(i < 20000 for i in epochs) / len(epochs)
    assert abs(share - 0.75) < 0.08
    repeated = ids_of(streams["every"])
    assert repeated[:347] != repeated[len(repeated) // 2 :][:347], "each epoch draws differently"

    values = [x for batch in streams["kinds"] for x in batch["x"][:, 0].tolist() if x]
    assert len(set(values)) == len(values), "each component draws its own random numbers"
    rows = [tuple(batch["x"].shape) for batch in streams["bucketed"]]
    assert {width for _, width in rows} <= {2, 3}


OWN_OPTIONS = """
    import numpy as np
    from penstock_server import Feed

    SIZES = [30, 0, 31, 1, 16, 20, 25, 12]
    CACHE = {cache!r}

    def sample(component, split, i):
        return {{"id": 10000 * component + 100 * split + i, "x": np.full(3, i / 7)}}

    def rows(split, component):
        with open({log!r}, "a") as log:
            log.write(f"{{component}} {{split}}\\n")
        for i in range(SIZES[split]):
            yield sample(component, split, i)

    def batches(split, component):
        rows = [sample(component, split, i) for i in range(SIZES[split])]
        for start in range(0, len(rows), 7):
            yield {{key: np.stack([row[key] for row in rows[start : start + 7]]) for key in ("id", "x")}}

    def halved(sample, rng):
        return {{**sample, "x": sample["x"] * rng.random()}}

    def mix(component=rows, **options):
        a = Feed(rows, args=(1,), splits=range(8), batch_size=8, transform=halved, **options)
        own = {{"rebatch": 8, "batch_size": None}} if component is batches else {{"batch_size": 8}}
        b = Feed(component, args=(2,), splits=range(8), **own)
        return Feed.mix({{"a": a, "b": b}}, stop="all", shuffle=60, lanes=3)

    plain = mix()
    cached = mix(cache=CACHE)
    rebatched = mix(batches)
    both = mix(batches, cache=CACHE)
"""


def test_a_feed_of_a_mix_may_have_a_cache_and_may_yield_batches(serve: Serve, join: Join, tmp_path: Path) -> None:
    log = tmp_path / "log"
    source = OWN_OPTIONS.format(cache=str(tmp_path / "cache"), log=str(log))
    streams = read_every_way(serve, join, source, ["cached", "plain", "rebatched", "both"])
    expected = digests(streams["plain"])
    assert all(digests(stream) == expected for stream in streams.values())

    log.unlink()
    daemon = serve(source, "cached", workers=1)
    with penstock.connect(daemon.urls["cached"]) as connection:
        assert digests(batch for _ in range(2) for batch in connection.batches()) == expected
    ran = Counter(line.split()[0] for line in log.read_text().splitlines())
    assert ran["1"] == 0, "the generator of the cached feed ran"
    assert ran["2"] > 8, "the generator of the other feed runs in each epoch"


def test_samples_follow_from_those_of_the_feeds_if_they_are_known(serve: Serve) -> None:
    source = (
        FEEDS
        + """
    counted = Feed.mix({"a": some, "b": Feed(forever, args=(6,), segment=7, samples=50, **B)}, stop="all", lanes=2)
    """
    )
    daemon = serve(source, "counted", "finite", "outlasting")
    with penstock.connect(daemon.urls["counted"]) as connection:
        assert connection.info.samples == 180
        assert connection.cardinality == 23
        assert len(ids_of(list(connection.batches()))) == 180
    with penstock.connect(daemon.urls["finite"]) as connection:
        assert not connection.info.endless
    with penstock.connect(daemon.urls["outlasting"]) as connection:
        assert connection.info.endless
        assert sorted(i for i in ids_of(list(itertools.islice(connection.batches(), 200))) if i < 20000) == of(1)


# --- faults ---

FAULTY = """
    import os
    import signal

    import numpy as np
    from penstock_server import Feed

    def good(split):
        for i in range(40):
            yield 100 * split + i

    def broken(split):
        for i in range(40):
            if split == 1 and i == 5:
                raise OSError("bad sector")
            yield 1000 + 100 * split + i

    def deadly(split):
        for i in range(40):
            if split == 1 and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield 1000 + 100 * split + i

    def mix(other, **options):
        return Feed.mix(
            {"good": Feed(good, splits=[0, 1, 2], batch_size=8), "other": Feed(other, splits=[0, 1, 2], batch_size=8)},
            stop="all", epochs=1, **options,
        )

    raises = mix(broken)
    skips = mix(broken, on_error="skip", lanes=2)
    kills = mix(deadly, on_error="skip", lanes=2)
    fails = mix(deadly)
"""


def read(daemon: Daemon, name: str) -> list[int]:
    with penstock.connect(daemon.urls[name]) as connection:
        return [i for batch in connection.batches() for i in batch.tolist()]


def test_a_split_that_fails_is_left_out_of_its_feed_alone_and_named(serve: Serve) -> None:
    daemon = serve(FAULTY, "raises", "skips", "kills", "fails")
    everything = {100 * split + i for split in range(3) for i in range(40)}
    expected = sorted(everything | {1000 + i for i in everything if not 105 <= i < 140})
    assert sorted(read(daemon, "skips")) == expected
    killed = sorted(read(daemon, "kills"))
    assert set(expected) - {1100 + i for i in range(5)} <= set(killed) <= set(expected), (
        "the split counts up to its last batch or further"
    )
    assert len(set(killed)) == len(killed)
    log = daemon.stderr()
    assert "feed skips: the rest of split 1 of other is left out after 5 samples: broken raised OSError" in log
    assert "feed kills: the rest of split 1 of other is left out after" in log
    with pytest.raises(penstock.GeneratorError, match="bad sector") as caught:
        read(daemon, "raises")
    assert caught.value.split == "1 of other"
    with pytest.raises(penstock.WorkerDied) as died:
        read(daemon, "fails")
    assert died.value.split == "1 of other"


def test_a_changed_mix_refuses_a_state_of_the_former_one(serve: Serve) -> None:
    source = (
        FEEDS
        + """
    first = Feed.mix({"one": one, "two": two}, weights={"one": int(os.environ["WEIGHT"]), "two": 1}, lanes=3, turn=1)
    """
    )
    daemon = serve(source, "first", env={"WEIGHT": "3"})
    with penstock.connect(daemon.url) as connection:
        list(itertools.islice(connection.batches(), 5))
        state = connection.state_dict()
    daemon = serve(source, "first", env={"WEIGHT": "4"})
    with (
        pytest.raises(penstock.StateMismatch, match="the list of splits"),
        penstock.connect(daemon.url, state=state) as connection,
    ):
        next(connection.batches())


# --- what the daemon says ---


def test_too_few_splits_of_one_feed_are_warned_of_and_that_feed_is_named(serve: Serve) -> None:
    source = (
        FEEDS
        + """
    narrow = Feed.mix({"wide": one, "narrow": Feed(rows, args=(2,), splits=lambda: [0, 2], **B)}, lanes=5)
    """
    )
    daemon = serve(source, "narrow", "first")
    log = daemon.stderr()
    assert (
        "feed narrow: each lane of a mix needs splits of each feed, and narrow has 2, so there are 2 lanes instead of "
        "5, and no more workers than that have work. Divide narrow more finely, or give lanes=2"
    ) in log
    assert "feed first: each lane" not in log
    status = {feed.name: feed for feed in control.status(daemon.urls["narrow"], 60).feeds}
    assert "narrow" in status


BAD = """
    import os
    import numpy as np
    from penstock_server import Feed, Leaf

    def ints(split): yield {"x": 1, "y": np.zeros(3)}
    def floats(split): yield {"x": 1.0, "y": np.zeros(3)}
    def shapes(split): yield {"x": 1, "y": np.zeros(4)}
    def keys(split): yield {"x": 1, "z": np.zeros(3)}
    def tuples(split): yield 1, np.zeros(3)
    def nothing(split): yield from ()
    def raises(split): raise OSError("no disk")
    def unseeded(split): yield {"x": int.from_bytes(os.urandom(4), "little"), "y": np.zeros(3)}

    def mix(other, splits=(0, 1), **options):
        feeds = {"good": Feed(ints, splits=[0, 1], batch_size=2), "other": Feed(other, splits=splits, batch_size=2)}
        return Feed.mix(feeds, **options)

    dtype, shape, key, structure, empty, failing = map(mix, (floats, shapes, keys, tuples, nothing, raises))
    no_splits = mix(ints, splits=lambda: [])
    listing = mix(ints, splits=lambda: 1 / 0)
    declared = mix(floats, stop="all", spec={"x": Leaf("int64", ()), "y": Leaf("float64", 3)})
    random = mix(unseeded)
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dtype", "the samples of good and other differ, .*: sample['x'] is int64[] in good, and float64[] in other"),
        ("shape", "sample['y'] is float64[3] in good, and float64[4] in other. Let a transform= of other"),
        ("key", "sample['y'] is float64[3] in good, and missing in other"),
        ("structure", "sample['x'] is int64[] in good, and missing in other"),
        ("empty", "other: the feed yields nothing: all of its 2 splits were read"),
        ("failing", "other: raises raised OSError: no disk"),
        ("no_splits", "other: no splits to read: <lambda> returned none"),
        ("listing", "other: <lambda>, which lists the splits, raised ZeroDivisionError"),
        ("declared", "of other"),
    ],
)
def test_a_bad_feed_is_named(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"bad_{name}.py"
    file.write_text("\n".join(line.removeprefix("    ") for line in BAD.splitlines()))
    with (
        pytest.raises(penstock.PenstockError, match=re.escape(text).replace(r"\.\*", ".*")),
        penstock.connect(f"{file}:{name}", workers=0) as connection,
    ):
        list(connection.batches())


def test_a_feed_of_a_mix_that_is_not_reproducible_is_named(serve: Serve) -> None:
    daemon = serve(BAD, "random")
    deadline = time.monotonic() + 30
    while "a different first sample" not in daemon.stderr() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "feed random: split 0 of other gave a different first sample (sample['x'])" in daemon.stderr()


def test_the_example_runs(tmp_path: Path) -> None:
    example = shutil.copy(Path(__file__).resolve().parents[2] / "examples" / "mix.py", tmp_path)
    ran = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    said = re.fullmatch(r"(\d+) samples, (\d+)% of them recorded, from 8 files\n", ran.stdout)
    assert said, ran.stdout + ran.stderr
    assert int(said[1]) > 450
    assert 60 < int(said[2]) < 73


# --- what is refused when the feed is declared ---


def counted(split: int) -> Iterator[int]:
    yield from range(split)


def guarded(split: int, lock: Any) -> Iterator[int]:
    with lock:
        yield from range(split)


def endless(segment: int) -> Iterator[int]:
    yield from itertools.count()


A = Feed(counted, splits=[1, 2], batch_size=4)
S = Feed(endless, segment=5, batch_size=4)
M = Feed.mix({"a": A, "s": S})
AB = {"a": A, "b": A}


@pytest.mark.parametrize(
    ("feeds", "options", "text"),
    [
        ([A, A], {}, "takes a dict of feeds"),
        ({"a": A}, {}, "needs 2 to 256 feeds, got 1"),
        ({"a": A, 3: A}, {}, "names of feeds in Feed.mix must be text"),
        ({"a": A, "b": counted}, {}, "Feed.mix combines feeds, and b is <function"),
        ({"a": A, "b": M}, {"stop": "all"}, "b is a mix with stop='first', and this one has stop='all'"),
        ({"b": M, "b/s": S}, {}, "two feeds of this mix have the name b/s"),
        ({"a": A, "b": Feed.mix(AB, seed=3)}, {}, "b sets seed=3, .* to Feed.mix"),
        ({"a": A, "b": Feed.mix({f"{k}": A for k in range(256)})}, {}, "got 257, with those of the mixes in it"),
        ({"a": A, "b" * 127: M}, {}, "more than 128 characters"),
        ({"a": A, "b": Feed.mix(AB, weights={"a": 1, "b": 1e-8})}, {"weights": {"a": 99, "b": 1}}, "of b/b is less"),
        ({"a": A, "b": Feed([1, 2], batch_size=4)}, {}, "b is an object that can be indexed, .* ranges of indices"),
        (
            {"a": A, "b": Feed(counted, splits=[1], batch_size=4, shuffle=9)},
            {},
            r"b sets shuffle=Shuffle\(9\), .* to Feed.mix",
        ),
        ({"a": A, "b": Feed(counted, splits=[1], batch_size=4, samples=9)}, {}, "b sets samples=9"),
        ({"a": A, "b": Feed(counted, splits=[1], batch_size=8)}, {}, "b has batch_size=8: give Feed.mix a batch_size="),
        (AB, {"weights": {"a": 1}}, "weights= has none for b"),
        (AB, {"weights": {"a": 1, "b": 1, "c": 1}}, "weights= names c, and the feeds are a, b"),
        (AB, {"weights": {"a": 1, "b": 0}}, "the weight of b must be greater than 0, got 0: leave out a feed"),
        (AB, {"weights": {"a": 1, "b": -1}}, "the weight of b must be greater than 0"),
        (AB, {"weights": {"a": 1, "b": float("nan")}}, "the weight of b must be greater than 0, got nan"),
        (AB, {"weights": {"a": 1, "b": "2"}}, "the weight of b must be a number, got '2'"),
        (AB, {"weights": {"a": 1e12, "b": 1}}, "the weight of b is less than a billionth of all"),
        (AB, {"weights": [1, 2]}, "weights must be a dict"),
        (AB, {"stop": "last"}, "stop must be 'first' or 'all', got 'last'"),
        (AB, {"samples": 10}, "cannot be promised with stop='first'"),
        (AB, {"segment": 10}, "segment= belongs to the feeds"),
        (AB, {"cache": "/tmp/c"}, "cache= belongs to the feeds that Feed.mix combines: give it to those that need it"),
        (AB, {"rebatch": 8}, "rebatch= belongs to the feeds that Feed.mix combines: give it to those"),
        ({"a": S, "b": S}, {"epochs": 2}, "this mix has one endless epoch: give samples= to a feed with segment="),
        ({"a": A, "b": S}, {"epochs": 2, "stop": "all"}, "this mix has one endless epoch"),
        ({"a": A, "b": S}, {"samples": 20, "stop": "all"}, "cannot end this mix, which has no end: give samples="),
        (
            AB,
            {"shuffle": Shuffle(9, interleave=1000)},
            "opens 1000 splits of each of 2 feeds, and a lane may have 1024",
        ),
        (AB, {"shuffle": Shuffle(3, block=3)}, "is for indexable objects"),
    ],
)
def test_what_cannot_be_mixed_is_refused_when_the_feed_is_declared(feeds: Any, options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        Feed.mix(feeds, **options)


def test_a_mix_of_mixes_is_one_mix_with_the_weights_multiplied() -> None:
    inner = Feed.mix({"a": A, "s": S}, weights={"a": 3, "s": 1}, transform=double)
    deeper = Feed.mix({"m": inner, "a": Feed(counted, splits=[1], batch_size=4, transform=double)}, transform=double)
    mix = Feed.mix({"n": deeper, "s": S}, weights={"n": 4, "s": 1}, seed=3)
    assert isinstance(mix.generate, Mixed)
    assert mix.generate.weights == pytest.approx({"n/m/a": 0.3, "n/m/s": 0.1, "n/a": 0.4, "s": 0.2})
    transforms = [len(checked_transforms(part.transform)) for part in mix.generate.parts.values()]
    assert transforms == [2, 2, 2, 0]
    flat = Feed.mix(mix.generate.parts, weights={"n/m/a": 3, "n/m/s": 1, "n/a": 4, "s": 2}, seed=3)
    with penstock.connect(mix, workers=0) as one, penstock.connect(flat, workers=0) as other:
        assert digests(one.batches()) == digests(other.batches())


def double(sample: Any) -> Any:
    return 2 * sample


def test_a_mix_of_mixes_without_an_end_is_endless() -> None:
    endless_mix = Feed.mix({"a": S, "b": Feed.mix({"c": S, "d": S})})
    assert endless_mix.segment == 20, "of the rarest feed"
    counted_mix = Feed(endless, segment=5, samples=40, batch_size=4)
    mix = Feed.mix({"a": counted_mix, "b": Feed.mix({"c": counted_mix, "d": counted_mix}, stop="all")}, stop="all")
    assert (mix.segment, mix.samples) == (None, 120)


def test_a_mix_cannot_be_zipped() -> None:
    with pytest.raises(ValueError, match="part 1 is a mix, whose samples have no partners: zip the feeds first"):
        Feed.zip(A, M)


def test_weights_are_normalised_and_equal_by_default() -> None:
    assert Feed.mix(AB).generate.weights == {"a": 0.5, "b": 0.5}  # type: ignore[union-attr]
    feed = Feed.mix({"a": A, "b": S}, weights={"b": np.float64(1), "a": 3})
    assert feed.generate.weights == {"a": 0.75, "b": 0.25}  # type: ignore[union-attr]
    assert feed.batch_size == 4


def test_every_option_of_a_feed_is_dealt_with() -> None:
    """Options for making samples belong to a component, and a component refuses all others. Decide about each new
    option here."""
    own = {"generate", "method", "args", "kwargs", "transform", "splits", "segment", "batch_size", "name"}
    own_in_a_mix = {"cache", "rebatch"}
    combined = {
        "shuffle", "seed", "epochs", "samples", "drop_remainder", "lanes", "turn", "order", "spec", "batching",
        "on_error", "env", "fixed_length", "weights", "drops", "batch_transform",
    }  # fmt: skip
    assert {field.name for field in dataclasses.fields(Feed)} == own | own_in_a_mix | combined
    for option in combined | own_in_a_mix:
        feed = Feed(counted, splits=[1], batch_size=4)
        object.__setattr__(feed, option, "set")
        with pytest.raises(ValueError, match=f"b sets {option}='set'"):
            Feed.zip({"a": A, "b": feed})
        if option in combined:
            with pytest.raises(ValueError, match=f"b sets {option}='set'"):
                Feed.mix({"a": A, "b": feed})


@pytest.mark.parametrize(
    ("feeds", "shuffle", "open_of_each"), [(2, 200, 4), (2, 10**6, 8), (5, 10**6, 4), (256, 10**6, 4)]
)
def test_by_default_a_mix_opens_4_splits_of_each_feed_or_16_in_all(feeds: int, shuffle: int, open_of_each: int) -> None:
    mix = Feed.mix({str(number): A for number in range(feeds)}, shuffle=shuffle)
    assert mix.plan("mix").interleave == open_of_each


def test_the_log_says_nothing_of_the_splits_of_a_mix() -> None:
    plan = Feed.mix(AB, shuffle=100, batch_size=64).plan("mix")
    assert mixing_warning(plan, 100, pool=1) is None
    assert mixing_warning(structs.replace(plan, mixes=False), 100, pool=1) is not None


def test_a_cache_that_cannot_tell_splits_apart_is_refused_and_its_feed_is_named(tmp_path: Path) -> None:
    b = Feed(guarded, args=(threading.Lock(),), splits=[1], batch_size=4, cache=tmp_path)
    with pytest.raises(TypeError, match="b: cache= cannot tell the samples of guarded from others, since args="):
        Feed.mix({"a": A, "b": b}).plan("mix")
