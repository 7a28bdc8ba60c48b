"""The feeds of evenness.py: samples of COST seconds and NBYTES bytes each. A sample sleeps, so it needs no core.

In `whole`, every lane runs a cheap generator, and the cost is a transform's. In `mixed`, an indexable feed, one sample
in 80 costs 81 times as much, so the mean is twice COST.
"""

import os
import time
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed

COST = float(os.environ["COST"])
VALUES = np.zeros(max(1, int(os.environ["NBYTES"]) // 4), np.float32)


def sample(times: int = 1) -> np.ndarray:
    if COST:
        time.sleep(times * COST)
    return VALUES


def samples(split: int) -> Iterator[np.ndarray]:
    for _ in range(500):
        yield sample()


def numbers() -> Iterator[int]:
    yield from range(1_000_000)


def transformed(number: int) -> np.ndarray:
    return sample()


class Samples:
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> np.ndarray:
        return sample()


class Mixed(Samples):
    def __getitem__(self, number: int) -> np.ndarray:
        return sample(1 if number % 80 else 81)


generator = Feed(samples, splits=range(4096), batch_size=8)
whole = Feed(numbers, transform=transformed, batch_size=8)
indexable = Feed(Samples(), batch_size=8)
mixed = Feed(Mixed(), batch_size=8)
