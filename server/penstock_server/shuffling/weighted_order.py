"""The order of an indexable feed with `weights=`: each position is a draw of its own, or all are drawn without
replacement.

A draw depends only on the seed, the epoch and the position, so any worker can make any batch, and a stream resumes
anywhere. With replacement, position p has the first index whose cumulated weight is above a random number of p. Without
it, index i has the key -log(u) / weight with a random number u of i, and the least keys come first: see Efraimidis and
Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97, 2006. Its logarithm is made of
sums and products alone, since `numpy.log` may differ in the last bit from one processor to another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .permutation import make_key, uniform

_TERMS = 24


class WeightedOrder:
    """The order of one epoch.

    Args:
        seed: the feed's seed.
        epoch: the epoch, from 0.
        length: number of draws.
        weights: float64, one for each index: finite, not negative, and not all 0.
        replacement: whether an index may be drawn several times. If not, `length` is at most the number of weights
            above 0.
    """

    def __init__(
        self, seed: int, epoch: int, length: int, weights: npt.NDArray[np.float64], *, replacement: bool
    ) -> None:
        self._key = make_key(seed, epoch, "weights")
        self._sums: npt.NDArray[np.float64] | None = None
        self._drawn: npt.NDArray[np.int64] | None = None
        if replacement:
            sums = np.cumsum(weights)
            self._sums = sums / sums[-1]
        else:
            self._drawn = _without_replacement(self._key, weights)[:length]

    def at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the indices at the positions from `start` to `stop`, int64[stop - start]."""
        if self._drawn is not None:
            return self._drawn[start:stop]
        assert self._sums is not None
        return np.searchsorted(self._sums, uniform(self._key, np.arange(start, stop)), "right").astype(np.int64)


def _without_replacement(key: int, weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return all indices whose weight is above 0, in a random order in which heavy ones tend to come early."""
    indices = np.flatnonzero(weights)
    numbers = 1 - uniform(key, indices)  # above 0
    return indices[np.argsort(_minus_log(numbers) / weights[indices], kind="stable")].astype(np.int64)


def _minus_log(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return -log(x) for x in (0, 1], to about 14 digits."""
    mantissas, exponents = np.frexp(numbers)  # x = m * 2**e, with m from 0.5 to 1
    ratio = (1 - mantissas) / (1 + mantissas)  # -log(m) = 2 * atanh(ratio), and ratio is at most 1/3
    square = ratio * ratio
    series = np.zeros_like(ratio)
    for term in range(_TERMS, -1, -1):
        series = series * square + 1 / (2 * term + 1)
    found: npt.NDArray[np.float64] = 2 * ratio * series - exponents * 0.6931471805599453
    return found
