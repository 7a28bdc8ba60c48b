"""Small pictures of images, as they stand in a contact sheet, before anybody knows the range of all values."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Tile: TypeAlias = npt.NDArray[Any]
"""[height, width] or [height, width, 3 | 4], of the image's values: uint8, or int32 for other integers, or float32."""

LARGEST = 128
"""Pixels of a tile's longer side, at most."""


def tile(pixels: npt.NDArray[Any]) -> Tile:
    """Return a copy of an image, made smaller if need be.

    Of integers without channels, which may be classes, some pixels are left out. Others are averaged.
    """
    factor = max(1, -(-max(pixels.shape[:2]) // LARGEST))
    kind = pixels.dtype
    if pixels.ndim == 2 and kind.kind in "biu":
        small = pixels[factor // 2 :: factor, factor // 2 :: factor] if factor > 1 else pixels
        return np.array(small, np.uint8 if kind.itemsize == 1 and kind.kind != "i" else np.int32)
    step = max(1, factor // 4)  # some 16 pixels make a good average, and a large image takes no longer
    pixels, factor = pixels[::step, ::step], -(-factor // step)
    height, width = (size // factor * factor for size in pixels.shape[:2])
    if not height or not width:  # narrower than `factor`
        pixels = pixels[::factor, ::factor]
    elif factor > 1:
        blocks = pixels[:height, :width].reshape(height // factor, factor, width // factor, factor, *pixels.shape[2:])
        pixels = blocks.mean(axis=(1, 3), dtype=np.float32)
    return pixels.round().astype(np.uint8) if kind == np.uint8 else np.array(pixels, np.float32)
