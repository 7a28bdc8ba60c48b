"""The feeds of sharing.py. A batch is a pair: arrays, and the numbers of its samples, each of which has its own."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from sharing_samples import heavy_sample, large_sample, small_sample

from penstock_server import Feed

BATCHES = 64
"""Batches of a split."""


def feed(sample: Any, batch_size: int) -> Feed:
    """Return a feed of that many samples a batch, with an epoch that nobody reads to its end."""
    samples = BATCHES * batch_size

    def generate(split: int) -> Iterator[tuple[np.ndarray, int]]:
        return map(sample, range(split * samples, (split + 1) * samples))

    return Feed(generate, splits=range(8192), batch_size=batch_size)


class Numbered:
    """Heavy samples in the order of their numbers."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        return heavy_sample(number)


numbered = Feed(Numbered(), batch_size=8)
heavy, big, small = feed(heavy_sample, 8), feed(large_sample, 20), feed(small_sample, 32)
