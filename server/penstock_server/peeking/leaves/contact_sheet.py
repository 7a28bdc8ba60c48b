"""Makes a contact sheet: the images of some samples in one picture, as a PNG file.

Each sample is a group of tiles, one for each leaf that is an image, so a mask appears beside its image. Writing a PNG
file needs only zlib, which Python has. Pillow could write it too, but the server does not depend on it.
"""

from __future__ import annotations

import colorsys
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .tiles import Tile

Picture = npt.NDArray[np.uint8]
"""[height, width, 3]."""

_BACKGROUND = 88
_GAP, _GROUP_GAP = 2, 8
_SMALLEST = 64
"""Small tiles are magnified until their longer side has about this many pixels."""
_WIDEST = 1400

_CLASSES = {*range(-1, 64), 255}
"""Values that a mask may have; -1 or 255 often mean that a pixel has no label."""
_CALM = 0.75
"""In a mask, at least this share of the pixels equals the pixel on the right."""


def contact_sheet(leaves: Sequence[Sequence[Tile | None]]) -> tuple[Picture, int]:
    """Return the picture of all tiles, and the number of samples in a row.

    Args:
        leaves: for each leaf that is an image, its tiles of the same samples.
    """
    pictures = [_magnified(painted(tiles)) for tiles in leaves]
    count = min(len(tiles) for tiles in pictures)
    sizes = [tuple(max(one.shape[axis] for one in tiles) for axis in (0, 1)) for tiles in pictures]
    height = max(size[0] for size in sizes)
    width = sum(size[1] for size in sizes) + _GAP * (len(sizes) - 1)
    most = max(1, (_WIDEST - _GROUP_GAP) // (width + _GROUP_GAP))
    columns = min(count, most, math.ceil(math.sqrt(1.4 * count * height / width)))
    rows = math.ceil(count / columns)
    sheet = np.full(
        (rows * (height + _GROUP_GAP) + _GROUP_GAP, columns * (width + _GROUP_GAP) + _GROUP_GAP, 3),
        _BACKGROUND,
        np.uint8,
    )
    for number in range(count):
        top = _GROUP_GAP + number // columns * (height + _GROUP_GAP)
        left = _GROUP_GAP + number % columns * (width + _GROUP_GAP)
        for tiles, size in zip(pictures, sizes, strict=True):
            one = tiles[number]
            sheet[top : top + one.shape[0], left : left + one.shape[1]] = one
            left += size[1] + _GAP
    return sheet, columns


def are_classes(tiles: Sequence[Tile | None]) -> bool:
    """Return whether tiles look like a segmentation mask: few different values, in areas of one value."""
    found = [tile for tile in tiles if tile is not None]
    if not found or not all(tile.ndim == 2 and tile.dtype.kind in "iu" for tile in found):
        return False
    if not set().union(*(np.unique(tile).tolist() for tile in found)) <= _CLASSES:
        return False
    equal = sum(int((tile[:, 1:] == tile[:, :-1]).sum()) for tile in found)
    return equal >= _CALM * sum(tile[:, 1:].size for tile in found)


def png(picture: Picture, level: int = 6) -> bytes:
    """Return a picture as the bytes of a PNG file. `level` is zlib's compression level."""
    height, width, _ = picture.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)  # 0: no filter
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),  # 8 bits a channel, RGB
        (b"IDAT", zlib.compress(lines.tobytes(), level)),
        (b"IEND", b""),
    )
    chunks = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def painted(tiles: Sequence[Tile | None]) -> list[Picture]:
    """Return tiles in screen colours: the classes of a mask by a palette, others scaled by the range of all tiles."""
    if are_classes(tiles):
        palette = _palette()
        return [_blank() if tile is None else palette[tile.astype(np.int64) % 256] for tile in tiles]
    found = [tile[np.isfinite(tile)] for tile in tiles if tile is not None]
    low = min((float(one.min()) for one in found if one.size), default=0.0)
    high = max((float(one.max()) for one in found if one.size), default=1.0)
    floats = any(tile is not None and tile.dtype.kind == "f" for tile in tiles)
    bottom, top = _range(low, high, floats)
    return [_blank() if tile is None else _in_colour(tile, bottom, top) for tile in tiles]


def _range(low: float, high: float, floats: bool) -> tuple[float, float]:
    """Return the values that become black and white: 0 and 255, 0 and 1, or the least and the greatest value."""
    if low < 0 or high > 255:
        return low, high
    if floats and high <= 1:
        return 0.0, 1.0
    return 0.0, 255.0 if high > 64 else max(high, 1.0)


def _in_colour(tile: Tile, bottom: float, top: float) -> Picture:
    level = (np.nan_to_num(tile.astype(np.float32), nan=bottom) - bottom) / ((top - bottom) or 1.0)
    level = level.clip(0, 1)
    if level.ndim == 2:
        level = np.repeat(level[:, :, None], 3, axis=2)
    if level.shape[2] == 4:  # over the background
        level = level[:, :, :3] * level[:, :, 3:] + _BACKGROUND / 255 * (1 - level[:, :, 3:])
    picture: Picture = (255 * level).round().astype(np.uint8)
    return picture


def _magnified(tiles: list[Picture]) -> list[Picture]:
    longest = max(max(tile.shape[:2]) for tile in tiles)
    factor = max(1, _SMALLEST // longest)
    return [tile.repeat(factor, axis=0).repeat(factor, axis=1) for tile in tiles]


def _palette() -> Picture:
    """Return a colour for each class: black for 0, white for 255 (often "no label"), and different for neighbours."""
    golden = 0.618034
    colours = [
        colorsys.hsv_to_rgb(number * golden % 1, 0.55 + 0.35 * (number % 2), 1 - 0.18 * (number // 2 % 3))
        for number in range(256)
    ]
    palette: Picture = np.round(255 * np.array(colours)).astype(np.uint8)
    palette[0], palette[255] = 0, 255
    return palette


def _blank() -> Picture:
    return np.full((1, 1, 3), _BACKGROUND, np.uint8)
