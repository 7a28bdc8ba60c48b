"""The user code of gpu.py: uint8 images, mirrored, with a label. It costs little, and does not import TensorFlow."""

import itertools
import os
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed

SIDE, BATCH = int(os.environ["GPU_SIDE"]), int(os.environ["GPU_BATCH"])
SPLIT = 64 * BATCH  # samples
SPLITS = range(0, 50_000 * SPLIT, SPLIT)  # more than a run reads
CLASSES = 1000
IMAGES = np.random.default_rng(0).integers(0, 256, (256, SIDE, SIDE, 3), np.uint8)


def samples(start: int) -> Iterator[tuple[np.ndarray, np.int32]]:
    for number in range(start, start + SPLIT):
        yield np.ascontiguousarray(IMAGES[number % len(IMAGES)][:, ::-1]), np.int32(number % CLASSES)


def stream() -> Iterator[tuple[np.ndarray, np.int32]]:
    """Yield the samples of all splits, one after another."""
    return itertools.chain.from_iterable(map(samples, SPLITS))


feed = Feed(samples, splits=SPLITS, batch_size=BATCH)
