"""The order of the rows in a pool: the lane and the row at each position.

A pool is one visit to each of some lanes: up to `turn` full batches of each. The rows of these batches, lane after
lane, are put into a random order, and batches are cut from it.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .permutation import make_key, whole_order

_kept_order = functools.lru_cache(maxsize=4)(whole_order)
"""Keeps orders, because a worker makes several turns of a pool."""


def source_rows(
    seed: int, epoch: int, visit: int, part: int, rows: int, first: int, count: int
) -> npt.NDArray[np.int64]:
    """Return the source rows of `count` rows of a pool, from row `first` on. The pool has `rows` rows.

    The pool is visit `visit` to the lanes of part `part`.

    Returns:
        int64 [count]: row numbers, counted lane after lane.
    """
    return _kept_order(make_key(seed, epoch, "pool", visit, part), rows)[first : first + count]
