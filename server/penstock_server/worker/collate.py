"""Checks samples against the feed's spec, and copies them to their rows.

Two classes have the same interface: `Rows` stacks samples, `ReadyBatches` takes batches that user code has stacked.
They fill a *store*: for `Rows` one array per leaf, whose first dimension is the row; for `ReadyBatches` a list whose
rows are whole batches. This file does not know where a store is, or which sample comes when.
"""

from __future__ import annotations

import hashlib
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.spec import (
    DictSpec,
    Leaf,
    Spec,
    TupleSpec,
    as_array,
    flatten,
    infer,
    leaf_list,
    leaves,
    map_leaves,
    numpy_dtype,
    shown,
)

Array: TypeAlias = npt.NDArray[Any]


class BadSample(Exception):
    """The sample for row `row` does not fit the spec. The caller adds where it came from."""

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.message = message
        self.row = row


class Raised(Exception):
    """User code raised `error`, which need not be an Exception, before row `row` was filled."""

    def __init__(self, error: BaseException, row: int) -> None:
        super().__init__(error, row)
        self.error = error
        self.row = row


class _Timed:
    """Estimates how much of a fill's time goes into checking and copying samples, and not into user code.

    To read the clock at each sample would cost as much as a small sample. So it times one sample in 32, or one in a
    fill if that is longer.

    Attributes:
        copying: estimated ns that the last `timed_fill` spent on checking and copying.
    """

    fill: Callable[[Any, int, int, Iterator[Any]], int]
    copying = 0
    _each = _came = _until = 0

    def __init__(self) -> None:
        self._times: deque[int] = deque(maxlen=9)

    def timed_fill(self, store: Any, row: int, stop: int, samples: Iterator[Any]) -> int:
        """Do what `fill` does, and set `copying`."""
        self.copying = 0
        last = stop - 1
        self._until -= stop - row
        if self._until >= 0:
            end = self.fill(store, row, stop, samples)
        else:
            end = self.fill(store, row, last, samples) if row < last else row
            if end == last:
                end = self.fill(store, last, stop, map(self._mark, samples))
                if end == stop:
                    self._times.append(time.monotonic_ns() - self._came)
                    self._each = sorted(self._times)[len(self._times) // 2]  # some lost the CPU meanwhile
                    self._until = 32
        self.copying = (end - row) * self._each
        return end

    def _mark(self, sample: Any) -> Any:
        self._came = time.monotonic_ns()
        return sample


class Rows(_Timed):
    """Stacks samples that all have the dtypes and shapes of the static `spec`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._flatten = _flattener(spec)
        self._leaves = [_LeafCheck(path, leaf, ready=False) for path, leaf in leaves(spec)]
        self._checks = [(check.dtype, check.shape, check.scalar, check.fit) for check in self._leaves]

    def store(self, rows: int) -> list[Array]:
        """Return memory for `rows` samples."""
        return [np.empty((rows, *check.shape), check.dtype) for check in self._leaves]

    def fill(self, store: Sequence[Array], row: int, stop: int, samples: Iterator[Any]) -> int:
        """Copy samples to the rows from `row` to `stop`, each before the next is requested.

        Returns:
            `stop`, or, if `samples` ended before, the first row that was not filled.

        Raises:
            BadSample: a sample does not fit the spec.
            Raised: `samples` raised anything.
        """
        flat_of, array_type = self._flatten, np.ndarray
        targets = [(target, *check) for target, check in zip(store, self._checks, strict=True)]
        try:
            for sample in islice(samples, stop - row):
                try:
                    # strict=True takes as long as a leaf does; `flat_of` returns the right number.
                    for value, (target, dtype, shape, scalar, fit) in zip(flat_of(sample), targets):  # noqa: B905
                        kind = type(value)
                        if kind is array_type:
                            if value.dtype is dtype and value.shape == shape:
                                target[row] = value
                                continue
                        elif kind is scalar:
                            target[row] = value
                            continue
                        target[row] = fit(value)
                except SpecError as error:
                    raise BadSample(error.message, row) from None
                row += 1
        except BadSample:
            raise
        except BaseException as error:
            raise Raised(error, row) from error
        return row

    def move(self, store: Sequence[Array], rows: npt.NDArray[np.int64], target: Sequence[Array]) -> None:
        """Copy the given rows of `store`, in this order, to the first rows of `target`."""
        for source, leaf in zip(store, target, strict=True):
            np.take(source, rows, axis=0, out=leaf[: len(rows)], mode="clip")  # "raise" would copy twice

    def first(self, store: Sequence[Array], rows: int) -> list[Array]:
        """Return a copy of the first rows."""
        return [leaf[:rows].copy() for leaf in store]


class ReadyBatches(_Timed):
    """Takes batches that user code has stacked. A row of a store is a list of arrays, one per leaf.

    With `copy` the arrays are private copies; without, they are those that user code yielded, to be used before it runs
    on. With `one_length` all leaves of a batch must have the same number of rows.
    """

    def __init__(self, spec: Spec, *, copy: bool, one_length: bool = False) -> None:
        super().__init__()
        self._spec = spec
        self._one_length = one_length and len(leaf_list(spec)) > 1
        self._flatten = _flattener(spec)
        self._leaves = [_LeafCheck(path, leaf, ready=True) for path, leaf in leaves(spec)]
        self._copy = copy

    def store(self, rows: int) -> list[Any]:
        """Return room for `rows` batches."""
        return [None] * rows

    def fill(self, store: list[Any], row: int, stop: int, batches: Iterator[Any]) -> int:
        """Put batches in the rows from `row` to `stop`; returns and raises as `Rows.fill`."""
        try:
            for batch in islice(batches, stop - row):
                try:
                    fitted = [check.fit(v) for v, check in zip(self._flatten(batch), self._leaves, strict=True)]
                    if self._one_length:
                        check_lengths(self._spec, fitted)
                except SpecError as error:
                    raise BadSample(error.message, row) from None
                store[row] = [np.array(v) if self._copy else np.asarray(v) for v in fitted]
                row += 1
        except BadSample:
            raise
        except BaseException as error:
            raise Raised(error, row) from error
        return row

    def move(self, store: list[Any], rows: npt.NDArray[np.int64], target: list[Any]) -> None:
        """Move the given rows of `store`, in this order, to the first rows of `target`."""
        for i, row in enumerate(rows.tolist()):
            target[i], store[row] = store[row], None

    def first(self, store: list[Any], rows: int) -> list[Any]:
        """Return the first rows."""
        return store[:rows]


Collate: TypeAlias = Rows | ReadyBatches


def infer_spec(sample: Any, batch_size: int | None) -> Spec:
    """Return the spec of a feed with this first sample. With `batch_size` None it is a ready batch, and its first
    dimension varies.

    Raises:
        SpecError: it cannot be served.
    """
    spec = infer(sample)
    if batch_size is not None:
        return spec
    check_lengths(spec, flatten(spec, sample))
    return map_leaves(lambda leaf: Leaf(leaf.dtype, (None, *leaf.shape[1:])) if leaf.shape else leaf, spec)


def check_lengths(spec: Spec, flat: Sequence[Any]) -> None:
    """Check that all leaves of a ready batch have the same number of rows. (A leaf without dimensions has none.)

    Raises:
        SpecError: they do not.
    """
    shapes = [np.shape(value) for value in flat]
    if len({shape[0] for shape in shapes if shape}) > 1:
        rows = [f"batch{path} has {shape[0]}" for (path, _), shape in zip(leaves(spec), shapes, strict=True) if shape]
        raise SpecError(
            f"the leaves of a batch have different numbers of rows: {', '.join(rows[:8])}"
            f"{', ...' if len(rows) > 8 else ''}. Yield the "
            "same number for each, or, if they are meant to differ (the nodes and edges of a graph), declare them with "
            "Feed(spec=...)"
        )


DIGEST = 8
"""Bytes of a leaf's digest."""


def digests_of(sample: Any) -> bytes:
    """Return the digests of a sample's leaves, concatenated: each of dtype, shape and bytes.

    Raises:
        SpecError: the sample cannot be served.
    """
    digests = []
    for value in flatten(infer(sample), sample):
        array = as_array(value)
        digest = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=DIGEST)
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        digests.append(digest.digest())
    return b"".join(digests)


