"""Checks values against one leaf of the spec, and finds the leaves of a sample."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.inferring import as_array, as_text, is_masked
from penstock_proto.spec import DictSpec, Leaf, Spec, TupleSpec, flatten, numpy_dtype
from penstock_proto.value_text import shown

from ...sources.dtypes import converted

Array: TypeAlias = npt.NDArray[Any]

_EMPTY = (
    "this batch is empty. If it is an item of an indexable object, the object's `__len__` probably counts too many "
    "items; a generator leaves an empty batch out"
)


class LeafCheck:
    """Checks values against one leaf of the spec."""

    def __init__(self, path: str, leaf: Leaf, *, ready: bool) -> None:
        self._path = path
        self._leaf = leaf
        self._what = "batch" if ready else "sample"
        self.dtype = numpy_dtype(leaf.dtype)
        self.shape = tuple(dim or 0 for dim in leaf.shape)
        self._fixed = [(axis, dim) for axis, dim in enumerate(leaf.shape) if dim is not None]
        self.scalar = self.dtype.type if leaf.shape == () else None
        self._kind = self.dtype.kind if leaf.dtype != "bfloat16" else "f"
        self._number, self._low, self._high = _numbers(self.dtype)

    def fit(self, value: Any) -> Any:
        """Return `value`, or an array of it, that can be assigned to a leaf's row without changing its meaning.

        Raises:
            SpecError: its structure, dtype or shape differs.
        """
        kind = type(value)
        if kind is self.scalar:
            return value
        if kind is self._number and self._low <= value <= self._high and self._leaf.shape == ():
            return value
        if isinstance(value, np.ndarray) and self._is_plain(value):  # of a subclass, such as np.memmap
            return np.asarray(value)
        if isinstance(value, tuple | Mapping):
            raise self._error(value, "every sample of a feed needs the same structure")
        array = as_array(value, self._path)
        if self._is_plain(array):
            return array
        if array.dtype.name != self._leaf.dtype:
            if kind not in (bool, int, float, complex, list):
                raise self._error(value, self._how_to_fit(array))
            array = self._from_python(value, array)
        if not self._has_shape(array.shape):
            if kind is list and not value and self._leaf.shape[:1] in ((None,), (0,)):  # of any number of dimensions
                return np.empty(self.shape, self.dtype)
            raise self._error(value, self._how_to_shape(array.shape))
        return array

    def _is_plain(self, array: Array) -> bool:
        """Whether it has exactly this dtype, and a shape that fits."""
        plain = type(array) is np.ndarray or not is_masked(array)
        return plain and array.dtype == self.dtype and (array.shape == self.shape or self._has_shape(array.shape))

    def _how_to_fit(self, array: Array) -> str:
        """Return what to do about an array of another dtype."""
        wanted = self._leaf.dtype
        if self._is_empty(array.shape):  # np.array([]) is float64, whatever the other batches are
            return _EMPTY
        if wanted != "bfloat16" and array.dtype.kind in "biuf" and converted(array, self.dtype) is None:
            both = np.promote_types(array.dtype, self.dtype)
            fits = both if both.kind in (array.dtype.kind, self.dtype.kind) else array.dtype  # no float for integers
            return f"{wanted} cannot hold it: yield all samples with .astype({fits.name!r}), or declare that dtype"
        return (
            f"yield it with .astype({wanted!r}), which a transform= can do too (or dtypes=, for CSV and JSON lines), "
            f"or declare {array.dtype.name} with Feed(spec=...)"
        )

    def _has_shape(self, shape: tuple[int, ...]) -> bool:
        if len(shape) != len(self.shape):
            return False
        for axis, dim in self._fixed:  # noqa: SIM110 - a generator would take longer than all of this
            if shape[axis] != dim:
                return False
        return True

    def _how_to_shape(self, shape: tuple[int, ...]) -> str:
        """Return what to do about an array of another shape."""
        wanted = self._leaf.shape
        if self._is_empty(shape):
            return _EMPTY
        if len(shape) != len(wanted):
            return (
                f"a leaf has the same number of dimensions in every {self._what}, here {len(wanted)}. If "
                f"Feed(spec=...) has a wrong shape, correct it to {shape}"
            )
        dims = tuple(dim if dim == has else None for dim, has in zip(wanted, shape, strict=True))
        declared = f'with None for each dimension that varies, here Leaf("{self._leaf.dtype}", {dims})'
        if self._what == "batch":
            return f"give Feed(spec=...) {declared}"
        batches = "if the samples are batches already, give batch_size=None; " if wanted[1:] == shape[1:] != () else ""
        return (
            f"{batches}if Feed(spec=...) has a wrong shape, correct it to {shape}; if samples differ in shape, declare "
            f'the leaf there {declared}, and give batching="pad" or batching="ragged"'
        )

    def _is_empty(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is a ready batch without rows."""
        return self._what == "batch" and _has_no_rows(shape, self._leaf)

    def _from_python(self, value: Any, array: Array) -> Array:
        """Convert Python's own numbers, which have no size. They fit if they keep their value (floats may be
        rounded)."""
        has, wants = array.dtype.kind, self._kind
        if array.size == 0 and has == "f":  # an empty list
            return array.astype(self.dtype)
        if has in "iu" and wants in "iu":
            if self._low <= int(array.min()) and int(array.max()) <= self._high:
                return array.astype(self.dtype)
            raise self._error(value, f"{self._leaf.dtype} holds {self._low} to {self._high}")
        if (has in "iu" and wants in "fc") or (has == "f" and wants in "fc") or has == wants == "c":
            with np.errstate(over="ignore"):
                cast = array.astype(self.dtype)
            if bool(np.any(np.isinf(cast) & np.isfinite(array))):
                raise self._error(value, f"it is too large for {self._leaf.dtype}")
            return cast
        raise self._error(value, "yield all numbers of a leaf with one type, or declare it with Feed(spec=...)")

    def _error(self, value: Any, hint: str) -> SpecError:
        name = f"{self._what}{self._path}"
        return SpecError(f"{name} is {shown(value)}, but the feed's spec has {self._leaf} there: {hint}")


