"""The contents of samples. Each sample shows which one it is, and whether it is intact.

A sample has three parts: an id (tag of the feed, epoch, split, number, checksum), a payload that follows from the id,
and two numbers that the generator drew. The checksum covers the payload and the draw.

Workers import this module along with feeds.py, so it imports nothing from the package.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

ROWS = 64
"""In feeds that make their own batches, row r of batch n of a split is the split's sample number ROWS * n + r."""


def payload(tag: int, epoch: int, split: int, number: int, width: int) -> np.ndarray:
    """Return the payload of this sample: `width` bytes."""
    return np.frombuffer(hashlib.shake_128(f"{tag} {epoch} {split} {number}".encode()).digest(width), np.uint8)


def checksum(body: np.ndarray, draw: np.ndarray) -> int:
    """Return the checksum in the id of a sample with this payload and this draw."""
    return zlib.crc32(draw.tobytes(), zlib.crc32(body.tobytes()))


def rows_of(split: int, number: int) -> int:
    """Return the number of rows of the ready batch `number` of a split."""
    return 1 + (7 * split + 3 * number) % 5


def width_of(width: int, split: int, number: int) -> int:
    """Return the width of the payload of the ready batch `number` of a split."""
    return width + (split + number) % 3 * 8


def endless_size(segment: int, number: int) -> int:
    """Return the number of samples of segment `number` of an endless feed. Some are empty, many are full."""
    return (segment, segment, (5 * number) % (segment + 1))[number % 3]
