"""The base class of readers of data files: says which values identify cached samples, for `Feed(cache=)`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from . import files as fs


class Reader(ABC):
    """Yields the samples of a split, whose attribute `file` is its path."""

    @property
    @abstractmethod
    def cached_as(self) -> Any:
        """Everything that determines the samples of a split, apart from the split. It excludes the list of files, so
        that cached splits stay valid when the list grows."""

    def stamp(self, split: Any) -> Any:
        """Return the path of the split's file and the time of its last change. A cached split is served only while both
        stay the same."""
        return fs.stamp_of(split.file)