class TextCheck:
    """Checks values against one text leaf of the spec."""

    def __init__(self, path: str, leaf: Leaf, *, ready: bool) -> None:
        self._what = f"{'batch' if ready else 'sample'}{path}"
        self._ready = ready
        self._leaf = leaf

    def fit(self, value: Any) -> Array:
        """Return an array of `bytes` objects.

        Raises:
            SpecError: it is not text, or has another shape.
        """
        array = as_text(value)
        if array is None and isinstance(value, np.ndarray | list) and not np.size(value):
            array = np.empty(np.shape(value), object)  # no strings at all
        if array is None:
            raise SpecError(
                f"{self._what} is {shown(value)}, but the feed's spec has {self._leaf} there: yield str or bytes"
            )
        wanted = self._leaf.shape
        if array.ndim != len(wanted) or any(w not in (None, dim) for w, dim in zip(wanted, array.shape, strict=True)):
            hint = "every sample of a feed needs the same number of strings in a leaf. Join them, or fill up with ''"
            if self._leaf.ragged:
                hint = "yield a list of strings, with a list around it for each further ragged dimension"
            elif len(wanted) == array.ndim and not self._ready:
                dims = (None,) * len(wanted)
                hint += f", or declare the leaf in Feed(spec=...) as Leaf(str, {dims}, ragged=True)"
            if self._ready and _has_no_rows(array.shape, self._leaf):
                hint = _EMPTY
            raise SpecError(
                f"{self._what} has text of shape {array.shape}, but the feed's spec has {self._leaf} there: {hint}"
            )
        return array


def _has_no_rows(shape: tuple[int, ...], leaf: Leaf) -> bool:
    return shape[:1] == (0,) and bool(leaf.shape) and leaf.shape[0] != 0


def joined(strings: Sequence[bytes]) -> tuple[Array, Array]:
    """Return the joined strings as uint8, and their offsets as int64: one more than there are strings."""
    offsets = np.zeros(len(strings) + 1, np.int64)
    np.cumsum([len(string) for string in strings], out=offsets[1:])
    return np.frombuffer(b"".join(strings), np.uint8), offsets


def _numbers(dtype: np.dtype[Any]) -> tuple[type | None, float, float]:
    """Return the Python type whose numbers fit this dtype as they are, and their range."""
    if dtype.kind in "iu":
        return int, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "f":
        return float, float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return None, 0, 0


class _Unlike(Exception):
    """The sample is not built of plain tuples and dicts exactly like the spec: look more closely."""


def flattener(spec: Spec) -> Callable[[Any], Sequence[Any]]:
    """Return a function that lists the leaves of a sample in order: `spec.flatten`, but fast for usual samples."""
    if isinstance(spec, Leaf):
        return lambda sample: (sample,)
    plain = _plain_flattener(spec)

    def flattener(sample: Any) -> Sequence[Any]:
        try:
            return plain(sample)
        except (_Unlike, KeyError):
            return flatten(spec, sample)  # also raises the error that says what differs

    return flattener


def _plain_flattener(spec: TupleSpec | DictSpec) -> Callable[[Any], Sequence[Any]]:
    count = len(spec.items)
    if isinstance(spec, TupleSpec):

        def items(sample: Any) -> tuple[Any, ...]:
            if type(sample) is not tuple or len(sample) != count:
                raise _Unlike
            return sample

    else:
        get = operator.itemgetter(*spec.keys) if count > 1 else None
        keys = spec.keys

        def items(sample: Any) -> tuple[Any, ...]:
            if type(sample) is not dict or len(sample) != count:
                raise _Unlike
            return get(sample) if get else tuple(sample[key] for key in keys)

    if all(isinstance(item, Leaf) for item in spec.items):
        return items
    parts = [None if isinstance(item, Leaf) else _plain_flattener(item) for item in spec.items]

    def nested(sample: Any) -> Sequence[Any]:
        flat: list[Any] = []
        for item, part in zip(items(sample), parts, strict=True):
            if part is None:
                flat.append(item)
            else:
                flat.extend(part(item))
        return flat

    return nested