def nbytes_of(spec: Spec, sample: Any) -> int:
    """Return the bytes of one sample or ready batch; `sample` is used only if the spec is not static."""
    total = 0
    flat = flatten(spec, sample) if sample is not None else [None] * len(leaf_list(spec))
    for value, leaf in zip(flat, leaf_list(spec), strict=True):
        shape = leaf.shape if leaf.static else as_array(value).shape
        total += numpy_dtype(leaf.dtype).itemsize * int(np.prod([dim or 0 for dim in shape], dtype=np.int64))
    return total


class _LeafCheck:
    """Checks values against one leaf of the spec."""

    def __init__(self, path: str, leaf: Leaf, *, ready: bool) -> None:
        self._path = path
        self._leaf = leaf
        self._what = "batch" if ready else "sample"
        self.dtype = numpy_dtype(leaf.dtype)
        self.shape = tuple(dim or 0 for dim in leaf.shape)  # only `Rows` reads it, and there is no None there
        self.scalar = self.dtype.type if leaf.shape == () else None
        self._kind = self.dtype.kind if leaf.dtype != "bfloat16" else "f"
        self._number, self._low, self._high = _numbers(self.dtype)

    def fit(self, value: Any) -> Any:
        """Return `value`, or an array of it, that can be assigned to a leaf's row without a change of its meaning.

        Raises:
            SpecError: its structure, dtype or shape differs.
        """
        kind = type(value)
        if kind is self._number and self._low <= value <= self._high and self._leaf.shape == ():
            return value
        if isinstance(value, np.ndarray) and self._is_plain(value):  # of a subclass, np.memmap for one
            return np.asarray(value)
        if isinstance(value, tuple | Mapping):
            raise self._error(value, "every sample of a feed needs the same structure")
        array = as_array(value, self._path)
        if self._is_plain(array):
            return array
        if array.dtype.name != self._leaf.dtype:
            if kind not in (bool, int, float, complex, list):
                raise self._error(
                    value, f"yield it with .astype({self._leaf.dtype!r}), or declare its dtype with Feed(spec=...)"
                )
            array = self._from_python(value, array)
        if not self._has_shape(array.shape):
            if self._what == "batch":
                hint = "give Feed(spec=...) with None for each dimension that varies"
            else:
                hint = "crop or pad samples to one shape, or yield whole batches with batch_size=None"
            raise self._error(value, hint)
        return array

    def _is_plain(self, array: Array) -> bool:
        """Whether it has exactly this dtype and shape; if a dimension may vary, `fit` looks more closely."""
        is_masked = isinstance(array, np.ma.MaskedArray)
        return array.dtype == self.dtype and array.shape == self.shape and not is_masked

    def _has_shape(self, shape: tuple[int, ...]) -> bool:
        wanted = self._leaf.shape
        return len(shape) == len(wanted) and all(w in (None, dim) for w, dim in zip(wanted, shape, strict=True))

    def _from_python(self, value: Any, array: Array) -> Array:
        """Convert Python's own numbers, which have no size: they fit where they keep their value (floats: rounded)."""
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


def _numbers(dtype: np.dtype[Any]) -> tuple[type | None, float, float]:
    """Return the Python type whose numbers fit this dtype as they are, and their range."""
    if dtype.kind in "iu":
        return int, int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "f":
        return float, float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    return None, 0, 0


class _Unlike(Exception):
    """The sample is not built of plain tuples and dicts exactly like the spec: look more closely."""


def _flattener(spec: Spec) -> Callable[[Any], Sequence[Any]]:
    """Return a function that lists the leaves of a sample in order: `spec.flatten`, but fast for usual samples."""
    if isinstance(spec, Leaf):
        return lambda sample: (sample,)
    plain = _plain_flattener(spec)

    def flattener(sample: Any) -> Sequence[Any]:
        try:
            return plain(sample)
        except (_Unlike, KeyError):
            return flatten(spec, sample)  # also raises the error that says what is unlike

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
