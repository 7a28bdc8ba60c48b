"""The module `scenes` (and `feed`) of the documentation's blocks, as far as they do not define it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock_server import Feed


def rows(split: int) -> Iterator[Any]:
    for number in range(40):
        yield np.full((8, 8), number, np.uint8), number % 10


class SceneGenerator:
    """A class that yields batches for ever."""

    def __init__(self, files: list[str]) -> None:
        self.files = files

    def generate_data(self) -> Iterator[Any]:
        while True:
            labels = np.random.randint(0, 10, 16)
            yield np.repeat(labels.astype(np.float32), 64).reshape(16, 8, 8), labels


def make(root: Path, size: int = 64) -> Feed:
    """Return a feed of its own."""
    return Feed(rows, splits=range(4), batch_size=32)


feed = Feed(rows, splits=range(4), batch_size=32, name="train", samples=160)
val = Feed(rows, splits=range(2), batch_size=32, samples=80)
validation = val
