"""An endless Keras dataset as a generator function over segments: segment i is item i."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Reader(Protocol):
    """Reads the items of a Keras dataset in any epoch."""

    def enter(self, epoch: int) -> None:
        """Go to an epoch."""

    def read(self, indices: Sequence[int]) -> Iterator[Any]:
        """Yield these items of the epoch."""


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
