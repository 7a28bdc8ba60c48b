"""`Feed.zip`: samples of several feeds side by side, in one stream that keeps every promise."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock_server import Feed
from penstock_server.to_daemon import control
from tests.conftest import Join, Serve
from tests.reference.every_way import read_every_way

FEEDS = """
    import random

    import numpy as np
    from penstock_server import Feed

    SIZES = [7, 0, 31, 1, 16, 20, 5, 12]

    def images(split):
        for i in range(SIZES[split]):
            yield {"id": 100 * split + i, "noise": np.random.normal(size=3)}

    def labels(split, rng):
        for i in range(SIZES[split]):
            yield 100 * split + i, rng.random()

    def draws(split):
        for i in range(SIZES[split]):
            yield random.random()

    def by_segment(segment, rng):
        while True:
            yield {"id": segment, "noise": rng.normal(size=3)}

    def blindly():
        while True:
            yield random.random()

    def by_shard(shard):
        for i in range(shard[0], 90, shard[1]):
            yield i

    def whole(rng):
        level = 0.0
        for i in range(93):
            level += rng.normal()
            yield {"id": i, "level": level}

    class Walk:
        def __init__(self, start):
            self.start, self.level = start, random.random()
        def rows(self):
            for i in range(SIZES[self.start]):
                yield np.full(3, self.level)

    class Several:
        def __len__(self):
            return 101
        def __getitem__(self, i):
            return self.__getitems__([i])[0]
        def __getitems__(self, indices):
            return [(i, np.random.random()) for i in indices]

    def ready(split, rng):
        for i in range(SIZES[split]):
            yield np.full((1 + i % 4, 2), 100 * split + i) + rng.random()

    def words(split):
        for i in range(SIZES[split]):
            yield np.arange(i % 5)

    def drawn(sample, rng):
        return sample, rng.random()

    def drawn_globally(sample):
        return sample, random.random()

    def total(sample):
        (one, other), third = sample["left"], sample["right"]
        return {"one": one, "other": other, "third": third}

    S, B = range(8), {"batch_size": 8}
    image, label = Feed(images, splits=S, **B), Feed(labels, splits=lambda: S, **B)
    plain = Feed.zip(image, label, lanes=3, turn=1, seed=3)
    shuffled = Feed.zip({"image": image, "label": label, "draw": Feed(draws, splits=S, **B)}, shuffle=50, lanes=3)
    transformed = Feed.zip(
        Feed(images, transform=drawn, splits=S, **B),
        Feed(draws, transform=[drawn_globally, drawn], splits=S, **B),
        transform=drawn, lanes=3, turn=2,
    )
    nested = Feed.zip({"left": Feed.zip(image, label), "right": Feed(draws, splits=S, **B)}, transform=total, lanes=3)
    segments = Feed.zip(Feed(by_segment, segment=9, **B), Feed(blindly, segment=9, **B), lanes=3, samples=120)
    endless = Feed.zip(Feed(by_segment, segment=9, **B), Feed(blindly, segment=9, **B), lanes=3, shuffle=30)
    shards = Feed.zip(Feed(by_shard, **B), Feed(by_shard, transform=lambda x: -x, **B), lanes=4, turn=1)
    undivided = Feed.zip(Feed(whole, transform=drawn, **B), Feed(whole, **B), lanes=3, turn=2)
    classes = Feed.zip(Feed(Walk, method="rows", splits=S, **B), image, lanes=3, shuffle=40)
    items = Feed.zip(
        {"a": Feed(Several(), transform=drawn_globally, **B), "b": Feed(list(range(101)), transform=drawn, **B)},
        shuffle=1, turn=1,
    )
    batches = Feed.zip(Feed(ready, splits=S, batch_size=None), Feed(ready, splits=S, batch_size=None), lanes=3)
    padded = Feed.zip(image, Feed(words, splits=S, **B), batching="pad", lanes=3, shuffle=30)
