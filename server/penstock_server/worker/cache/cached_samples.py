"""The samples of a split, read from the cache, or written to it while the generator makes them.

This file knows nothing of lanes or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from penstock_proto import GeneratorError

from ...targets.importing import summary, user_traceback
from ..batch.shares import Share
from ..failures import pass_on
from .split_cache import CacheWriter
from .split_file import SplitFile


class UnreadableSample(Exception):
    """A cached sample could not be unpickled: that raised `error`."""

    def __init__(self, file: str, number: int, error: BaseException) -> None:
        super().__init__(file, number, error)
        self.file = file
        self.number = number
        self.error = error

    def user_error(self, place: str | None) -> GeneratorError:
        """Return the error to report for the split `place`."""
        return GeneratorError(
            f"sample {self.number} of {self.file} in the cache cannot be unpickled ({summary(self.error)}): give "
            "another version, cache=Cache(..., version=), if its classes have changed, or delete that file, which may "
            "be damaged",
            split=place,
            remote_traceback=user_traceback(self.error),
        )


class CachedSamples(Iterator[Any]):
    """The samples of a cached split, or those of a share.

    Args:
        file: the cached split.
        name: the file's name, for errors.
        share: the samples to read, or None for all.
    """

    def __init__(self, file: SplitFile, name: str, share: Share | None = None) -> None:
        self._file: SplitFile | None = file
        self._count = len(file)
        self._name = name
        self._share = share
        self._next = 0

    def __next__(self) -> Any:
        number = self._next if self._share is None else self._share.place_of(self._next)
        if number >= self._count or self._file is None:
            raise StopIteration
        self._next += 1
        try:
            return self._file[number]
        except BaseException as error:
            pass_on(error)
            raise UnreadableSample(self._name, number, error) from error

    def seek(self, number: int) -> int:
        """Go to sample `number`, or past the last one if there are fewer. Return the number of the next sample."""
        self._next = min(number, self._count if self._share is None else self._share.size_of(self._count))
        return self._next

    def close(self) -> None:
        """Release the file. Arrays of samples keep their memory."""
        self._file = None


class RecordedSamples(Iterator[Any]):
    """The samples of a generator, which it also writes to the cache. The split enters the cache when the generator
    ends, if `is_same` then returns True: nothing that the split is made of has changed.

    A sample is written before it is returned, so later changes to it do not matter.
    """

    def __init__(self, samples: Iterator[Any], writer: CacheWriter, is_same: Callable[[], bool]) -> None:
        self._samples = samples
        self._writer = writer
        self._is_same = is_same
        self._writes = True

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            if self._is_same():
                self._writer.finish()
            else:
                self._writer.abandon()
            raise
        except BaseException:
            self._writer.abandon()
            raise
        if self._writes:
            self._writes = self._writer.add(sample)
        return sample

    def close(self) -> None:
        """End the generator. A split that was not read to its end does not enter the cache."""
        self._writer.abandon()
        close = getattr(self._samples, "close", None)
        if close is not None:
            close()
