"""What all readers of data files have in common: how `Feed(cache=)` tells their samples from others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from . import files as fs


class Reader(ABC):
    """Yields the samples of a split, which has its path as `file`."""

    @property
    @abstractmethod
    def cached_as(self) -> Any:
        """What decides the samples of a split, apart from the split. The list of files does not, so that a longer list
        leaves cached splits valid."""

    def stamp(self, split: Any) -> Any:
        """Return what must not change for a cached split to be served: where its file is, and when it was changed."""
        return fs.stamp_of(split.file)
