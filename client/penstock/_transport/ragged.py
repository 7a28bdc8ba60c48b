"""`Ragged`: a batch of arrays of different lengths in NumPy, or of lists of such arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


class Ragged:
    """The rows of a ragged leaf: arrays of one dtype that differ in their first dimension.

    `tf.RaggedTensor.from_row_splits(ragged.values, ragged.row_splits)` is the same in TensorFlow, and
    `ragged[i]` is row i. If a leaf is ragged in several dimensions, its values are ragged again, and so are its rows.
    `tf.RaggedTensor.from_nested_row_splits(ragged.flat_values, ragged.nested_row_splits)` is the same then.

    Attributes:
        values: all rows, one after the other: an array `[sum of lengths, ...]`, or a `Ragged` of that many rows.
        row_splits: int64 `[rows + 1]`: row i is `values[row_splits[i] : row_splits[i + 1]]`.
    """

    __slots__ = ("row_splits", "values")

    def __init__(self, values: npt.NDArray[Any] | Ragged, row_splits: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.row_splits = row_splits

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, row: int) -> Any:
        """Return row `row`: an array over `values`, or a `Ragged` over them.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        start, stop = self.row_splits[row : row + 2].tolist()
        return self.values._part(start, stop) if isinstance(self.values, Ragged) else self.values[start:stop]

    def __iter__(self) -> Iterator[Any]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<Ragged of {len(self)} rows, {self.dtype} {self.flat_values.shape} in all>"

    def _part(self, start: int, stop: int) -> Ragged:
        """Return the rows from `start` to `stop`, over the same values."""
        splits = self.row_splits[start : stop + 1]
        first, last = splits[[0, -1]].tolist()
        values = self.values._part(first, last) if isinstance(self.values, Ragged) else self.values[first:last]
        return Ragged(values, splits - first)

    @property
    def flat_values(self) -> npt.NDArray[Any]:
        """The array of all values, within all ragged dimensions."""
        return self.values.flat_values if isinstance(self.values, Ragged) else self.values

    @property
    def nested_row_splits(self) -> list[npt.NDArray[np.int64]]:
        """The row splits of each ragged dimension, the outermost first."""
        return [self.row_splits, *(self.values.nested_row_splits if isinstance(self.values, Ragged) else ())]

    def tolist(self) -> list[Any]:
        """Return the rows as nested Python lists."""
        return [row.tolist() for row in self]

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The number of rows, None for each ragged dimension, and the other dimensions."""
        return (len(self), None, *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.flat_values.dtype

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each row."""
        return np.diff(self.row_splits)
