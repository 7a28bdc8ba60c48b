"""The options of everything that reads image files. It imports nothing, since the command line imports it."""

from __future__ import annotations

from typing import Any

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""The endings of image files, in lower case."""

MODES = ("RGB", "RGBA", "L", "I;16")
"""Colours, colours with transparency, grey, and grey of 16 bits."""

RESIZES = ("stretch", "crop", "pad")


def checked_pixels(size: Any, mode: Any, resize: Any, upright: Any) -> tuple[int, int] | None:
    """Check the options of `read_pixels`, and return `size` as a tuple.

    Raises:
        TypeError, ValueError: one means nothing.
    """
    whole = isinstance(size, tuple | list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size)
    if size is not None and not whole:
        raise ValueError(f"size must be (height, width) in pixels, such as (224, 224), got {size!r}")
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if resize not in RESIZES:
        raise ValueError(f"resize must be one of {', '.join(map(repr, RESIZES))}, got {resize!r}")
    if not isinstance(upright, bool):
        raise TypeError(f"upright must be True or False, got {upright!r}")
    return None if size is None else (size[0], size[1])
