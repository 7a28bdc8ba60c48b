"""Rows of a split that are stacked already, column by column. A batch copies many of them at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .structure import Columns

Array = npt.NDArray[Any]


class RowStack(NamedTuple):
    """Consecutive rows.

    Attributes:
        columns: the structure of a sample.
        parts: the values of these rows for each of `columns.names`: an array whose first dimension is the row, or
            anything else that yields them.
        rows: their number.
    """

    columns: Columns
    parts: Sequence[Array | Iterable[Any]]
    rows: int

    def samples(self) -> Iterator[Any]:
        """Yield one sample for each row. Parts that are no arrays may be used up."""
        return self.columns.samples(self.parts)


class RowStacks(Iterator[Any]):
    """The samples of a split, one by one or many at once.

    Args:
        stacks: yields all rows, in order.

    Attributes:
        on_taken: called with the number of rows whenever some were taken.
    """

    def __init__(self, stacks: Iterator[RowStack]) -> None:
        self._stacks = stacks
        self._stack: RowStack | None = None
        self._taken = 0
        self._error: Exception | None = None
        self.on_taken: Callable[[int], None] = _ignore

    def take(self, most: int) -> RowStack | None:
        """Return the next rows, `most` of them or fewer, or None at the end.

        Raises:
            Exception: whatever the reader raises, after all rows before it were returned.
        """
        if self._error is not None:
            raise self._error
        while self._stack is None or self._taken == self._stack.rows:
            self._stack = None  # before the next one is read
            stack = next(self._stacks, None)
            if stack is None:
                return None
            self._stack, self._taken = _resumable(stack), 0
        columns, parts, rows = self._stack
        start, stop = self._taken, min(rows, self._taken + most)
        found = [self._next(part, start, stop) for part in parts]
        if self._error is not None:
            stop = start + min(map(len, found))
            if stop == start:
                raise self._error
            found = [part[: stop - start] for part in found]
        self._taken = stop
        self.on_taken(stop - start)
        return RowStack(columns, found, stop - start)

    def _next(self, part: Any, start: int, stop: int) -> Array | list[Any]:
        """Return these rows of a part. There are fewer of them if `self._error` is set."""
        if type(part) is np.ndarray:
            return part[start:stop]
        values: list[Any] = []
        try:
            values.extend(islice(part, stop - start))
        except Exception as error:
            self._error = error
        return values

    def __next__(self) -> Any:
        stack = self.take(1)
        if stack is None:
            raise StopIteration
        return next(stack.samples())

    def close(self) -> None:
        """End the reader."""
        self._stack = None
        close: Callable[[], None] | None = getattr(self._stacks, "close", None)
        if close is not None:
            close()


class IndexedRows(ABC):
    """An indexable object that can also return several items at once, column by column."""

    @abstractmethod
    def rows_at(self, indices: Sequence[int]) -> RowStack | None:
        """Return these items, or None if they are read one by one."""


def values_at(column: Any, indices: Sequence[int]) -> Array | list[Any]:
    """Return these values of a column, which is an array or anything with `[]`."""
    return column[indices] if isinstance(column, np.ndarray) else [column[index] for index in indices]


def joined(columns: Columns, parts: Sequence[Iterator[Array]]) -> Iterator[RowStack]:
    """Join columns whose rows are read in pieces of different lengths. Each of them yields arrays.

    Raises:
        ValueError: a column has fewer rows than another.
    """
    left: list[Array | None] = [None] * len(parts)
    while True:
        for number, rest in enumerate(parts):
            if left[number] is None:
                left[number] = next(rest, None)
        found = [part for part in left if part is not None]
        if len(found) < len(left):
            if found:
                short = next(name for name, part in zip(columns.names, left, strict=True) if part is None)
                raise ValueError(f"{short!r} has fewer rows than others")
            return
        count = min(map(len, found))
        stack = RowStack(columns, [part[:count] for part in found], count)
        left = [part[count:] if len(part) > count else None for part in found]
        del found
        if count:
            yield stack
        del stack  # before the next part is read


def _ignore(rows: int) -> None:
    pass


def _resumable(stack: RowStack) -> RowStack:
    return stack._replace(parts=[part if type(part) is np.ndarray else iter(part) for part in stack.parts])
