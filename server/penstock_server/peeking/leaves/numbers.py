"""Finds the range of numbers that come array by array, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_PIECE = 1 << 16
"""Values that are processed together. A large array is never copied as a whole."""


class Numbers:
    """Counts, minimum, maximum and mean of numbers. A complex number counts as its magnitude.

    Attributes:
        count: the number of all values.
        nans, infinities: the numbers of values that are not finite. `low`, `high` and `mean` are about the others.
        low, high: the least and the greatest value; None before the first finite value.
        present: for uint8 and bools, which of the values 0 to 255 occur; otherwise None.
    """

    def __init__(self) -> None:
        self.count = self.nans = self.infinities = 0
        self.low: int | float | None = None
        self.high: int | float | None = None
        self.present: npt.NDArray[np.bool_] | None = None
        self._mean = 0.0

    @property
    def mean(self) -> float | None:
        """The mean of the finite values, or None if there are none."""
        return None if self.low is None else self._mean

    def add(self, array: npt.NDArray[Any]) -> None:
        """Count the values of an array of numbers or bools."""
        if not array.size:
            return
        for piece in np.nditer(array, ["external_loop", "buffered"], buffersize=_PIECE):
            self._add(np.asarray(piece))

    def _add(self, piece: npt.NDArray[Any]) -> None:
        self.count += piece.size
        if piece.dtype in (np.uint8, np.bool_):
            present = np.bincount(piece, minlength=256) > 0
            self.present = present if self.present is None else self.present | present
        if piece.dtype.kind not in "biu":
            piece = (np.abs(piece) if piece.dtype.kind == "c" else piece).astype(np.float64)
            finite = np.isfinite(piece)
            if not finite.all():
                nans = int(np.isnan(piece).sum())
                self.nans += nans
                self.infinities += piece.size - int(finite.sum()) - nans
                piece = piece[finite]
                if not piece.size:
                    return
        low, high = piece.min().item(), piece.max().item()
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        counted = self.count - self.nans - self.infinities
        self._mean += (float(piece.mean(dtype=np.float64)) - self._mean) * piece.size / counted
