"""Checks samples against the feed's spec, and copies them to their rows.

Three classes have the same interface: `Rows` stacks samples of one size, `VariableRows` (variable_rows.py) collects
samples that differ in size, and `ReadyBatches` (ready_batches.py) takes batches that user code has stacked. They fill a
*store*: for `Rows` one array per leaf, whose first dimension is the row; for `ReadyBatches` a list whose rows are whole
batches. This file does not know where a store is, or in which order samples come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.spec import Spec, leaves

from ...sources.row_stacks import RowStack, RowStacks
from ...sources.structure import Columns
from .leaf_check import LeafCheck, flattener

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


class Collate(Protocol):
    """Fills stores. See `Rows` for the methods."""

    copying: int

    def store(self, rows: int) -> Any: ...

    def fill(self, store: Any, row: int, stop: int, samples: Iterator[Any]) -> int: ...

    def timed_fill(self, store: Any, row: int, stop: int, samples: Iterator[Any]) -> int: ...

    def fill_stacked(self, store: Any, row: int, stop: int, stacks: RowStacks) -> int: ...

    def move(self, store: Any, rows: npt.NDArray[np.int64], target: Any) -> None: ...

    def first(self, store: Any, rows: int) -> Any: ...


class CollateAlone(Collate, Protocol):
    """Also writes batches that vary in size, each to a slot of its own. See `VariableRows` for the methods."""

    @property
    def dtypes(self) -> list[str]: ...

    def shapes(self, store: Any, rows: int) -> tuple[tuple[int, ...], ...]: ...

    def keep(self, store: Any) -> None: ...

    def count(self, store: Any, rows: int) -> int: ...

    def write(self, store: Any, rows: int, arrays: Sequence[Array]) -> None: ...


class Timed:
    """Estimates how much of a fill's time goes into checking and copying samples, rather than into user code.

    Reading the clock for each sample would cost as much as a small sample. So it times one sample in 32, or one per
    fill if a fill is longer.

    Attributes:
        copying: estimated ns that the last `timed_fill` or `fill_stacked` spent on checking and copying.
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
                    self._each = sorted(self._times)[len(self._times) // 2]  # the median: some lost the CPU meanwhile
                    self._until = 32
        self.copying = (end - row) * self._each
        return end

    def fill_stacked(self, store: Any, row: int, stop: int, stacks: RowStacks) -> int:
        """Do what `timed_fill` does, with many rows at once where the store allows it."""
        self.copying = 0
        while row < stop:
            try:
                stack = stacks.take(stop - row)
            except BaseException as error:
                raise Raised(error, row) from error
            if stack is None:
                break
            began = time.monotonic_ns()
            end = row + stack.rows
            if not self._put(store, row, stack):
                self.fill(store, row, end, stack.samples())
            del stack  # before the next rows are read
            row = end
            self.copying += time.monotonic_ns() - began
        return row

    def _put(self, store: Any, row: int, stack: RowStack) -> bool:
        """Copy stacked rows to the rows from `row` on, or return False if it takes samples.

        Raises:
            BadSample: a value does not fit the spec.
        """
        return False

    def _mark(self, sample: Any) -> Any:
        self._came = time.monotonic_ns()
        return sample


class Rows(Timed):
    """Stacks samples that all have the dtypes and shapes of the static `spec`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self._flatten = flattener(spec)
        self._leaves = [LeafCheck(path, leaf, ready=False) for path, leaf in leaves(spec)]
        self._checks = [(check.dtype, check.shape, check.scalar, check.fit) for check in self._leaves]
        self._order: tuple[Columns, list[int] | None] | None = None

    def store(self, rows: int) -> list[Array]:
        """Return memory for `rows` samples."""
        return [np.empty((rows, *check.shape), check.dtype) for check in self._leaves]

    def fill(self, store: Sequence[Array], row: int, stop: int, samples: Iterator[Any]) -> int:
        """Copy samples to the rows from `row` to `stop`, each before the next is requested.

        Returns:
            `stop`, or the first unfilled row if `samples` ended early.

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

    def _put(self, store: Sequence[Array], row: int, stack: RowStack) -> bool:
        order, end = self._order_of(stack.columns), row + stack.rows
        if order is None:
            return False
        array_type = np.ndarray
        for target, number, (dtype, shape, scalar, fit) in zip(store, order, self._checks, strict=True):
            part = stack.parts[number]
            if type(part) is array_type and part.dtype == dtype and part.shape[1:] == shape:
                target[row:end] = part
                continue
            for at, value in enumerate(part, row):
                kind = type(value)
                if kind is scalar or (kind is array_type and value.dtype is dtype and value.shape == shape):
                    target[at] = value
                    continue
                try:
                    target[at] = fit(value)
                except SpecError as error:
                    raise BadSample(error.message, at) from None
        return True

    def _order_of(self, columns: Columns) -> list[int] | None:
        """Return which column each leaf of the spec is, or None if a leaf is no column as a whole."""
        if self._order is None or self._order[0] is not columns:
            try:
                flat = list(self._flatten(columns.maker()(range(len(columns.names)))))
            except SpecError:
                flat = []
            order = flat if len(flat) == len(self._leaves) and all(type(one) is int for one in flat) else None
            self._order = columns, order
        return self._order[1]

    def move(self, store: Sequence[Array], rows: npt.NDArray[np.int64], target: Sequence[Array]) -> None:
        """Copy the given rows of `store`, in this order, to the first rows of `target`."""
        for source, leaf in zip(store, target, strict=True):
            np.take(source, rows, axis=0, out=leaf[: len(rows)], mode="clip")  # "raise" would copy twice

    def first(self, store: Sequence[Array], rows: int) -> list[Array]:
        """Return a copy of the first rows."""
        return [leaf[:rows].copy() for leaf in store]
