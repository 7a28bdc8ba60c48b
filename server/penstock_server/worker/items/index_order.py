"""The order in which an epoch reads the items of an indexable object."""

from __future__ import annotations

import numpy as np

from ...feed.options.values import Shuffle, Weights
from ...shuffling.block_order import BlockOrder
from ...shuffling.permutation import make_key, permute
from ...shuffling.weighted_order import WeightedOrder

_AHEAD = 4096  # permuted positions that are computed at once


class IndexOrder:
    """The index of the item at each position of an epoch. Any position can be computed on its own.

    Args:
        seed: the feed's seed.
        epoch: from 0.
        length: positions of an epoch: the number of items, or of draws.
        shuffle: how items are permuted.
        weights: those with which items are drawn, if each does not come once.

    Attributes:
        drawn: whether items are drawn, so that one may come twice.
    """

    def __init__(self, seed: int, epoch: int, length: int, shuffle: Shuffle, weights: Weights | None) -> None:
        self.drawn = weights is not None
        self._length = length
        self._key = make_key(seed, epoch, "index") if shuffle.samples else None
        self._order: BlockOrder | WeightedOrder | None = None
        if weights is not None:
            self._order = WeightedOrder(seed, epoch, length, weights.values, replacement=weights.replacement)
        elif shuffle.block is not None and length:
            self._order = BlockOrder(seed, epoch, length, shuffle.block, shuffle.samples)
        self._ahead: tuple[int, list[int]] = 0, []

    def at(self, start: int, stop: int) -> list[int]:
        """Return the indices at the positions from `start` to `stop`."""
        if self._key is None and self._order is None:
            return list(range(start, stop))
        first, known = self._ahead
        if start < first or stop > first + len(known):
            first, last = start, min(self._length, max(stop, start + _AHEAD))
            if self._order is not None:
                known = self._order.at(start, last).tolist()
            else:
                assert self._key is not None
                known = permute(self._key, self._length, np.arange(start, last)).tolist()
            self._ahead = first, known
        return known[start - first : stop - first]
