"""Recognizes arrays of pixels, and decodes image files such as JPEG if Pillow is installed."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_LEAST = 6
"""The fewest rows and columns of an image."""

_LEAST_MASK = 16
"""The fewest rows and columns of a mask whose dtype `may_be_mask_only`: a smaller array may be anything."""

_DTYPES = {"1": "bool", "I;16": "uint16", "I;16B": "uint16", "I": "int32", "F": "float32"}
"""The dtype of the array that Pillow makes of an image, by the image's mode; uint8 for all other modes."""

_ORIENTATION = 0x0112
"""The EXIF tag that says how an image is turned: by 90 degrees from 5 on."""

_CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4, "I;16": 1}
"""The modes to which `ImageDecoder` converts images, and their channels."""

_DEEP = "I;16"


@dataclass(frozen=True, slots=True)
class Header:
    """What the header of an encoded image says.

    Attributes:
        mode: Pillow's mode of its pixels, such as "L", "RGB", "P" (indices into a palette) or "CMYK".
        target: the mode with the same picture whose channels are brightness or colours, such as "RGB" for "CMYK".
        height, width: its size, once it is turned upright.
    """

    mode: str
    target: str
    height: int
    width: int

    def array_in(self, target: str) -> str:
        """Return the dtype and shape of the image as an array, such as "uint8[28, 28, 3]", once it is converted."""
        channels = _CHANNELS.get(target)
        shape = [self.height, self.width, channels] if channels else [self.height, self.width]
        return f"{_DTYPES.get(target, 'uint8')}{shape}"


def common_target(headers: Collection[Header]) -> str:
    """Return one mode for the pictures of all these headers; "" if there is none."""
    targets = {header.target for header in headers}
    if len(targets) < 2:
        return targets.pop() if targets else ""
    if _DEEP in targets or not targets <= _CHANNELS.keys():
        return ""
    alpha = any(target.endswith("A") for target in targets)
    colours = any(target.startswith("RGB") for target in targets)
    return "RGBA" if alpha else "RGB" if colours else "L"


def is_pixels(array: npt.NDArray[Any]) -> bool:
    """Return whether an array has the shape and the dtype of an image.

    The shape is [height, width] or [height, width, 1 | 3 | 4], or has the channels first, and the values are uint8,
    bools, floats or 16-bit integers. Arrays of other integers may be masks, which have no channels.
    """
    dtype, shape = array.dtype, array.shape
    if may_be_mask_only(dtype.name):
        return len(shape) == 2 and min(shape) >= _LEAST_MASK
    return dtype.kind in "bfiu" and _has_height_and_width(shape)


def may_be_mask_only(dtype: str) -> bool:
    """Return whether images of this dtype can hardly be anything but masks: int8, and integers of 32 or 64 bits."""
    return dtype in ("int8", "int32", "uint32", "int64", "uint64")


def channels_last(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a view of an array that `is_pixels`, with the shape [height, width] or [height, width, 3 | 4]."""
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    return array[:, :, 0] if array.ndim == 3 and array.shape[2] == 1 else array


def has_decoder() -> bool:
    """Return whether Pillow is installed."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        return False
    return True


def header_of(data: bytes) -> Header | None:
    """Return the header of an encoded image; None if it cannot be read."""
    image = _opened(data)
    if image is None:
        return None
    mode = str(image.mode)
    target = mode
    if mode in ("P", "PA"):
        target = "RGBA" if mode == "PA" or "transparency" in image.info else "RGB"
    elif mode == "LA":
        target = "RGBA"
    elif mode == "I;16B":
        target = _DEEP
    elif mode not in _CHANNELS and mode not in _DTYPES:  # CMYK, YCbCr, LAB, HSV
        target = "RGB"
    height, width = image.height, image.width
    try:
        turned = image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    except Exception:  # Pillow raises many types for damaged data
        turned = False
    return Header(mode, target, width, height) if turned else Header(mode, target, height, width)


def decoded(data: bytes, least: int) -> npt.NDArray[Any] | None:
    """Return the pixels of an encoded image; None if it is damaged.

    A JPEG may be scaled down, which is faster, but not below `least` pixels on each side.
    """
    image = _opened(data)
    if image is None:
        return None
    try:
        image.draft(None, (least, least))
        if image.mode not in ("L", "RGB", "RGBA", "1"):
            image = image.convert("RGB")
        return np.asarray(image)
    except Exception:  # Pillow raises many types for damaged files
        return None


def _opened(data: bytes) -> Any:
    if not has_decoder():
        return None
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of images so large that they may be an attack
            return Image.open(io.BytesIO(data))
    except Exception:
        return None


def _has_height_and_width(shape: tuple[int, ...]) -> bool:
    if len(shape) == 3 and shape[2] in (1, 3, 4):
        shape = shape[:2]
    elif len(shape) == 3 and shape[0] in (1, 3, 4):
        shape = shape[1:]
    return len(shape) == 2 and min(shape) >= _LEAST
