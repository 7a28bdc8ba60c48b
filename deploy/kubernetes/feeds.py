"""An example: put your own feeds here. The head and the hosts get the same file."""

import time
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed


def scenes(split: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, int]]:
    """Yield images and labels."""
    for _ in range(100):
        time.sleep(0.01)  # instead of work
        yield rng.random((64, 64), dtype=np.float32), split


train = Feed(scenes, splits=range(64), batch_size=32)