"""
NAMES = re.findall(r"^    (\w+) = Feed\.zip\(", FEEDS, re.MULTILINE)
ALL = [100 * split + i for split, n in enumerate([7, 0, 31, 1, 16, 20, 5, 12]) for i in range(n)]


def test_a_zipped_stream_is_the_same_with_any_workers_through_kills_and_from_a_state(serve: Serve, join: Join) -> None:
    streams = read_every_way(serve, join, FEEDS, NAMES)
    for image, (label, _) in streams["plain"]:
        assert image["id"].tolist() == label.tolist()
    assert sorted(i for image, _ in streams["plain"] for i in image["id"].tolist()) == sorted(ALL * 2)
    for batch in streams["shuffled"]:
        assert batch["image"]["id"].tolist() == batch["label"][0].tolist()
    order = [i for batch in streams["shuffled"] for i in batch["image"]["id"].tolist()]
    assert sorted(order) == sorted(ALL * 2)
    assert order[: len(ALL)] != order[len(ALL) :]
    for one, other in streams["shards"]:
        assert one.tolist() == (-other).tolist()
    ids = [i for (one, _), _ in streams["undivided"] for i in one["id"].tolist()]
    assert ids == [*range(93)] * 2
    for batch in streams["items"]:
        assert batch["a"][0][0].tolist() == batch["b"][0].tolist()
    assert sum(len(draw) for _, draw in streams["segments"]) == 240


def test_each_part_has_random_numbers_of_its_own(serve: Serve) -> None:
    daemon = serve(FEEDS, "transformed", "undivided")
    with penstock.connect(daemon.urls["transformed"]) as connection:
        columns: list[list[float]] = [[], [], [], [], []]
        for ((image, of_image), ((draw, first), second)), of_pair in connection.batches():
            for column, values in zip(columns, (of_image, draw, first, second, of_pair), strict=True):
                column += values.tolist()
            columns[0] += image["noise"].ravel().tolist()
    values = list(itertools.chain(*columns))
    assert len(set(values)) == len(values) == len(ALL) * 8
    with penstock.connect(daemon.urls["undivided"]) as connection:
        (one, _), other = next(connection.batches())
        assert not set(one["level"]) & set(other["level"])


# --- what is uneven ---

UNEVEN = """
    import itertools
    from penstock_server import Feed

    def counted(split):
        yield from range(split)

    def forever(split):
        yield from itertools.count()

    def feed(left, right, **options):
        return Feed.zip(
            Feed(counted, splits=left, batch_size=4),
            Feed(counted, splits=lambda: right, batch_size=4),
            epochs=1,
            **options,
        )

    aligned = feed([3, 5, 0], [3, 5, 0])
    first_shorter = feed([3, 5], [3, 9])
    second_shorter = feed([3, 5], [3, 2])
    fewer = feed([3, 5, 7], [3, 5])
    allowed = feed([3, 5, 7], [3, 9], uneven="allow")
    strict = feed([3, 5], [3, 9], uneven="raise")
    strict_lists = feed([3, 5, 7], [3, 5], uneven="raise")
    skips = feed([3, 5, 4], [3, 9, 4], uneven="raise", on_error="skip")
    endless = Feed.zip(
        {"count": Feed(counted, splits=[3, 5], batch_size=4), "noise": Feed(forever, splits=[1, 2], batch_size=4)},
        uneven="allow",
    )
