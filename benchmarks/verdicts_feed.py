"""The feeds of verdicts.py: each is limited by one thing."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from penstock_server import Feed

SLOW = float(os.environ.get("SLOW", "0"))
"""Further seconds for each sample, on one host."""


def sleeping(seconds: float, nbytes: int = 32) -> Iterator[np.ndarray]:
    values = np.zeros(max(1, nbytes // 4), np.float32)
    while True:
        time.sleep(seconds + SLOW)
        yield values


def computing(seconds: float) -> Iterator[np.ndarray]:
    while True:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass
        yield np.zeros(8, np.float32)


def slow(split: int) -> Iterator[np.ndarray]:
    return sleeping(0.02)


def very_slow(split: int) -> Iterator[np.ndarray]:
    return sleeping(0.5)


def computes(split: int) -> Iterator[np.ndarray]:
    return computing(0.005)


def pinned(split: int) -> Iterator[np.ndarray]:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return computing(0.005)


def one_slow(split: int) -> Iterator[np.ndarray]:
    return sleeping(0.05 if split == 3 else 0.004)


def uneven(split: int) -> Iterator[np.ndarray]:
    for samples in sleeping(0.001, 1 << 20):
        time.sleep(0.2 if np.random.default_rng().random() < 0.1 else 0.0)
        yield samples


def sizes(split: int) -> Iterator[np.ndarray]:
    for _, sample in zip(range(400 if split % 8 == 0 else 40), sleeping(0.005), strict=False):
        yield sample


def large(split: int) -> Iterator[np.ndarray]:
    return sleeping(0.02, 2 << 20)


def quick(split: int) -> Iterator[np.ndarray]:
    values = np.zeros(1 << 18, np.float32)
    while True:
        yield values


def numbers(split: int) -> Iterator[tuple[list[float], ...]]:
    while True:
        yield tuple([0.0] * 64 for _ in range(4))


def arrays(split: int) -> Iterator[tuple[np.ndarray, ...]]:
    batch = tuple(np.zeros((32, 64), np.float64) for _ in range(4))
    while True:
        yield batch


def dies(split: int) -> Iterator[np.ndarray]:
    for number, sample in enumerate(sleeping(0.005)):
        if number % 200 == 199:
            os._exit(1)
        yield sample


def raises(split: int) -> Iterator[np.ndarray]:
    for sample in sleeping(0.005):
        if time.time() % 3 < 2:
            raise OSError("the disk is away")
        yield sample


def listed() -> list[int]:
    time.sleep(1)
    return list(range(8))


def few(split: int) -> Iterator[np.ndarray]:
    for _, sample in zip(range(8), sleeping(0.002), strict=False):
        yield sample


def files(split: int) -> Iterator[np.ndarray]:
    for _, sample in zip(range(50), sleeping(0.01), strict=False):
        yield sample


class Items:
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.02)
        return np.zeros(8, np.float32)


MANY = range(16)
slow_generator = Feed(slow, splits=MANY, batch_size=4)
slow_in_any_order = Feed(slow, splits=MANY, batch_size=4, order="fast")
slow_items = Feed(Items(), batch_size=4)
computes_feed = Feed(computes, splits=MANY, batch_size=8)
pinned_feed = Feed(pinned, splits=MANY, batch_size=8)
one_split = Feed(slow, splits=range(1), batch_size=4)
three_splits = Feed(slow, splits=range(3), batch_size=4)
two_lanes = Feed(slow, splits=MANY, lanes=2, batch_size=4)
four_lanes = Feed(slow, splits=MANY, lanes=4, batch_size=4)
six_lanes = Feed(slow, splits=MANY, lanes=6, batch_size=4)
uneven_splits = Feed(sizes, splits=range(8), batch_size=4)
long_turns = Feed(slow, splits=MANY, batch_size=4, turn=512)
short_turns = Feed(slow, splits=MANY, batch_size=4, turn=1)
slow_split = Feed(one_slow, splits=MANY, batch_size=4)
slow_split_in_any_order = Feed(one_slow, splits=MANY, batch_size=4, order="fast")
uneven_batches = Feed(uneven, splits=MANY, batch_size=4)
uneven_in_any_order = Feed(uneven, splits=MANY, batch_size=4, order="fast")
large_batches = Feed(large, splits=MANY, batch_size=4)
quick_feed = Feed(quick, splits=MANY, batch_size=4)
python_numbers = Feed(numbers, splits=MANY, batch_size=32)
whole_batches = Feed(arrays, splits=MANY, batch_size=None)
long_first_batch = Feed(very_slow, splits=MANY, batch_size=64)
dying = Feed(dies, splits=MANY, batch_size=4, on_error="retry")
raising = Feed(raises, splits=MANY, batch_size=4, on_error="retry")
slow_listing = Feed(few, splits=listed, batch_size=4)
quick_listing = Feed(few, splits=range(8), batch_size=4)
cached = Feed(files, splits=range(40), batch_size=4, cache=Path(os.environ.get("CACHE", "/nonexistent")))
