"""Applies a feed's `batch_transform=` to the batches of its lanes, of its pools, and of merged rows.

This file knows nothing of slots or messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from ...feed.options.transforms import checked_batch_transforms
from ...worker_state.activity import ActivityPage
from ..batch.variable_rows import VariableRows
from ..isolation.randomness import GlobalRandomness
from .batch_transforming import BatchTransform, named
from .loaded_feed import LoadedFeed


def batch_transform_of(feed: LoadedFeed, randomness: GlobalRandomness) -> BatchTransform | None:
    """Return what transforms the batches of a feed, or None. The spec of its samples must be known."""
    transforms = checked_batch_transforms(feed.declared.batch_transform)
    if not transforms:
        return None
    spec = feed.sample_spec
    assert spec is not None
    made = BatchTransform(
        transforms,
        feed.plan.seed,
        randomness,
        spec,
        feed.plan.batch_size or 1,
        feed.rows_of(spec),
        feed.transform_checks,
    )
    made.served = feed.spec
    return made


class LaneBatches:
    """Transforms the batches of lanes, of pools and of merged rows, in this process.

    Args:
        feed: the feed, which has a `batch_transform` and a known spec.
        randomness: the random numbers of this process.
        page: the activity page, on which calls of user code are announced.
        run: the daemon's number of the run.
    """

    def __init__(self, feed: LoadedFeed, randomness: GlobalRandomness, page: ActivityPage, run: int) -> None:
        transform = batch_transform_of(feed, randomness)
        assert transform is not None
        self._transform = transform
        self._rows = feed.plan.batch_size or 1
        self._page = page
        self._run = run
        self._store: list[Any] | None = None

    def store(self) -> list[Any]:
        """Return memory for a batch before it is transformed. It is valid until the next call."""
        rows = self._transform.rows
        if self._store is None or isinstance(rows, VariableRows):
            self._store = rows.store(self._rows)
        return self._store

    def put(self, store: list[Any], rows: int, epoch: int, lane: int, number: int, target: Sequence[Any]) -> None:
        """Transform the first rows of a store; see `BatchTransform.put`."""
        self.put_arrays(self._transform.arrays(store, rows), epoch, lane, number, target)

    def put_arrays(
        self, arrays: Sequence[npt.NDArray[Any]], epoch: int, lane: int, number: int, target: Sequence[Any]
    ) -> None:
        """Transform a batch that is an array for each leaf; see `BatchTransform.put`."""
        place = lane, number
        self._page.enter(self._run, -1, named(place))
        try:
            self._transform.put(arrays, epoch, place, target)
        finally:
            self._page.leave()
