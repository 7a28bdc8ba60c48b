"""The feeds of tests/test_stream_hashes.py. Add feeds, but never change one: that would change its stream.

They draw the raw output of random generators, which NumPy and Python keep the same from version to version.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from penstock_server import DictSpec, Feed, Leaf, Pad, Shuffle, TupleSpec

SIZES = [7, 0, 31, 1, 16, 64, 5, 12, 3, 40, 2, 9]
"""The samples of each split: uneven, one split is empty. 190 in total."""
SPLITS = list(range(len(SIZES)))


def counted(split: int, epoch: int) -> Iterator[Any]:
    for i in range(SIZES[split]):
        yield {"id": np.int64(1000 * split + i), "x": np.full((3, 5), 1000 * split + i + 0.5 * epoch, "float32")}


def drawn(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split]):
        yield {"id": np.int64(1000 * split + i), "noise": rng.bit_generator.random_raw(4)}


def drawn_globally(split: int) -> Iterator[Any]:
    for i in range(SIZES[split]):
        yield np.int64(1000 * split + i), np.random.random_sample(3), random.random()


def ready_made(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split] % 5):
        rows, width = (int(raw % 50) for raw in rng.bit_generator.random_raw(2))
        yield {"n": np.arange(rows), "x": np.full((rows, width), 1000 * split + i, "float32")}


def made_up(rng: np.random.Generator) -> Iterator[Any]:
    while True:
        yield rng.bit_generator.random_raw(2)


def numbered_segment(number: int) -> Iterator[Any]:
    for i in range(number % 13):  # some are shorter than segment= allows, and each 13th is empty
        yield np.int64(100 * number + i)


def shared_out(shard: tuple[int, int], epoch: int) -> Iterator[Any]:
    index, count = shard
    for i in range(index, 83, count):
        yield np.int64(1000 * epoch + i)


def alone(epoch: int) -> Iterator[Any]:
    for i in range(83):
        yield np.int64(1000 * epoch + i)


def failing(split: int) -> Iterator[Any]:
    for i in range(20):
        if i == 7 + split and split % 3 == 1:
            raise OSError("this file ends too soon")
        yield np.int64(1000 * split + i)


def of_all_types(split: int) -> Iterator[Any]:
    for i in range(SIZES[split]):
        n = 10 * split + i % 10
        yield {
            "flags": (np.bool_(i % 2), np.full(3, i % 3 == 0)),
            "integers": tuple(
                np.full(2, n, dtype) for dtype in "int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()
            ),
            "floats": {
                "half": np.float16(n / 2),
                "brain": np.full((2, 1), n, ml_dtypes.bfloat16),
                "single": np.float32(n / 4),
                "double": np.full((), n / 8, "float64"),
            },
            "complex": (np.complex64(n + 1j), np.complex128(n - 1j)),
            "none": np.zeros((0, 4), "float32"),
        }


def spoken(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split]):
        raw = [int(number) for number in rng.bit_generator.random_raw(4)]
        words = ["ä" * (number % 4) + "x" * (number % 7) for number in raw]  # some are empty
        yield {"text": words[0], "pair": np.array(words[1:3], object), "id": np.int64(1000 * split + i)}


def of_different_lengths(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split]):
        row = np.arange(int(rng.bit_generator.random_raw() % 9), dtype="float32") + 1000 * split + i  # some are empty
        yield {"row": row, "pairs": np.stack([row, -row], -1), "id": np.int64(1000 * split + i)}


def of_different_shapes(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split]):
        length, width = (int(number % 9) for number in rng.bit_generator.random_raw(2))
        yield np.full(length, 1000 * split + i, "int32"), np.full((length, width), i, "int16")


def lists(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for i in range(SIZES[split]):
        lengths = [int(number % 4) for number in rng.bit_generator.random_raw(i % 4)]  # no list, or some empty ones
        yield {
            "areas": [[split, i, n][:n] for n in lengths],
            "turns": [np.full((n, 2), i, "float32") for n in lengths],
            "words": [["ä" * n] * n for n in lengths],
        }


def ready_text(split: int, rng: np.random.Generator) -> Iterator[Any]:
    for _ in range(SIZES[split] % 5):
        raw = rng.bit_generator.random_raw(int(rng.bit_generator.random_raw() % 4))
        texts = np.array([["y" * int(number % 5), "ö" * int(number % 3)] for number in raw], object).reshape(-1, 2)
        yield texts, np.arange(len(texts), dtype="int32")


class Table:
    def __len__(self) -> int:
        return 101

    def __getitem__(self, i: int) -> Any:
        return np.int64(i), np.random.random_sample(3)


class ReadyTable:
    def __len__(self) -> int:
        return 23

    def __getitem__(self, i: int) -> Any:
        return np.full((i % 5, i % 3), i, "int32")


def splits_in_an_order_that_is_drawn() -> list[int]:
    return sorted(SPLITS, key=lambda _: random.random())


READY = DictSpec(("n", "x"), (Leaf("int64", (None,)), Leaf("float32", (None, None))))

# In order, with different numbers of lanes and lengths of turns.
one_lane = Feed(counted, splits=SPLITS, batch_size=8, lanes=1, turn=1)
five_lanes = Feed(counted, splits=SPLITS, batch_size=8, lanes=5, turn=3)
more_lanes_than_splits = Feed(counted, splits=SPLITS, batch_size=4, lanes=16)
large_batches = Feed(counted, splits=SPLITS, batch_size=100, lanes=3)
all_types = Feed(of_all_types, splits=SPLITS, batch_size=8, lanes=2, turn=2)
with_rng = Feed(drawn, splits=SPLITS, batch_size=8, lanes=4, turn=2, seed=3)
with_global_randomness = Feed(drawn_globally, splits=SPLITS, batch_size=7, lanes=4, turn=1, seed=2**62)
ordered_by_function = Feed(counted, splits=splits_in_an_order_that_is_drawn, batch_size=8, lanes=3, turn=2, seed=4)

# Shuffled.
shuffled = Feed(counted, splits=SPLITS, batch_size=8, shuffle=64, lanes=3, turn=2, seed=5)
shuffled_one_lane = Feed(counted, splits=SPLITS, batch_size=8, shuffle=Shuffle(24, interleave=2), lanes=1, turn=1)
shuffled_whole = Feed(counted, splits=SPLITS, batch_size=8, shuffle=Shuffle(10**6, interleave=12), lanes=4, seed=6)
shuffled_rng = Feed(drawn, splits=SPLITS, batch_size=7, shuffle=100, lanes=5, turn=2, seed=9)
shuffled_global = Feed(drawn_globally, splits=SPLITS, batch_size=7, shuffle=50, lanes=4, turn=1, seed=9)
shuffled_by_function = Feed(drawn, splits=splits_in_an_order_that_is_drawn, batch_size=8, shuffle=32, lanes=3, seed=7)

# Leftover rows are dropped.
dropping = Feed(drawn, splits=SPLITS, batch_size=16, lanes=4, turn=2, drop_remainder=True)
dropping_shuffled = Feed(drawn, splits=SPLITS, batch_size=16, shuffle=64, lanes=4, turn=2, drop_remainder=True)

# The generator makes the batches.
ready = Feed(ready_made, splits=SPLITS, batch_size=None, lanes=4, spec=READY)
ready_shuffled = Feed(ready_made, splits=SPLITS, batch_size=None, shuffle=6, lanes=3, seed=8, spec=READY)

# Text, and samples of different lengths: padded, padded to buckets, and ragged.
SHAPES = TupleSpec((Leaf("int32", (None,)), Leaf("int16", (None, None))))
LENGTHS = DictSpec(
    ("id", "pairs", "row"),
    (Leaf("int64", ()), Leaf("float32", (None, 2), ragged=True), Leaf("float32", (None,), ragged=True)),
)
READY_TEXT = TupleSpec((Leaf("string", (None, 2)), Leaf("int32", (None,))))
text = Feed(spoken, splits=SPLITS, batch_size=8, lanes=3)
text_shuffled = Feed(spoken, splits=SPLITS, batch_size=8, shuffle=64, lanes=3, seed=5)
text_ready = Feed(ready_text, splits=SPLITS, batch_size=None, lanes=4, spec=READY_TEXT)
padded = Feed(of_different_shapes, splits=SPLITS, batch_size=8, batching=Pad(value=-1), spec=SHAPES, lanes=3)
bucketed = Feed(
    of_different_shapes, splits=SPLITS, batch_size=8, batching=Pad(buckets=(4, 12)), spec=SHAPES, shuffle=64, lanes=3
)
ragged = Feed(of_different_lengths, splits=SPLITS, batch_size=8, batching="ragged", spec=LENGTHS, lanes=3)
ragged_shuffled = Feed(
    of_different_lengths, splits=SPLITS, batch_size=7, batching="ragged", spec=LENGTHS, shuffle=64, lanes=4, seed=5
)
LISTS = DictSpec(
    ("areas", "turns", "words"),
    (
        Leaf("int16", (None, None)),
        Leaf("float32", (None, None, 2), ragged=True),
        Leaf("string", (None, None), ragged=True),
    ),
)
lists_shuffled = Feed(lists, splits=SPLITS, batch_size=7, batching="pad", spec=LISTS, shuffle=64, lanes=4, seed=5)

# Indexable.
table = Feed(Table(), batch_size=8, turn=2)
table_shuffled = Feed(Table(), batch_size=8, shuffle=1, turn=3, seed=4)
table_dropping = Feed(Table(), batch_size=8, shuffle=1, turn=3, seed=4, drop_remainder=True)
table_ready = Feed(ReadyTable(), batch_size=None, shuffle=1, spec=Leaf("int32", (None, None)))

# Segments.
endless = Feed(made_up, segment=10, batch_size=4, lanes=3, turn=2, seed=1)
endless_shuffled = Feed(made_up, segment=10, batch_size=4, shuffle=40, lanes=3, turn=2, seed=1)
endless_numbered = Feed(numbered_segment, segment=9, batch_size=4, lanes=4, turn=1)
segments = Feed(made_up, segment=10, samples=95, batch_size=4, lanes=3, turn=2, seed=1)

# Without splits; and with splits that are left out.
shards = Feed(shared_out, batch_size=4, lanes=4, turn=2)
undivided = Feed(alone, batch_size=4, turn=2)
skipping = Feed(failing, splits=SPLITS, batch_size=4, lanes=4, turn=2, on_error="skip")

# Fast order depends on timing, except with one lane.
fast_one_lane = Feed(drawn, splits=SPLITS, batch_size=8, shuffle=40, lanes=1, turn=2, order="fast", seed=2)

# Combined feeds.
_drawn = Feed(drawn, splits=SPLITS, batch_size=8)
_global = Feed(drawn_globally, splits=SPLITS[::-1], batch_size=8)
_endless = Feed(made_up, segment=10, batch_size=8)
zipped = Feed.zip(_drawn, _global, lanes=3, turn=2, shuffle=40, seed=5, uneven="allow")
mixed = Feed.mix({"a": _drawn, "b": _drawn}, weights={"a": 2, "b": 1}, lanes=3, turn=1, seed=6)
mixed_all = Feed.mix({"a": _drawn, "b": _drawn}, weights={"a": 2, "b": 1}, stop="all", lanes=3, turn=1, seed=6)
mixed_shuffled = Feed.mix({"a": _global, "b": _global}, stop="all", shuffle=60, lanes=3, turn=2, seed=6)
mixed_nested = Feed.mix({"a": _drawn, "m": Feed.mix({"b": _drawn, "c": _drawn})}, lanes=3, shuffle=30, seed=6)
mixed_endless = Feed.mix({"a": _endless, "b": _endless}, weights={"a": 3, "b": 1}, lanes=3, turn=1, seed=7)
