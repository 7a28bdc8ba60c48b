"""Keras datasets without a fixed length, as generator functions: segment or split i is item i."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Reader(Protocol):
    """Reads the items of a Keras dataset in any epoch."""

    def enter(self, epoch: int) -> None:
        """Go to an epoch."""

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield these items of the epoch."""

    def count(self) -> int:
        """Return the number of items of the epoch."""


class EndlessItems:
    """Yields the items of a Keras dataset whose `num_batches` is None.

    Attributes:
        source: the dataset.
        reader: reads the dataset. A worker sets it, because a declaration reads nothing.
    """

    def __init__(self, source: Any) -> None:
        self.__name__ = type(source).__name__
        self.source = source
        self.reader: Reader | None = None

    def __call__(self, segment: int, epoch: int) -> Iterator[Any]:
        """Yield item `segment`, a whole batch."""
        assert self.reader is not None
        self.reader.enter(epoch)
        yield from self.reader.read([segment])


class VaryingItems(EndlessItems):
    """Yields the items of a Keras dataset whose length may differ from epoch to epoch."""

    def indices(self, epoch: int) -> range:
        """Return the splits of an epoch: the indices of its items."""
        assert self.reader is not None
        self.reader.enter(epoch)
        return range(self.reader.count())
