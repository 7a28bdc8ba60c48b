"""What a sample is made of, so that each tells by itself which it is and whether it is whole.

A sample has three parts: an id (tag of the feed, epoch, split, number, checksum), a payload that follows from the id,
and two numbers that the generator drew. The checksum covers the payload and the draw.

Workers import this beside feeds.py, so it imports nothing of the package.
"""

from __future__ import annotations

import hashlib
import zlib

import numpy as np

ROWS = 64
"""Of feeds of ready batches: row r of batch n of a split is its sample number ROWS * n + r."""


def payload(tag: int, epoch: int, split: int, number: int, width: int) -> np.ndarray:
    """The bytes of this sample."""
    return np.frombuffer(hashlib.shake_128(f"{tag} {epoch} {split} {number}".encode()).digest(width), np.uint8)


def checksum(body: np.ndarray, draw: np.ndarray) -> int:
    """What stands in the id of a sample with this payload and this draw."""
    return zlib.crc32(draw.tobytes(), zlib.crc32(body.tobytes()))


def rows_of(split: int, number: int) -> int:
    """How many rows the ready batch `number` of a split has."""
    return 1 + (7 * split + 3 * number) % 5


def width_of(width: int, split: int, number: int) -> int:
    """How wide the payload of the ready batch `number` of a split is."""
    return width + (split + number) % 3 * 8


def endless_size(segment: int, number: int) -> int:
    """How many samples segment `number` of an endless feed has: some have none, many are full."""
    return (segment, segment, (5 * number) % (segment + 1))[number % 3]
