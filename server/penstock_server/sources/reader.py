"""The base classes of readers of data files, which yield the samples of a split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, final

from . import files as fs
from .row_stacks import RowStack


class Reader(ABC):
    """Yields the samples of a split."""

    @abstractmethod
    def __call__(self, split: Any) -> Iterator[Any]:
        """Yield the samples of a split.

        Raises:
            OSError, LookupError, TypeError, ValueError: they cannot be read, for example because the file has changed
                since its splits were listed; the message names the file and the place in it, and says what to do.
        """

    @property
    @abstractmethod
    def cached_as(self) -> Any:
        """Everything that determines the samples of a split, apart from the split. It excludes the list of files, so
        that cached splits stay valid when the list grows."""

    def files_of(self, split: Any) -> Sequence[str]:
        """Return the paths of all files that the samples of a split depend on; by default the split's `file`."""
        return [split.file]

    def compared_files(self, split: Any) -> Sequence[str]:
        """Return those of these files whose versions are compared each time a split is opened; by default all."""
        return self.files_of(split)

    @final
    def stamp(self, split: Any) -> Any:
        """Return the paths of the split's files and the times of their last changes. A cached split is served only
        while all of them stay the same."""
        return fs.stamp_of(*self.files_of(split))


class ReadAtImport(ABC):
    """An indexable object that reads files when a worker imports its feed."""

    @property
    @abstractmethod
    def contents(self) -> str:
        """A digest of what was read, 32 hex digits. Workers with different ones cannot serve one stream."""


class StackReader(Reader):
    """Reads the rows of a split column by column."""

    @abstractmethod
    def stacks(self, split: Any) -> Iterator[RowStack]:
        """Yield the rows of a split, many at once.

        Raises:
            OSError, LookupError, TypeError, ValueError: as for `Reader`.
        """

    @final
    def __call__(self, split: Any) -> Iterator[Any]:
        """Yield one sample for each row.

        Raises:
            OSError, LookupError, TypeError, ValueError: as for `Reader`.
        """
        for stack in self.stacks(split):
            yield from stack.samples()
            del stack  # before the next rows are read
