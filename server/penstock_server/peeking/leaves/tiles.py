"""Makes tiles: small copies of images for a contact sheet, with the images' own values.

The sheet scales the values later, when their range over all samples is known.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tile: TypeAlias = npt.NDArray[Any]
"""[height, width] or [height, width, 3 | 4], with the image's values as uint8, int32 or float32."""

LARGEST = 128
"""The most pixels of a tile's longer side."""


def tile(pixels: npt.NDArray[Any]) -> Tile:
    """Return a copy of an image, scaled down if its longer side exceeds `LARGEST`.

    Scaling skips pixels of integer images without channels, as their values may be classes. It averages all others.
    """
    factor = max(1, -(-max(pixels.shape[:2]) // LARGEST))
    kind = pixels.dtype
    if pixels.ndim == 2 and kind.kind in "biu":
        small = pixels[factor // 2 :: factor, factor // 2 :: factor] if factor > 1 else pixels
        return np.array(small, np.uint8 if kind.itemsize == 1 and kind.kind != "i" else np.int32)
    step = max(1, factor // 4)  # about 16 pixels make a good average, so a large image takes no longer
    pixels, factor = pixels[::step, ::step], -(-factor // step)
    height, width = (size // factor * factor for size in pixels.shape[:2])
    if not height or not width:  # narrower than `factor`
        pixels = pixels[::factor, ::factor]
    elif factor > 1:
        blocks = pixels[:height, :width].reshape(height // factor, factor, width // factor, factor, *pixels.shape[2:])
        pixels = blocks.mean(axis=(1, 3), dtype=np.float32)
    return pixels.round().astype(np.uint8) if kind == np.uint8 else np.array(pixels, np.float32)
