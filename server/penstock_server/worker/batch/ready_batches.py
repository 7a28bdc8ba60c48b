"""Takes batches that user code has stacked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.columns import TEXT, Columns
from penstock_proto.spec import Spec, leaf_list, leaves

from .collate import Array, BadSample, Raised, Timed
from .leaf_check import LeafCheck, TextCheck, flattener, joined
from .sample_spec import check_lengths


class ReadyBatches(Timed):
    """Takes batches that user code has stacked. A row of a store is a list with the arrays of one batch.

    With `copy` the arrays are private copies. Without it they are those that user code yielded, and must be used before
    it runs on. With `one_length` all leaves of a batch must have the same number of rows.
    """

    def __init__(self, spec: Spec, *, copy: bool, one_length: bool = False) -> None:
        super().__init__()
        self._spec = spec
        self._one_length = one_length and len(leaf_list(spec)) > 1
        self._flatten = flattener(spec)
        self._columns = Columns(spec, None)
        self._leaves = [(TextCheck if leaf.text else LeafCheck)(path, leaf, ready=True) for path, leaf in leaves(spec)]
        self._text = any(column.kind is TEXT for column in self._columns.columns)
        self._copy = copy

    def store(self, rows: int) -> list[Any]:
        """Return room for `rows` batches."""
        return [None] * rows

    def fill(self, store: list[Any], row: int, stop: int, batches: Iterator[Any]) -> int:
        """Put batches in the rows from `row` to `stop`. Return and raise the same as `Rows.fill`."""
        try:
            for batch in islice(batches, stop - row):
                try:
                    fitted = [check.fit(v) for v, check in zip(self._flatten(batch), self._leaves, strict=True)]
                    if self._one_length:
                        check_lengths(self._spec, fitted)
                except SpecError as error:
                    raise BadSample(error.message, row) from None
                store[row] = self._stored(fitted)
                row += 1
        except BadSample:
            raise
        except BaseException as error:
            raise Raised(error, row) from error
        return row

    def _stored(self, fitted: list[Any]) -> list[Array]:
        """Return the arrays to store for the leaves of a batch."""
        if not self._text:
            return [np.array(v) if self._copy else np.asarray(v) for v in fitted]
        arrays: list[Array] = []
        for column, value in zip(self._columns.columns, fitted, strict=True):
            if column.kind is TEXT:
                arrays += joined(value.reshape(-1).tolist())
            else:
                arrays.append(np.array(value) if self._copy else np.asarray(value))
        return arrays

    def move(self, store: list[Any], rows: npt.NDArray[np.int64], target: list[Any]) -> None:
        """Move the given rows of `store`, in this order, to the first rows of `target`."""
        for i, row in enumerate(rows.tolist()):
            target[i], store[row] = store[row], None

    def first(self, store: list[Any], rows: int) -> list[Any]:
        """Return the first rows."""
        return store[:rows]

    # --- a complete batch ---

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each stored array."""
        return self._columns.dtypes

    def shapes(self, store: list[Any], rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each stored array of the first batch."""
        return tuple(array.shape for array in store[0])

    def keep(self, store: list[Any]) -> None:
        """Copy the first batch: the generator may reuse its buffers in another lane."""
        store[0] = [array.copy() for array in store[0]]

    def count(self, store: list[Any], rows: int) -> int:
        """Return the number of rows of the first batch."""
        at = 0
        for column in self._columns.columns:
            if column.leaf.shape:
                array = store[0][at + column.arrays - 1]
                if column.kind is not TEXT:
                    return len(array)
                each = math.prod(dim or 0 for dim in column.leaf.shape[1:])
                return (len(array) - 1) // each if each else 0
            at += column.arrays
        return 1

    def write(self, store: list[Any], rows: int, arrays: Sequence[Array]) -> None:
        """Write the first batch."""
        for target, array in zip(arrays, store[0], strict=True):
            target[...] = array
