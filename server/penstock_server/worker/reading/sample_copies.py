"""Copies samples that must wait while their generator runs on: it may fill the same arrays again.

A copy gives a transform the same bytes as the sample itself: arrays keep their strides and flags, since sums and other
results may depend on them. Where that cannot be promised, nothing is copied: of objects of other types, and of arrays
that share memory within a sample.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import fractions
import pathlib
import sys
import uuid
from typing import Any

import numpy as np
import numpy.typing as npt

_CONSTANT = frozenset(
    {
        type(None),
        type(Ellipsis),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        fractions.Fraction,
        uuid.UUID,
        pathlib.Path,
        pathlib.PosixPath,
        pathlib.PurePath,
        pathlib.PurePosixPath,
    }
)
"""The types of values that never change."""

_EACH = 64
"""Bytes that a value counts besides those of its array, string or bytes."""

_WIDEST = 2
"""An array is copied with the gaps between its elements. It may be this many times as large with them."""

_KINDS = "biufcmMSUV"
"""The kinds of the dtypes of arrays that are copied."""


class NotCopied(Exception):
    """The sample has a value that cannot be copied. `what` describes it, such as "a value of type Sample"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class SampleCopy:
    """A copy of a sample.

    Raises:
        NotCopied: the sample cannot be copied.

    Attributes:
        sample: the copy.
        nbytes: about how much memory it takes.
    """

    def __init__(self, sample: Any) -> None:
        self.nbytes = 0
        self._copied: dict[int, Any] = {}
        """Copies of arrays and containers, by the ids of the originals."""
        self._owners: dict[int, list[npt.NDArray[Any]]] = {}
        """Arrays by the id of what their memory belongs to."""
        self.sample = self._copy(sample)
        del self._copied, self._owners

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        self.nbytes += _EACH
        if kind in _CONSTANT:
            if kind is str or kind is bytes:
                self.nbytes += len(value)
            return value
        if id(value) in self._copied:
            return self._copied[id(value)]
        copy: Any
        if kind is np.ndarray:
            copy = self._array(value)
        elif kind is tuple:
            copy = tuple([self._copy(one) for one in value])
        elif kind is dict:
            copy = self._copied[id(value)] = {}
            copy.update((self._copy(key), self._copy(one)) for key, one in value.items())
        elif kind is list:
            copy = self._copied[id(value)] = []
            copy.extend(self._copy(one) for one in value)
        elif isinstance(value, tuple) and hasattr(kind, "_make") and not hasattr(value, "__dict__"):  # a named tuple
            copy = kind._make([self._copy(one) for one in value])
        elif isinstance(value, np.generic) and kind.__module__ == "numpy" and not isinstance(value, np.void):
            return value
        elif _is_tensor(kind) and value.dtype.is_numpy_compatible and value.dtype.name != "string":  # it never changes
            self.nbytes += value.dtype.size * value.shape.num_elements()
            return value
        elif dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__:
            copy = self._dataclass(value)
        elif kind is getattr(sys.modules.get("PIL.Image"), "Image", None):  # not one that is still in its file
            copy = self._image(value)
        else:
            raise NotCopied(f"a value of type {kind.__qualname__}")
        self._copied[id(value)] = copy
        return copy

    def _array(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype.hasobject or array.dtype.kind not in _KINDS or not array.flags.aligned:
            raise NotCopied(f"an array of dtype {array.dtype}{'' if array.flags.aligned else ', not aligned'}")
        owner: Any = array
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        others = self._owners.setdefault(id(owner), [])
        if any(np.may_share_memory(array, other) for other in others):
            raise NotCopied("arrays that share memory")
        others.append(array)
        copy = array.copy(order="K") if array.flags.c_contiguous or array.flags.f_contiguous else array
        if copy is array or copy.strides != array.strides:
            copy = _with_gaps(array)
        copy.flags.writeable = array.flags.writeable
        self.nbytes += array.nbytes
        return copy

    def _dataclass(self, value: Any) -> Any:
        names = [field.name for field in dataclasses.fields(value)]
        if getattr(value, "__dict__", {}).keys() - set(names):
            raise NotCopied(f"a {type(value).__qualname__} with further attributes")
        copy = self._copied[id(value)] = object.__new__(type(value))
        for name in names:
            if hasattr(value, name):
                object.__setattr__(copy, name, self._copy(getattr(value, name)))
        return copy

    def _image(self, image: Any) -> Any:
        copy = image.copy()
        if vars(image).keys() - vars(copy).keys():
            raise NotCopied("an image with further attributes")
        self.nbytes += 4 * image.width * image.height
        return copy


def _is_tensor(kind: type) -> bool:
    """Whether this is TensorFlow's type of tensors, which is not imported here."""
    return kind.__name__ == "EagerTensor" and kind.__module__.startswith("tensorflow.")


def _with_gaps(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a copy with the same strides."""
    first, end = np.lib.array_utils.byte_bounds(array)
    if end - first > _WIDEST * array.nbytes + _EACH:
        raise NotCopied("an array with wide gaps between its elements")
    memory = np.empty(end - first, np.uint8)
    at = array.__array_interface__["data"][0] - first
    copy: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, at, array.strides)
    copy[...] = array
    return copy
