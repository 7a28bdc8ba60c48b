"""The feeds of cache.py: expensive and cheap samples, each with and without a cache."""

import io
import os
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from penstock_server import Feed

SPLITS, SAMPLES = 8, 64


@cache
def jpeg_data() -> bytes:
    from PIL import Image

    data = io.BytesIO()
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), dtype=np.uint8))
    small.resize((480, 480)).save(data, "JPEG", quality=90)
    return data.getvalue()


@cache
def compressed_data() -> bytes:
    steps = np.random.default_rng(0).integers(-2, 3, (64, 64, 8))
    return zlib.compress(np.cumsum(steps, axis=1).astype("f4").tobytes())


def jpeg(split: int) -> Iterator[tuple[Any, int]]:
    """JPEG images of 480 x 480, decoded and resized to 224 x 224 x 3 (147 KiB)."""
    from PIL import Image

    for number in range(SAMPLES):
        with Image.open(io.BytesIO(jpeg_data())) as image:
            yield np.asarray(image.resize((224, 224))), SAMPLES * split + number


def compressed(split: int) -> Iterator[tuple[Any, int]]:
    """Arrays float32[64, 64, 8] (128 KiB), compressed with zlib."""
    for number in range(SAMPLES):
        array = np.frombuffer(zlib.decompress(compressed_data()), "f4")
        yield array.reshape(64, 64, 8), SAMPLES * split + number


def rows(split: int) -> Iterator[tuple[Any, int]]:
    """Rows uint8[28, 28] of an array in memory, which cost next to nothing."""
    table = np.zeros((32 * SAMPLES, 28, 28), np.uint8)
    for number, row in enumerate(table):
        yield row, 32 * SAMPLES * split + number


def feed(generate: Any) -> Feed:
    return Feed(generate, splits=range(SPLITS), batch_size=32, cache=os.environ.get("CACHE") or None)


jpeg, compressed, rows = feed(jpeg), feed(compressed), feed(rows)
