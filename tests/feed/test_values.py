"""The options of a feed that mean something only together are values, which are checked when they are made."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Cache, Feed, FixedLen, OnError, Pad, Shuffle
from penstock_server.feed.options.short_repr import short_repr


def scenes(path: str) -> Iterator[int]:
    yield 1


def shifted(sample: int) -> int:
    return sample + 1


def feed_of(**options: Any) -> Feed:
    return Feed(scenes, **{"splits": ["a"], "batch_size": 32, **options})


# --- plain spellings, and what is kept ---


@pytest.mark.parametrize(
    ("plain", "value"),
    [
        ({"shuffle": 100}, {"shuffle": Shuffle(100)}),
        ({}, {"shuffle": Shuffle(0), "batching": "stack", "on_error": OnError("raise"), "cache": None}),
        ({"batching": "pad"}, {"batching": Pad()}),
        ({"on_error": "skip"}, {"on_error": OnError("skip", crashes=3)}),
        ({"cache": Path("store")}, {"cache": Cache("store")}),
    ],
)
def test_a_plain_spelling_is_short_for_a_value(plain: dict[str, Any], value: dict[str, Any]) -> None:
    first, second = feed_of(**plain), feed_of(**value)
    for option, kept in value.items():
        assert getattr(first, option) == getattr(second, option) == kept
    assert first.plan("train") == second.plan("train")


def test_a_plan_has_what_the_values_say() -> None:
    plan = feed_of(
        shuffle=Shuffle(640, interleave=7),
        batching=Pad(value=-1, buckets=[8, 16], too_long="cut"),
        on_error=OnError("retry", crashes=9),
    ).plan("train")
    assert (plan.shuffle, plan.interleave, plan.block) == (640, 7, None)
    assert (plan.batching, plan.buckets) == ("pad", (8, 16))
    assert (plan.on_error, plan.attempts) == ("retry", 9)
    assert Feed([1, 2, 3], batch_size=1, shuffle=Shuffle(2, block=5)).plan("train").block == 5


def test_feeds_with_values_can_be_replaced_and_pickled() -> None:
    feed = feed_of(shuffle=Shuffle(100, interleave=3), batching=Pad(buckets=[4]), cache="store", on_error="skip")
    again = pickle.loads(pickle.dumps(dataclasses.replace(feed, seed=5)))
    assert again.seed == 5
    for option in ("shuffle", "batching", "cache", "on_error"):
        assert getattr(again, option) == getattr(feed, option)
    assert dataclasses.replace(feed, shuffle=7).shuffle == Shuffle(7)
    assert Shuffle(7) != Shuffle(7, interleave=2)
    assert len({Shuffle(7), Shuffle(7), Pad(buckets=[4]), Pad(buckets=(4,)), Cache("a"), OnError("skip")}) == 4


def test_values_that_files_are_read_with_reach_the_reader_and_the_feed() -> None:
    features = {"x": FixedLen((), "int64")}
    feed = Feed.from_tfrecord("a.tfrecord", features, batch_size=4, on_error=OnError("skip", crashes=5))
    assert feed.on_error == OnError("skip", crashes=5)
    plain = Feed.from_tfrecord("a.tfrecord", features, batch_size=4, on_error="skip")
    assert vars(feed.generate) == vars(plain.generate)
    same = Feed.from_files("a.tfrecord", features, batch_size=4, on_error=OnError("skip"))
    assert vars(same.generate) == vars(plain.generate)


# --- how they are shown ---


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Shuffle(10_000, interleave=16), "Shuffle(10000, interleave=16)"),
        (Shuffle(8, block=4), "Shuffle(8, block=4)"),
        (Pad(), "Pad()"),
        (Pad(value=-1, buckets=[4, 8], too_long="cut"), "Pad(value=-1, buckets=(4, 8), too_long='cut')"),
        (Pad(value={"x": np.zeros(2)}), "Pad(value={'x': float64 array of shape (2,)})"),
        (Cache(Path("/scratch/cache"), version="b"), "Cache('/scratch/cache', version='b')"),
        (OnError("skip", crashes=5), "OnError('skip', crashes=5)"),
        (OnError("raise"), "OnError('raise')"),
    ],
)
def test_a_value_is_shown_as_it_is_written_without_defaults(value: Any, text: str) -> None:
    assert repr(value) == text == short_repr(value)


def test_a_feed_is_shown_as_it_is_written_without_defaults() -> None:
    feed = Feed(scenes, batch_size=32, splits=["a"], shuffle=Shuffle(10_000, interleave=16))
    assert repr(feed) == "Feed(scenes, splits=['a'], batch_size=32, shuffle=Shuffle(10000, interleave=16))"
    assert repr(Feed([1, 2], batch_size=None, transform=[shifted, abs])) == (
        "Feed([1, 2], transform=[shifted, abs], batch_size=None)"
    )
    large = Feed(scenes, splits=list(range(10**4)), batch_size=1, args=(), kwargs={}, env={"A": "b"})
    assert len(repr(large)) < 300
    assert "env={'A': 'b'}" in repr(large)
    assert repr(Feed.mix({"a": feed_of(), "b": feed_of()}, seed=3)) == "Feed(Feed.mix, batch_size=32, seed=3)"


# --- values that cannot work ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shuffle(True), "shuffle must be a whole number, got True"),
        (lambda: Shuffle(-1), "shuffle must be 0 to .* got -1"),
        (lambda: Shuffle(0, interleave=4), r"give the number of samples to mix, such as Shuffle\(10_000, interleave=4"),
        (lambda: Shuffle(9, interleave=0), "interleave must be 1 to 1024 or None, got 0"),
        (lambda: Shuffle(9, interleave=1025), "interleave must be 1 to 1024 or None, got 1025"),
        (lambda: Shuffle(0, block=10), r"Shuffle\(0, block=10\) keeps .* Shuffle\(1, block=10\) permutes blocks"),
        (lambda: Shuffle(1, block=0), "block must be 1 to .* got 0"),
        (lambda: Pad(buckets=5), r"buckets must be a list of lengths, such as \(64, 128\), got 5"),  # type: ignore[arg-type]
        (lambda: Pad(buckets=[]), "buckets must be 1 to 256 lengths, got 0"),
        (lambda: Pad(buckets=[4, 2]), r"buckets must be in ascending order, got \[4, 2\]"),
        (lambda: Pad(buckets=[4, 4]), "buckets must be in ascending order"),
        (lambda: Pad(buckets=[1.5]), "each of buckets must be a whole number, got 1.5"),  # type: ignore[list-item]
        (lambda: Pad(too_long="cut"), "too_long='cut' needs buckets="),
        (lambda: Pad(buckets=[4], too_long="short"), "too_long must be 'raise', 'drop' or 'cut', got 'short'"),
        (lambda: Cache(3), "cache must be the path of a directory, .* got 3"),  # type: ignore[arg-type]
        (lambda: Cache(""), "cache must be the path of a directory"),
        (lambda: Cache("s3://bucket/cache"), "cache must be a directory that this host has mounted"),
        (lambda: Cache("a", version=2.5), "version of a cache must be a whole number or a text, got 2.5"),  # type: ignore[arg-type]
        (lambda: Cache("a", version=True), "version of a cache must be a whole number or a text, got True"),
        (lambda: OnError("ignore"), "on_error must be 'raise', 'skip' or 'retry', got 'ignore'"),
        (lambda: OnError("skip", crashes=0), "crashes must be 1 to 1000, got 0"),
        (lambda: OnError("skip", crashes=None), "crashes must be a whole number, got None"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_cannot_work_is_refused_where_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# --- old spellings ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"shuffle": 10_000, "interleave": 16},
            "interleave=16 is now part of shuffle: write shuffle=Shuffle(10000, interleave=16)",
        ),
        ({"interleave": 16}, "interleave=16 is now part of shuffle: write shuffle=Shuffle(SAMPLES, interleave=16)"),
        ({"shuffle": 8, "block": 4}, "block=4 is now part of shuffle: write shuffle=Shuffle(8, block=4)"),
        (
            {"batching": "pad", "pad_value": -1},
            "pad_value=-1 is now part of batching: write batching=Pad(value=-1)",
        ),
        ({"buckets": [64, 128]}, "buckets=[64, 128] is now part of batching: write batching=Pad(buckets=[64, 128])"),
        (
            {"batching": "pad", "buckets": [64], "too_long": "cut"},
            "buckets=[64], too_long='cut' are now part of batching: write batching=Pad(buckets=[64], too_long='cut')",
        ),
        (
            {"cache": "store", "cache_version": 2},
            "cache_version=2 is now part of cache: write cache=Cache('store', version=2)",
        ),
        ({"cache_version": 2}, "cache_version=2 is now part of cache: write cache=Cache(DIRECTORY, version=2)"),
        ({"attempts": 5}, "attempts=5 is now part of on_error: write on_error=OnError('raise', crashes=5)"),
        (
            {"on_error": "skip", "attempts": 5},
            "attempts=5 is now part of on_error: write on_error=OnError('skip', crashes=5)",
        ),
        (
            {"shuffle": Shuffle(8, block=4), "interleave": 2, "attempts": 5},
            "interleave=2 is now part of shuffle: write shuffle=Shuffle(8, block=4, interleave=2). attempts=5 is now "
            "part of on_error: write on_error=OnError('raise', crashes=5)",
        ),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        feed_of(**options)
    assert str(raised.value) == message


MAKERS: dict[str, Callable[..., Feed]] = {
    "zip": lambda **options: Feed.zip(feed_of(), feed_of(), **options),
    "mix": lambda **options: Feed.mix({"a": feed_of(), "b": feed_of()}, **options),
    "from_parquet": lambda **options: Feed.from_parquet("a.parquet", batch_size=4, **options),
    "from_files": lambda **options: Feed.from_files("a.parquet", batch_size=4, **options),
    "replace": lambda **options: dataclasses.replace(feed_of(shuffle=100), **options),
}


@pytest.mark.parametrize("way", MAKERS)
def test_whatever_makes_a_feed_refuses_old_spellings(way: str) -> None:
    for option in ("interleave", "block", "pad_value", "buckets", "too_long", "cache_version", "attempts"):
        with pytest.raises(TypeError, match=f"^{option}=7 is now part of"):
            MAKERS[way](**{option: 7})