"""


def read(daemon: Any, name: str) -> list[int]:
    with penstock.connect(daemon.urls[name]) as connection:
        return [i for batch in connection.batches() for i in (batch if type(batch) is tuple else (batch["count"],))[0]]


def test_a_zip_ends_with_the_shortest_and_says_what_it_leaves_out(serve: Serve) -> None:
    names = ["aligned", "first_shorter", "second_shorter", "fewer", "allowed", "skips", "endless"]
    daemon = serve(UNEVEN, *names)
    assert {name: sorted(read(daemon, name)) for name in names} == {
        "aligned": [0, 0, 1, 1, 2, 2, 3, 4],
        "first_shorter": [0, 0, 1, 1, 2, 2, 3, 4],
        "second_shorter": [0, 0, 1, 1, 2],
        "fewer": [0, 0, 1, 1, 2, 2, 3, 4],
        "allowed": [0, 0, 1, 1, 2, 2, 3, 4],
        "skips": [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4],
        "endless": [0, 0, 1, 1, 2, 2, 3, 4],
    }
    log = daemon.stderr()
    left_out = {
        "first_shorter": "split (5, 9) is left out after 5 samples: part 0 has 5 samples there, and part 1 has more",
        "second_shorter": "split (5, 2) is left out after 2 samples: part 1 has 2 samples there, and part 0 has more",
        "skips": "split (5, 9) is left out after 5 samples: part 0 has 5 samples there, and part 1 has more",
    }
    for name, text in left_out.items():
        assert log.count(f"feed {name}: the rest of {text}") == 1, log
    assert log.count("is left out after") == 3
    assert "feed fewer: the parts of Feed.zip have different numbers of splits: part 0 has 3, part 1 has 2" in log
    assert log.count("different numbers") == 1
    status = control.status(daemon.urls["fewer"], 60)
    assert {feed.name: feed.skipped_count for feed in status.feeds}["first_shorter"] == 1


def test_uneven_raise_makes_it_an_error(serve: Serve) -> None:
    daemon = serve(UNEVEN, "strict")
    with pytest.raises(penstock.GeneratorError, match=r"part 0 has 5 samples there, and part 1 has more") as caught:
        read(daemon, "strict")
    assert caught.value.split == "(5, 9)"
    daemon = serve(UNEVEN, "strict_lists", ready=False)
    assert daemon.process.wait(60) == 1
    assert "different numbers of splits (part 0 has 3, part 1 has 2), and it has uneven='raise'" in daemon.stderr()


def counted(split: int) -> Iterator[int]:
    yield from range(split)


def test_lengths_that_are_known_are_compared_when_the_feed_is_declared() -> None:
    parts = Feed(counted, splits=[1, 2], batch_size=4), Feed(counted, splits=[1], batch_size=4)
    with pytest.raises(ValueError, match=r"numbers of splits \(part 0 has 2, part 1 has 1\), and it has uneven="):
        Feed.zip(*parts, uneven="raise")
    (warning,) = [text for text in Feed.zip(*parts).plan("pairs").warnings if "zip" in text]
    assert warning.startswith("feed pairs: the parts of Feed.zip have different numbers of splits")
    assert Feed.zip(*parts, uneven="allow").plan("pairs").warnings == ()
    items = Feed([1, 2, 3], batch_size=4), Feed([1, 2], batch_size=4)
    assert "different numbers of samples: part 0 has 3, part 1 has 2" in Feed.zip(*items).plan("pairs").warnings[0]
    assert Feed.zip(*items).plan("pairs").length == 2


# --- errors ---

FAULTY = """
    from penstock_server import Feed

    def good(split):
        yield from range(9)

    def bad(split):
        yield 1
        raise OSError("the disk is away")

    def at_once(split):
        raise OSError("no such file")

    def breaks(sample):
        raise ValueError("no")

    G = Feed(good, splits=[0], batch_size=2)
    generator = Feed.zip({"image": G, "label": Feed(bad, splits=[0], batch_size=2)})
    opening = Feed.zip({"image": G, "label": Feed(at_once, splits=[0], batch_size=2)})
    inner = Feed.zip({"image": G, "label": Feed.zip(G, Feed(bad, splits=[0], batch_size=2))})
    transform = Feed.zip({"image": G, "label": Feed(good, transform=breaks, splits=[0], batch_size=2)})
    empty = Feed.zip({"image": G, "label": Feed(good, splits=lambda: [], batch_size=2)})
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("generator", "bad of label raised OSError: the disk is away\n  in feed generator, split (0, 0)"),
        ("opening", "at_once of label raised OSError: no such file\n  in feed opening, split (0, 0)"),
        ("inner", "bad of part 1 of label raised OSError: the disk is away"),
        ("transform", "transform breaks of label raised ValueError: no (sample 0 of its split, from 0)"),
        ("empty", "Feed.zip, which lists the splits, raised ValueError: label has no splits to read"),
    ],
)
def test_an_error_names_the_part(name: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / f"faulty_{name}.py"
    file.write_text("\n".join(line.removeprefix("    ") for line in FAULTY.splitlines()))
    with (
        pytest.raises(penstock.PenstockError, match=re.escape(text)),
        penstock.connect(f"{file}:{name}", workers=0) as connection,
    ):
        list(connection.batches())


class Table:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> int:
        return i


def endless(segment: int) -> Iterator[int]:
    yield from itertools.count()


A = Feed(counted, splits=[1, 2], batch_size=4)
ITEMS = Feed(Table(), batch_size=4)  # type: ignore[arg-type]
S = Feed(endless, segment=5, batch_size=4)
B = Feed(counted, splits=[1, 2], batch_size=None)
ITEMS_ALONE = Feed(Table(), batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("feeds", "options", "text"),
    [
        ((A,), {}, "needs two feeds or more, got 1"),
        (([A, A],), {}, r"got a list: write Feed.zip\(\*feeds\)"),
        ((A, counted), {}, "Feed.zip combines feeds, and part 1 is <function counted"),
        (({"a": A, "b": 3},), {}, "b is 3: give Feed"),
        (({1: A, 2: A},), {}, r"so they are text, got \[1, 2\]"),
        (
            (A, ITEMS),
            {},
            "and part 1 is an object that can be indexed: give the object as a generator",
        ),
        ((A, S), {}, r"part 0 has splits=, and part 1 has segments \(segment=\): give each of them splits="),
        ((S, Feed(endless, segment=6, batch_size=4)), {}, "part 0 has segment=5, part 1 has segment=6: .* the same"),
        ((A, Feed(counted, splits=[1], batch_size=8)), {}, "part 0 has batch_size=4, part 1 has batch_size=8: give"),
        ((A, B), {}, "part 1 has batch_size=None: with None a feed yields whole batches"),
        ((A, A), {"batch_size": None}, "give batch_size=None to all of them and to Feed.zip, or to none"),
        (
            (A, Feed(counted, splits=[1], batch_size=4, shuffle=9)),
            {},
            r"part 1 sets shuffle=Shuffle\(9\), .* it to Feed.zip",
        ),
        ((A, Feed(counted, splits=[1], batch_size=4, seed=9)), {}, "part 1 sets seed=9"),
        ((A, Feed(counted, splits=[1], batch_size=4, env={"A": "b"})), {}, "part 1 sets env="),
        ((A, A), {"splits": [1]}, "splits= belongs to the feeds that Feed.zip combines"),
        ((A, A), {"uneven": "no"}, "uneven must be 'warn', 'raise' or 'allow', got 'no'"),
        ((A, Feed(counted, splits=[1], batch_size=4, cache="/tmp/c")), {}, "part 1 sets cache=.* Feed.zip cannot use"),
        (
            (A, A),
            {"cache": "/tmp/c"},
            "cache= is given, which Feed.zip cannot use, as it keeps no splits: leave it out",
        ),
        (
            (B, Feed(counted, splits=[1], batch_size=None, rebatch=8)),
            {},
            "part 1 sets rebatch=8.* rebatch= to Feed.zip",
        ),
        ((A, A), {"rebatch": 8}, "rebatch=8 takes whole batches apart, and the feeds yield samples: give batch_size="),
        ((ITEMS_ALONE, ITEMS_ALONE), {"rebatch": 8}, "rebatch= is for generators"),
        ((A, A), {"shuffel": 3}, "no option shuffel=: did you mean shuffle=?"),
    ],
)
def test_what_cannot_be_zipped_is_refused_when_the_feed_is_declared(feeds: Any, options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        Feed.zip(*feeds, **options)


def test_the_batch_size_is_that_of_the_parts_unless_it_is_given() -> None:
    assert Feed.zip(A, A).batch_size == 4
    assert Feed.zip(A, Feed(counted, splits=[1], batch_size=8), batch_size=16).batch_size == 16
    assert Feed.zip(B, B).batch_size is None


BATCHES = """
    import numpy as np
    from penstock_server import Feed

    def images(split):
        for i in range(3):
            yield {"z": np.arange(5) + 5 * i + 100 * split, "b": np.ones((5, 2))}

    def labels(split):
        for i in range(3):
            yield np.arange(5) + 5 * i + 100 * split

    def shifted(row):
        return {**row, "z": row["z"] + 1000}

    image = Feed(images, splits=[1, 2], batch_size=None, transform=shifted)
    label = Feed(labels, splits=[1, 2], batch_size=None)
    pairs = Feed.zip({"label": label, "image": image}, rebatch=4, lanes=1)
"""


def test_zipped_batches_are_taken_apart_into_pairs_of_rows(tmp_path: Path) -> None:
    (tmp_path / "zip_of_batches.py").write_text(textwrap.dedent(BATCHES))
    with penstock.connect(f"{tmp_path / 'zip_of_batches.py'}:pairs", workers=0) as connection:
        batches: list[Any] = list(connection.batches())
    assert [len(batch["label"]) for batch in batches] == [4] * 7 + [2]
    labels = [int(label) for batch in batches for label in batch["label"]]
    assert labels == [*range(100, 115), *range(200, 215)]
    assert [int(z) for batch in batches for z in batch["image"]["z"]] == [label + 1000 for label in labels]
