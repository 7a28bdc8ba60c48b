"""The items of an indexable object, as a run reads them. Keras datasets have their own class, in keras_items.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from penstock_proto import FeedError

from ...feed.feed import Feed
from ...feed.objects.indexables import as_structure, is_keras, is_torch
from ...sources.row_stacks import IndexedRows, RowStack
from ...sources.structure import Columns
from ..isolation.randomness import put_states, seed_all, seeds, take_states
from .keras_items import KerasItems

_ITEM = Columns("item", "array")


class PlainItems:
    """The items of an object that is the same in every epoch.

    An object may draw random numbers at its first use. So each process first reads item 0 once, and drops it.

    Args:
        source: has `__getitem__`, and perhaps `__getitems__`, which takes a list of indices and returns a list.
        seed: the feed's seed.
        batched: whether samples are stacked, so that those of a batch are requested together.

    Attributes:
        item: the index of the item that was read last, or is being read. None while several are read together.
        several: whether items that are requested together are read together.
        stackable: whether `stack` may return items.
    """

    item: int | None = 0

    def __init__(self, source: Any, seed: int, *, batched: bool) -> None:
        self._source = source
        self._seed = seed
        self._several = (getattr(source, "__getitems__", None) or None) if batched else None  # torch asks this too
        self.several = self._several is not None
        self.stackable = batched and (isinstance(source, IndexedRows) or type(source) in (np.ndarray, np.memmap))
        self._convert = is_torch(source)
        self._warm = False

    def is_at(self, epoch: int) -> bool:
        """Whether items can be read."""
        return self._warm

    def enter(self, epoch: int, *, warm: bool = True) -> None:
        """Read item 0 if nothing was read before. See `KerasItems.enter`."""
        if self._warm:
            return
        self._warm = True
        if warm:
            states = take_states()
            sequence = seeds("batch", self._seed, 0, 0)
            seed_all(sequence)
            with contextlib.suppress(BaseException):  # it is raised again when the batch of the item is made
                self._source[0]
            put_states(states, sequence)

    def stack(self, indices: Sequence[int]) -> RowStack | None:
        """Return these items column by column, or None if they are read one by one. No user code runs."""
        source = self._source
        if isinstance(source, IndexedRows):
            return source.rows_at(indices)
        return RowStack(_ITEM, [np.asarray(source[indices])], len(indices))

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield these items.

        Raises:
            FeedError: `__getitems__` returned more or fewer items than were requested.
        """
        items = self._singly(indices) if self._several is None else self._together(indices, self._several)
        return map(as_structure, items) if self._convert else items

    def _singly(self, indices: Sequence[int]) -> Iterator[Any]:
        source = self._source
        for index in indices:
            self.item = index
            yield source[index]

    def _together(self, indices: Sequence[int], several: Callable[[list[int]], Any]) -> Iterator[Any]:
        self.item = None
        found = list(several(list(indices)))
        if len(found) != len(indices):
            raise FeedError(
                f"__getitems__ of {type(self._source).__name__} returned {len(found)} samples for {len(indices)} "
                "indices: it must return a list with one sample for each index, in the same order"
            )
        for self.item, sample in zip(indices, found, strict=True):
            yield sample


Items: TypeAlias = PlainItems | KerasItems


def items_of(feed: Feed) -> Items:
    """Return the items of an indexable feed."""
    if is_keras(feed.generate):
        return KerasItems(feed.generate, feed.seed)
    return PlainItems(feed.generate, feed.seed, batched=feed.batch_size is not None)
