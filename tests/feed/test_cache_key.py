"""Keys of cached splits: equal values have equal keys in every process, and different values have different keys."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Cache, Feed, FixedLen, OnError, Shuffle
from penstock_server.feed.options.cache_key import NoKey, digest
from penstock_server.worker.cache.split_cache import SplitCache


@dataclasses.dataclass
class Point:
    x: int
    y: Any = None


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Reader:
    def __init__(self, size: int) -> None:
        self.size = size

    def rows(self, split: Any) -> Iterator[Any]:
        yield split

    def __call__(self, split: Any) -> Iterator[Any]:
        yield split


def rows(split: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield split


def others(split: Any) -> Iterator[Any]:
    yield split


def times(number: int) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def inner(split: Any) -> Iterator[Any]:
            for sample in function(split):
                yield number * sample

        return inner

    return decorate


@times(3)
def decorated(split: Any) -> Iterator[Any]:
    yield split


def reader_of(size: int) -> Any:
    class Local:
        def rows(self, split: Any) -> Iterator[Any]:
            yield size

        @functools.cached_property
        def cached(self) -> int:
            return size

    return Local


def made(size: int) -> Callable[[Any], Iterator[Any]]:
    def local(split: Any) -> Iterator[Any]:
        yield size

    return local


def chosen(first: bool) -> Any:
    if first:

        def local(split: Any) -> Iterator[Any]:
            yield 1

    else:

        def local(split: Any) -> Iterator[Any]:
            yield 2

    return local


def class_chosen(first: bool) -> Any:
    if first:

        class Local:
            def rows(self, split: Any) -> Iterator[Any]:
                yield from [split, 1]

    else:

        class Local:  # type: ignore[no-redef]
            def rows(self, split: Any) -> Iterator[Any]:
                yield from [split, 2]

    return Local


VALUES: list[Callable[[], Any]] = [
    lambda: None,
    lambda: True,
    lambda: 1,
    lambda: 1.0,
    lambda: -0.0,
    lambda: 0.0,
    lambda: float("nan"),
    lambda: 2**100,
    lambda: "1",
    lambda: b"1",
    lambda: bytearray(b"1"),
    lambda: "\ud800",
    lambda: (1, (2, 3)),
    lambda: ((1, 2), 3),
    lambda: [1, 2, 3],
    lambda: (1, 2, 3),
    lambda: {"a": 1, "b": [2]},
    lambda: {"a": 1, "b": (2,)},
    lambda: {"b": [2], "a": 1},
    lambda: {1, 2, "three"},
    lambda: frozenset({1, 2, "three"}),
    lambda: Path("a/b"),
    lambda: "a/b",
    lambda: np.arange(3),
    lambda: np.arange(3.0),
    lambda: np.arange(3)[None],
    lambda: np.array(["a", None], object),
    lambda: np.zeros(2, [("a", "i4")]),
    lambda: np.zeros(2, [("b", "i4")]),
    lambda: np.int64(3),
    lambda: np.int32(3),
    lambda: np.dtype("f4"),
    lambda: np.random.default_rng(3),
    lambda: np.random.default_rng(4),
    lambda: Point(1),
    lambda: Point(2),
    lambda: Point(1, [Point(2)]),
    lambda: Color.RED,
    lambda: Color.BLUE,
    lambda: Reader(1),
    lambda: Reader(2),
    lambda: Reader(1).rows,
    lambda: Reader,
    lambda: rows,
    lambda: others,
    lambda: made(1),
    lambda: made(2),
    lambda: chosen(True),
    lambda: chosen(False),
    lambda: class_chosen(True),
    lambda: class_chosen(False),
    lambda: lambda x: x + 1,
    lambda: lambda x: x + 2,
    lambda: functools.partial(rows, size=1),
    lambda: functools.partial(rows, size=2),
    lambda: collections.OrderedDict(a=1),
    lambda: collections.deque([1, 2]),
    lambda: range(3),
    lambda: slice(1, 2),
    lambda: len,
    lambda: os.path.join,
    lambda: os,
]


def test_each_value_has_a_digest_of_its_own() -> None:
    found = collections.defaultdict(list)
    for number, make in enumerate(VALUES):
        found[digest(make())].append(number)
    assert [numbers for numbers in found.values() if len(numbers) > 1] == []


def test_equal_values_have_equal_digests() -> None:
    for number, make in enumerate(VALUES):
        assert digest(make()) == digest(make()), number


def test_it_does_not_matter_which_parts_are_one_object() -> None:
    text = "".join(["long", "text"])
    again = "".join(["long", "text"])
    assert digest([text, text, (1.5, 1.5)]) == digest([text, again, (1.5, float("1.5"))])


def test_an_object_within_itself_has_a_digest() -> None:
    one: list[Any] = [1]
    one.append(one)
    other: list[Any] = [1]
    other.append(other)
    assert digest(one) == digest(other) != digest([1, [1]])


def test_another_process_finds_the_same_digests() -> None:
    code = "from tests.feed import test_cache_key as t; print(b''.join(t.digest(make()) for make in t.VALUES).hex())"
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]
    assert found[0].strip() == b"".join(digest(make()) for make in VALUES).hex()


def directory(source: Any = rows, **options: Any) -> str | None:
    options = {"splits": [1, 2], "batch_size": 4, "cache": "store", **options}
    return Feed(source, **options).plan("feed").cache


def test_a_feed_with_other_options_has_the_same_splits(tmp_path: Path) -> None:
    same = [
        directory(),
        directory(
            batch_size=8, shuffle=Shuffle(100, interleave=2), lanes=3, seed=9, turn=2, order="fast", name="other"
        ),
        directory(transform=lambda sample: sample, samples=300, drop_remainder=True, batching="pad"),
        directory(splits=[3], on_error=OnError("retry", crashes=7), env={"A": "1"}, epochs=2),
        directory(cache=Path("store")),
        directory(cache=Cache(Path("store"), version=0)),
        directory(cache=os.path.abspath("store")),
    ]
    assert len(set(same)) == 1
    assert os.path.basename(same[0] or "").startswith("rows-")


def test_another_generator_has_splits_of_its_own() -> None:
    different = [
        directory(),
        directory(others),
        directory(cache="elsewhere"),
        directory(cache=Cache("store", version=1)),
        directory(cache=Cache("store", version="1")),
        directory(args=(1,)),
        directory(args=(2,)),
        directory(kwargs={"a": 1}),
        directory(Reader, method="rows", args=(1,)),
        directory(Reader, method="rows", args=(2,)),
        directory(Reader(1)),
        directory(Reader(2)),
        directory(made(1)),
        directory(made(2)),
        directory(lambda split: iter([split])),
        directory(times(1)(rows)),
        directory(times(2)(rows)),
        directory(times(2)(others)),
        directory(times(2)(times(2)(others))),
        directory(reader_of(1), method="rows"),
        directory(reader_of(2), method="rows"),
    ]
    assert len(set(different)) == len(different)


def test_a_function_that_is_found_by_its_name_is_known_by_it_alone() -> None:
    """So a decorator may hold what cannot be pickled, and the keys are those of earlier releases."""
    alike = functools.wraps(decorated)(lambda split: split)
    assert digest(decorated) == digest_of_name("decorated")
    assert digest(alike) != digest(decorated)
    assert digest(reader_of(1)) == digest(reader_of(1))


def digest_of_name(name: str) -> bytes:
    text = f"{__name__}.{name}".encode()
    return hashlib.sha256(f"function {len(text)}\n".encode() + text).digest()


def test_the_order_of_keyword_arguments_does_not_matter() -> None:
    assert directory(kwargs={"a": 1, "b": 2}) == directory(kwargs={"b": 2, "a": 1})


def test_readers_of_files_are_known_by_what_they_read_of_a_file() -> None:
    def of(feed: Feed) -> str | None:
        return feed.plan("feed").cache

    options: dict[str, Any] = {"batch_size": 4, "cache": "store"}
    found = [
        of(Feed.from_hdf5("a.h5", {"x": "images"}, **options)),
        of(Feed.from_hdf5("a.h5", {"x": "labels"}, **options)),
        of(Feed.from_hdf5("a.h5", ("images",), **options)),
        of(Feed.from_parquet("a.parquet", **options)),
        of(Feed.from_parquet("a.parquet", ("x",), **options)),
        of(Feed.from_numpy("a.npz", **options)),
        of(Feed.from_webdataset("a.tar", {"x": "npy"}, **options)),
        of(Feed.from_webdataset("a.tar", {"x": "npy"}, decode={"npy": len}, **options)),
        of(Feed.from_tfrecord("a.tfrecord", {"x": FixedLen((), "int64")}, **options)),
        of(Feed.from_tfrecord("a.tfrecord", {"x": FixedLen((), "int64", default=1)}, **options)),
    ]
    assert len(set(found)) == len(found)
    assert of(Feed.from_hdf5(["a.h5", "b.h5"], {"x": "images"}, **options)) == found[0]


def test_what_cannot_be_pickled_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"since args= cannot be pickled \(lock: cannot pickle '_thread.lock' object\)"):
        directory(args=(threading.Lock(),))
    with pytest.raises(NoKey, match="generator"):
        digest([iter([1]), (i for i in range(3))])


def test_splits_have_keys_of_their_own() -> None:
    cache = SplitCache("/store/rows-1")
    keys = {cache.key_of(split).digest for split in ("a", "b", ("a",), 0, None, {"file": "a", "rows": (0, 3)})}
    assert len(keys) == 6
    assert SplitCache("/store/rows-2").key_of("a").digest not in keys
    assert SplitCache("/elsewhere/rows-1").key_of("a").digest in keys
    assert SplitCache("/store/rows-1", lambda split: 5).key_of("a").digest not in keys


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": 3}, "cache must be the path of a directory"),
        ({"cache": ""}, "cache must be the path of a directory"),
        ({"cache": b"store"}, "cache must be the path of a directory"),
        ({"cache": "s3://bucket/cache"}, "cache must be a directory that this host has mounted"),
        ({"splits": None, "segment": 10, "source": lambda: iter([1])}, "leave one of the two out"),
        ({"source": lambda split, rng: iter([1])}, "must not take rng: move what differs between epochs"),
        ({"source": lambda split, epoch: iter([1])}, "must not take epoch: move what differs between epochs"),
        ({"source": [1, 2, 3], "splits": None}, "read ranges of it in a generator with splits="),
    ],
)
def test_a_cache_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        directory(options.pop("source", rows), **options)
