"""Decodes the values of MDS columns, by the name of their encoding."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..json_lines.reader import leaf

Array = npt.NDArray[Any]

IMAGES = ("jpeg", "png")
"""Encodings that are files of images."""

PICKLED = ("pkl",)

_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_DTYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_INTEGER = np.dtype("<i8")
_PIXELS = {
    "L": ("u1", ()),
    "RGB": ("u1", (3,)),
    "RGBA": ("u1", (4,)),
    "I": ("<i4", ()),
    "F": ("<f4", ()),
    "I;16": ("<u2", ()),
}


def decoder(encoding: str) -> Callable[[bytes], Any]:
    """Return the function that decodes values of an encoding.

    The function raises ValueError, IndexError or KeyError for bytes that are no such value.

    Raises:
        TypeError: it is not served; the message is a clause that says what to do.
    """
    name, _, options = encoding.partition(":")
    if name == "ndarray" and re.fullmatch(r"([a-z0-9]+(:[0-9]+(,[0-9]+)*)?)?", options):
        dtype, _, shape = options.partition(":")
        return partial(_array, dtype=dtype, shape=tuple(map(int, shape.split(","))) if shape else None)
    if name in _SCALARS:
        return partial(_scalar, dtype=np.dtype(name).newbyteorder("<"))
    if name in PICKLED:
        raise TypeError(
            "is pickled, and a pickle can run any code when it is read: leave it out, or, if you trust the dataset, "
            "give decode={...} with a function of your own"
        )
    if name not in _DECODERS:
        raise TypeError(f"has the encoding {encoding!r}, which is not known: leave it out, or give decode={{...}}")
    return _DECODERS[name]


def stacker(encoding: str) -> Callable[[Array], Array | list[Any] | None] | None:
    """Return the function that decodes the values of many samples at once, or None if there is none.

    The function takes values of one length, uint8[rows, length]. It returns what `decoder` makes of each, or None if
    they have to be decoded one by one.
    """
    name, _, options = encoding.partition(":")
    if name == "int":
        return _integers
    if name in _SCALARS:
        return partial(_scalars, dtype=np.dtype(name).newbyteorder("<"))
    if name == "ndarray":
        dtype, _, shape = options.partition(":")
        return partial(_arrays, dtype=dtype, shape=tuple(map(int, shape.split(","))) if shape else None)
    return None


def _text(data: bytes) -> str:
    return data.decode()


def _scalar(data: bytes, dtype: np.dtype[Any]) -> Any:
    (value,) = np.frombuffer(data, dtype)
    return value if dtype.isnative else value.astype(dtype.newbyteorder("="))


def _scalars(data: Array, dtype: np.dtype[Any]) -> Array | None:
    return _native(data.view(dtype)[:, 0]) if data.shape[1] == dtype.itemsize else None


def _integer(data: bytes) -> int:
    return int(_scalar(data, _INTEGER))


def _integers(data: Array) -> list[Any] | None:
    found = _scalars(data, _INTEGER)
    return None if found is None else found.tolist()


def _array(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> Any:
    kind, shape, at = _head(data, dtype, shape)
    array = np.frombuffer(data, kind, offset=at)
    if array.size != math.prod(shape):
        raise ValueError(f"{array.size} numbers for an array of shape {[*shape]}")
    return _native(array.reshape(shape))


def _arrays(data: Array, dtype: str, shape: tuple[int, ...] | None) -> Array | None:
    try:
        kind, shape, at = _head(data[0].tobytes(), dtype, shape)
    except (ValueError, IndexError, KeyError):
        return None
    if data.shape[1] != at + math.prod(shape) * kind.itemsize or (data[:, :at] != data[0, :at]).any():
        return None
    return _native(data[:, at:].view(kind).reshape(len(data), *shape))


def _head(data: bytes, dtype: str, shape: tuple[int, ...] | None) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return the dtype and the shape of an array, and where its numbers begin. It has what its encoding leaves out."""
    kind = _stored(dtype or _DTYPES[data[0]])
    at = int(not dtype)
    if shape is None:
        ndim, width = data[at] >> 2, 1 << (data[at] & 3)
        shape = tuple(np.frombuffer(data, f"<u{width}", ndim, at + 1).tolist())
        at += 1 + ndim * width
    return kind, shape, at


def _native(array: Array) -> Array:
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@cache
def _stored(dtype: str) -> np.dtype[Any]:
    return np.dtype(dtype).newbyteorder("<")


def _pixels(data: bytes) -> Any:
    width, height, length = np.frombuffer(data, "<u4", 3).tolist()
    mode = data[12 : 12 + length].decode()
    if mode not in _PIXELS:
        raise ValueError(f"an image of mode {mode!r}, which is not known")
    dtype, channels = _PIXELS[mode]
    array = np.frombuffer(data, dtype, offset=12 + length)
    return array.reshape(height, width, *channels).astype(np.dtype(dtype).newbyteorder("="), copy=False)


def _list(data: bytes, skipped: int) -> Any:
    """Return the items of a list of images, as bytes."""
    (count,) = np.frombuffer(data, "<u4", 1, skipped).tolist()
    sizes = np.frombuffer(data, "<u4", count, skipped + 4).tolist()
    at = skipped + 4 + 4 * count
    if at + sum(sizes) != len(data):
        raise ValueError(f"a list of {at + sum(sizes)} bytes in {len(data)}")
    found = np.empty(count, object)
    for number, size in enumerate(sizes):
        found[number] = data[at : at + size]
        at += size
    return found


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": _text,
    "int": _integer,
    "str_int": int,
    "str_float": float,
    "str_decimal": _text,
    "json": lambda data: leaf(json.loads(data)),
    "pil": _pixels,
    **dict.fromkeys(IMAGES, bytes),
    **dict.fromkeys(("list[jpeg]", "list[png]"), partial(_list, skipped=4)),
    **dict.fromkeys(("jpeg_array", "jpegarray"), partial(_list, skipped=0)),
}
