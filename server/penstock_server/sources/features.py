"""`FixedLen`, `VarLen` and `FixedLenSequence`: declare the features of a `tf.train.Example` or `SequenceExample` for
`Feed.from_tfrecord`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from penstock_proto.value_text import shown

from .names_on_disk import on_disk_as

_NAMES = {"float": "float32", "int": "int64", "bytes": "bytes", "str": "bytes", "string": "bytes"}


@on_disk_as("penstock_server.features.FixedLen")
@dataclass(frozen=True)
class FixedLen:
    """A feature with the same number of values in every record, like `tf.io.FixedLenFeature`.

    Attributes:
        shape: shape of the array in a sample; `()` is a single value.
        dtype: "float32", "int64" or "bytes", the only dtypes that an Example can hold.
        default: the value in records without this feature, of this shape or a scalar. None: such a record is an error.
        decode: with dtype "bytes": the single value is the little-endian bytes of an array with this dtype, as for
            `tf.io.decode_raw`. `shape` is the shape of that array.

    Raises:
        TypeError, ValueError: an attribute cannot work.
    """

    shape: tuple[int, ...]
    dtype: Any
    default: Any = None
    decode: Any = None

    def __post_init__(self) -> None:
        shape: Any = (self.shape,) if isinstance(self.shape, int) else self.shape
        if not isinstance(shape, tuple | list) or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise TypeError(f"FixedLen: shape must be a tuple of whole numbers, got {shown(self.shape)}")
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", _dtype("FixedLen", self.dtype))
        if self.decode is not None:
            object.__setattr__(self, "decode", _decoded(self.dtype, self.decode))
        if self.default is not None:
            object.__setattr__(self, "default", self._checked_default())

    @property
    def count(self) -> int:
        """The number of values in `shape`."""
        return math.prod(self.shape)

    def _checked_default(self) -> Any:
        if self.dtype == "bytes" and self.decode is None:
            if not isinstance(self.default, bytes):
                raise TypeError(f"FixedLen: default of bytes must be bytes, got {shown(self.default)}")
            return self.default
        dtype = np.dtype(self.decode or self.dtype)
        array = np.asarray(self.default)
        if not _fits(array, dtype):
            raise TypeError(f"FixedLen: default {shown(self.default)} cannot be {dtype}")
        try:
            full: Any = np.broadcast_to(array.astype(dtype), self.shape)
        except ValueError:
            raise ValueError(
                f"FixedLen: default has shape {list(array.shape)}, and the feature has {list(self.shape)}"
            ) from None
        return full[()]


@on_disk_as("penstock_server.features.VarLen")
@dataclass(frozen=True)
class VarLen:
    """A feature whose number of values varies, like `tf.io.VarLenFeature`: a one-dimensional array, often padded.

    A record without the feature has no values. By default a feed stacks only arrays of the same length. So give
    `pad_to`, or let the feed pad each batch (`batching="pad"`) or keep the lengths (`batching="ragged"`).

    Attributes:
        dtype: "float32", "int64" or "bytes".
        pad_to: length to which the values are padded. None: the array has as many values as the record.
        pad_value: the value of the padding.
        cap: drop the values beyond `pad_to`; otherwise they are an error.

    Raises:
        TypeError, ValueError: an attribute cannot work.
    """

    dtype: Any
    pad_to: int | None = None
    pad_value: Any = 0
    cap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype("VarLen", self.dtype))
        if self.pad_to is not None and type(self.pad_to) is not int:
            raise TypeError(f"VarLen: pad_to must be a whole number or None, got {shown(self.pad_to)}")
        if self.pad_to is not None and self.pad_to < 1:
            raise ValueError(f"VarLen: pad_to must be at least 1, got {self.pad_to}")
        if self.cap and self.pad_to is None:
            raise ValueError("VarLen: cap=True drops values beyond pad_to: give pad_to= too")
        if self.dtype == "bytes":
            if self.pad_value == 0:
                object.__setattr__(self, "pad_value", b"")
            if not isinstance(self.pad_value, bytes):
                raise TypeError(f"VarLen: pad_value of bytes must be bytes, got {shown(self.pad_value)}")
        elif not _fits(np.asarray(self.pad_value), np.dtype(self.dtype)):
            raise TypeError(f"VarLen: pad_value {shown(self.pad_value)} cannot be {self.dtype}")


@on_disk_as("penstock_server.sources.features.FixedLenSequence")
@dataclass(frozen=True)
class FixedLenSequence:
    """A feature list of a `tf.train.SequenceExample`, like `tf.io.FixedLenSequenceFeature`: an array with one row for
    each step.

    The number of steps varies. So let the feed pad each batch (`batching="pad"`) or keep the lengths
    (`batching="ragged"`), as for `VarLen`. If a step is an array, give the feed a `spec=`, with None as the number of
    steps: `Leaf("float32", (None, 3))`.

    Attributes:
        shape: shape of a step, which is the same in every record; `()` is a single value.
        dtype: "float32", "int64" or "bytes".
        decode: as for `FixedLen`, for the bytes of each step.

    Raises:
        TypeError, ValueError: an attribute cannot work.
    """

    shape: tuple[int, ...]
    dtype: Any
    decode: Any = None

    def __post_init__(self) -> None:
        step = FixedLen(self.shape, self.dtype, decode=self.decode)
        for name in ("shape", "dtype", "decode"):
            object.__setattr__(self, name, getattr(step, name))

    @property
    def step(self) -> FixedLen:
        """The declaration of one step."""
        return FixedLen(self.shape, self.dtype, decode=self.decode)


Feature: TypeAlias = FixedLen | VarLen | FixedLenSequence
"""The declaration of one feature."""


def _dtype(who: str, dtype: Any) -> str:
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or dtype
    found = _NAMES.get(name, name) if isinstance(name, str) else None
    if found not in ("float32", "int64", "bytes"):
        raise TypeError(
            f'{who}: dtype must be "float32", "int64" or "bytes", as a tf.train.Example holds no others, got '
            f"{shown(dtype)}: convert the values afterwards"
        )
    return str(found)


def _fits(array: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether numbers keep their values in this dtype. Floats may be rounded."""
    if array.dtype.kind not in "biuf":
        return False
    return dtype.kind in "fc" or bool(np.all(array.astype(dtype) == array))


def _decoded(dtype: str, decode: Any) -> str:
    if dtype != "bytes":
        raise ValueError(f'FixedLen: decode= is for dtype "bytes", got {dtype}: leave it out')
    try:
        found = np.dtype(decode)
    except TypeError:
        raise TypeError(f"FixedLen: decode must be a dtype such as 'uint8', got {shown(decode)}") from None
    if found.kind not in "biufc":
        raise TypeError(f"FixedLen: decode must be a dtype of numbers or bool, got {found}")
    return str(found.name)
