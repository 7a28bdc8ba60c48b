"""`Ragged`: a batch of arrays of different lengths in NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt


class Ragged:
    """The rows of a ragged leaf: arrays of one dtype that differ in their first dimension.

    `tf.RaggedTensor.from_row_splits(ragged.values, ragged.row_splits)` is the same in TensorFlow, and
    `ragged[i]` is row i.

    Attributes:
        values: all rows, one after the other, `[sum of lengths, ...]`.
        row_splits: int64 `[rows + 1]`: row i is `values[row_splits[i] : row_splits[i + 1]]`.
    """

    __slots__ = ("row_splits", "values")

    def __init__(self, values: npt.NDArray[Any], row_splits: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.row_splits = row_splits

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        """Return row `row`, an array over `values`.

        Raises:
            IndexError: there is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.row_splits[row] : self.row_splits[row + 1]]

    def __iter__(self) -> Iterator[npt.NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        return f"<Ragged of {len(self)} rows, {self.values.dtype} {self.values.shape} in all>"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each row."""
        return np.diff(self.row_splits)
