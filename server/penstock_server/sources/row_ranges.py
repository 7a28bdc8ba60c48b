"""Splits that are ranges of a file's rows, and how many rows make a good one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock_proto.value_text import shown

from .bounds import SPLITS
from .names_on_disk import on_disk_as

_PIECES = 256
"""About how many splits an input is divided into: enough for mixing, and for many workers."""

_LEAST_ROWS = 64
_LEAST = 64 << 10
_MOST = 16 << 20
"""The least and the greatest size of a split in bytes, unless one chunk of the file has more."""

_ENOUGH = 64
"""How many splits 16 lanes with 4 open splits each need."""


@on_disk_as("penstock_server.sources.row_ranges.RowRange")
@dataclass(frozen=True, slots=True, repr=False)
class RowRange:
    """Rows `start` to `stop` (not included) of a file that has `size` bytes (None: not known)."""

    file: str
    start: int
    stop: int
    size: int | None

    def __repr__(self) -> str:
        return f"{self.file} rows {self.start} to {self.stop - 1}"


@dataclass(frozen=True, slots=True)
class Table:
    """A file as a table of `rows`, each of `row_nbytes`.

    A split begins at a multiple of `unit` rows. It begins at a multiple of `better` (itself a multiple of `unit`) if
    that still gives many splits.
    """

    file: str
    size: int | None
    rows: int
    row_nbytes: int
    unit: int = 1
    better: int = 1


def checked_rows(rows: Any) -> tuple[int, int | None]:
    """Return `rows`, None or (start, stop), as (start, stop); a stop of None means the end.

    Raises:
        TypeError, ValueError: it has another form, or holds no rows.
    """
    if rows is None:
        return 0, None
    if isinstance(rows, slice | range) and rows.step in (None, 1):
        rows = rows.start, rows.stop
    if not isinstance(rows, tuple) or len(rows) != 2:
        raise TypeError(f"rows must be (start, stop), counted over all files, got {shown(rows)}")
    start, stop = (0 if rows[0] is None else rows[0]), rows[1]
    if type(start) is not int or (stop is not None and type(stop) is not int):
        raise TypeError(f"rows must be two whole numbers (start, stop), got {shown(rows)}")
    if start < 0 or (stop is not None and stop <= start):
        raise ValueError(f"rows must be (start, stop) with 0 <= start < stop, got {shown(rows)}")
    return start, stop


def checked_split_rows(split_rows: Any) -> int | None:
    """Return `split_rows` if it is None or a positive whole number.

    Raises:
        TypeError, ValueError: it is not.
    """
    if split_rows is not None and type(split_rows) is not int:
        raise TypeError(f"split_rows must be a whole number or None, got {shown(split_rows)}")
    if split_rows is not None and split_rows < 1:
        raise ValueError(f"split_rows must be at least 1, got {split_rows}")
    return split_rows


def divide(tables: list[Table], rows: tuple[int, int | None], split_rows: int | None) -> list[RowRange]:
    """Divide the rows of all tables, which are numbered as one sequence, into splits.

    A split begins and ends at a multiple of its file's `unit`, or where `rows` does.

    Raises:
        ValueError: `rows` goes beyond the end, there are no rows, or they make too many splits.
    """
    total = sum(table.rows for table in tables)
    start, stop = rows[0], total if rows[1] is None else rows[1]
    if stop > total:
        raise ValueError(f"rows=({rows[0]}, {rows[1]}) goes beyond the end: the files have {total} rows in all")
    if start >= stop:
        many = "the files have no rows" if not total else f"rows=({start}, None) is empty: the files have {total} rows"
        raise ValueError(f"no samples to read: {many}")
    found: list[RowRange] = []
    before = 0
    for table in tables:
        first, last = max(0, start - before), min(table.rows, stop - before)
        wanted = split_rows or _good_size(table, stop - start)
        unit = table.better if table.better <= max(wanted, (stop - start) // _ENOUGH) else table.unit
        step = -(-wanted // unit) * unit
        _check_count(table.file, last - first, step)
        found += [RowRange(table.file, low, high, table.size) for low, high in _pieces(first, last, step)]
        before += table.rows
    return found


def _check_count(file: str, rows: int, step: int) -> None:
    if rows // step > SPLITS:
        raise ValueError(
            f"{file} has {rows:,} rows to serve, which make {rows // step:,} splits, and more than {SPLITS:,} are not "
            "listed: serve fewer rows with rows=, or make larger splits with split_rows="
        )


def _good_size(table: Table, total: int) -> int:
    nbytes = max(1, table.row_nbytes)
    least = min(_LEAST_ROWS, max(1, _LEAST // nbytes))
    most = max(1, _MOST // nbytes)
    return min(most, max(least, -(-total // _PIECES)))


def _pieces(first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
    """Cut first..last at the multiples of `step`."""
    while first < last:
        stop = min(last, (first // step + 1) * step)
        yield first, stop
        first = stop
