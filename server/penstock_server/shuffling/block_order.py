"""The order of an indexable feed with `Shuffle(block=)`: permuted blocks of neighbours, in which nearby samples are
then mixed.

The indices 0 to n - 1 are cut into blocks of `block` neighbours; the last block may be shorter. The blocks are put into
a random order, and the indices within a block keep their order. The resulting sequence is cut into windows of `shuffle`
indices, and each window is permuted. So a window reads from at most `shuffle / block + 3` blocks.

Any position of the order can be computed on its own, as with `permute`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .permutation import make_key, permute


class BlockOrder:
    """The order of one epoch.

    Args:
        seed: the feed's seed.
        epoch: the epoch, from 0.
        length: number of indices, 1 or more.
        block: indices in a block.
        shuffle: indices in a window.
    """

    def __init__(self, seed: int, epoch: int, length: int, block: int, shuffle: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._length = length
        self._block = block
        self._shuffle = min(shuffle, length)
        self._full, self._rest = divmod(length, block)
        self._key = make_key(seed, epoch, "blocks")
        # The short block has its own place among the others, so that no search is needed.
        self._place = permute(make_key(seed, epoch, "short block"), self._full + 1, 0)

    def at(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the indices at the positions from `start` to `stop`, int64[stop - start]."""
        positions = np.arange(start, stop, dtype=np.int64)
        if self._shuffle > 1:
            positions = np.concatenate([self._window(w, start, stop) for w in self._windows(start, stop)])
        return self._unmixed(positions)

    def _windows(self, start: int, stop: int) -> range:
        return range(start // self._shuffle, -(-stop // self._shuffle))

    def _window(self, window: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the positions before mixing, for those positions from `start` to `stop` that are in this window."""
        first = window * self._shuffle
        count = min(self._shuffle, self._length - first)
        inside = np.arange(max(start, first), min(stop, first + count), dtype=np.int64) - first
        return first + permute(make_key(self._seed, self._epoch, "window", window), count, inside)

    def _unmixed(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the indices at these positions of the permuted blocks."""
        begin = self._place * self._block  # where the short block begins
        short = (positions >= begin) & (positions < begin + self._rest)
        places, inside = np.divmod(np.where(positions < begin, positions, positions - self._rest), self._block)
        blocks = permute(self._key, self._full, np.where(short, 0, places)) if self._full else places
        return np.where(short, self._full * self._block + positions - begin, blocks * self._block + inside)
