"""Reads image files as arrays of one mode and, if asked for, of one size."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock_proto import distribution

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000
"""Pixels of an image, at most: 300 MB of RGB. A small file can claim any number of them."""

_ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held. From 5 on, width and height change places."""

_DEEP = ("I;16", "I;16B", "I;16L", "I", "F")
"""Pillow's modes for pixels of more than 8 bits."""


def read_pixels(
    source: BinaryIO, name: str, mode: str, size: tuple[int, int] | None, resize: str, *, upright: bool
) -> npt.NDArray[np.uint8 | np.uint16]:
    """Return the pixels of an image, of the first picture if the file has several.

    Args:
        source: the bytes of an image file.
        name: what messages call it, such as its path.
        mode: one of `MODES` of options.py.
        size: (height, width) of the result; None: as the file has it.
        resize: how an image of another shape becomes that size: one of `RESIZES`.
        upright: whether to turn the image as its EXIF data say, as viewers do.

    Returns:
        An array [height, width, channels] of uint8, or of uint16 for mode "I;16".

    Raises:
        ImportError: Pillow is missing.
        OSError: it is no image, is damaged, or is too large; the message has `name`.
        ValueError: it has too many, or too few, bits for `mode`; the message has `name`.
    """
    image_module = _pillow()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes between Pillow's two bounds, and of odd metadata
        try:
            bits = _png_bits(source)
            with image_module.open(source) as image:
                problem = _problem(image, mode, bits)
                if not problem:
                    return _pixels(image, mode, size, resize, upright)
        except Exception as error:  # Pillow raises many types for damaged files
            raise OSError(f"{name} cannot be decoded: {_cause(error)}. Replace it, or leave it out") from None
    raise ValueError(f"{name} {problem}")


def header_of(file: str) -> tuple[tuple[int, int], str]:
    """Return (height, width) and Pillow's mode of an image, from its header.

    Raises:
        ImportError: Pillow is missing.
        OSError: it is no image; the message names the file.
    """
    image_module = _pillow()
    with open(file, "rb") as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with image_module.open(opened) as image:
                return (image.height, image.width), image.mode
        except Exception as error:
            raise OSError(f"{file} cannot be decoded: {_cause(error)}") from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(f"images need Pillow: {distribution.pip_install('images')}") from None
    return Image


def _png_bits(source: BinaryIO) -> int:
    """Return how many bits each number of a PNG file has; 0 for other files. Pillow reads 8 of 16 bits, except of grey
    images, and its mode does not tell."""
    start = source.tell()
    head = source.read(25)
    source.seek(start)
    return head[24] if len(head) == 25 and head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR" else 0


def _problem(image: Image, mode: str, bits: int) -> str:
    """Return why an image cannot be read in a mode, and what to do; or "".

    Args:
        image: the image.
        mode: one of `MODES`.
        bits: how many bits each number has, if that is known; or 0.
    """
    if image.width * image.height > MOST_PIXELS:
        return (
            f"has {image.width} x {image.height} pixels, and at most {MOST_PIXELS} are read: cut it into tiles, or "
            "leave it out"
        )
    deep = image.mode in _DEEP
    if deep and mode != "I;16":
        return (
            f"has more than 8 bits for each pixel (its mode is {image.mode}), which mode={mode!r} would cut off: give "
            'mode="I;16", or convert the file'
        )
    if bits > 8 and not deep:
        return (
            f"has {bits} bits for each number (its mode is {image.mode}), and only those of grey images are read: "
            "convert the file to 8 bits, or to grey"
        )
    if mode == "I;16" and (not deep or image.mode == "F"):
        return (
            f'does not have 16 bits for each pixel (its mode is {image.mode}), as mode="I;16" promises: give another '
            "mode, or convert the file"
        )
    return ""


def _pixels(image: Image, mode: str, size: tuple[int, int] | None, resize: str, upright: bool) -> npt.NDArray[Any]:
    from PIL import Image as images
    from PIL import ImageOps

    turned = upright and image.getexif().get(_ORIENTATION, 1)
    if size is not None and image.format == "JPEG":
        height, width = reversed(size) if turned and turned >= 5 else size
        image.draft(None, (width, height))  # decodes no more than 8 times as much as is needed
    if mode == "I;16":
        found: Image = image.convert("I").convert("F")
    else:
        found = image if image.mode == mode else image.convert(mode)
    if turned and turned != 1:
        found = ImageOps.exif_transpose(found)
    if size is not None and size != (found.height, found.width):
        height, width = size
        if resize == "crop":
            found = ImageOps.fit(found, (width, height), images.Resampling.BILINEAR)
        elif resize == "pad":
            found = ImageOps.pad(found, (width, height), images.Resampling.BILINEAR)
        else:
            found = found.resize((width, height), images.Resampling.BILINEAR)
    array = np.asarray(found)
    if mode == "I;16":
        array = np.rint(array).astype(np.uint16)
    return array if array.ndim == 3 else array[:, :, None]


def _cause(error: Exception) -> str:
    text = str(error).rstrip(".")
    if type(error).__name__ == "DecompressionBombError":  # Pillow's own bound is higher
        return f"it claims more than the {MOST_PIXELS} pixels that are read"
    if "cannot identify image file" in text:
        return "it is not an image of a known format, or is empty"
    return text or type(error).__name__
