"""Splits that are ranges of a file's rows, and how many rows make a good one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock_proto.value_text import shown

from ..bounds import SPLITS
from ..names_on_disk import on_disk_as

_PIECES = 256
"""About how many splits an input is divided into: enough for mixing, and for many workers."""

_LEAST_ROWS = 64
_LEAST = 64 << 10
_MOST = 16 << 20
"""The least and the greatest size of a split in bytes, unless one chunk of the file has more."""

_ENOUGH = 64
"""How many splits 16 lanes with 4 open splits each need."""

_FEW = 16
"""How many splits keep 16 lanes busy. With fewer, some workers have nothing to do."""


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
    that still gives many splits. If multiples of `unit` make too few splits, they begin at multiples of `chunk`; and if
    these are few too and `cheap` is set, chunks are divided. Then some data of the file are read twice or more often.
    """

    file: str
    size: int | None
    rows: int
    row_nbytes: int
    unit: int = 1
    better: int = 1
    chunk: int = 0
    cheap: bool = False


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

    A split begins and ends where its `Table` says, or where `rows` does.

    Raises:
        ValueError: `rows` goes beyond the end, there are no rows, or they make too many splits.
    """
    total = sum(table.rows for table in tables)
    start, stop = rows[0], total if rows[1] is None else rows[1]
    if start >= stop or stop > total:
        files = list(dict.fromkeys(table.file for table in tables))
        named = files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"
        has = f"{named} {'has' if len(files) == 1 else 'have'} {total or 'no'} rows"
        if stop > total:
            raise ValueError(f"rows=({rows[0]}, {rows[1]}) goes beyond the end: {has} in all")
        raise ValueError(f"no samples to read: {has if not total else f'rows=({start}, None) is empty: {has}'}")

    def step_of(table: Table) -> int:
        wanted = split_rows or _good_size(table, stop - start)
        unit = table.better if table.better <= max(wanted, (stop - start) // _ENOUGH) else table.unit
        return -(-wanted // unit) * unit

    def chunks_of(table: Table) -> int:
        wanted, unit = split_rows or _good_size(table, stop - start), table.chunk or table.unit
        return -(-wanted // unit) * unit

    found = _cut(tables, start, stop, step_of)
    if len(found) >= _FEW:
        return found
    finer = _cut(tables, start, stop, chunks_of)
    if len(finer) < _FEW:
        parts = -(-_FEW // len(finer))
        finer = _cut(tables, start, stop, chunks_of, parts, split_rows or 1)
    return finer if len(finer) >= 2 * len(found) else found


def _cut(
    tables: list[Table], start: int, stop: int, step_of: Callable[[Table], int], parts: int = 1, least: int = 1
) -> list[RowRange]:
    """Cut rows `start` to `stop` of all tables at the multiples of a step. With `parts`, divide the steps of cheap
    tables, but into ranges of no fewer than `least` rows and of no fewer than a split may have."""
    found: list[RowRange] = []
    before = 0
    for table in tables:
        first, last = max(0, start - before), min(table.rows, stop - before)
        step = part = step_of(table)
        if table.cheap:
            part = -(-step // max(1, min(parts, step // max(least, _least_rows(table)))))
        _check_count(table.file, last - first, part)
        found += [RowRange(table.file, low, high, table.size) for low, high in _pieces(first, last, step, part)]
        before += table.rows
    return found


def _check_count(file: str, rows: int, step: int) -> None:
    if rows // step > SPLITS:
        raise ValueError(
            f"{file} has {rows:,} rows to serve, which make {rows // step:,} splits, and more than {SPLITS:,} are not "
            "listed: serve fewer rows with rows=, or make larger splits with split_rows="
        )


def _good_size(table: Table, total: int) -> int:
    most = max(1, _MOST // max(1, table.row_nbytes))
    return min(most, max(_least_rows(table), -(-total // _PIECES)))


def _least_rows(table: Table) -> int:
    return min(_LEAST_ROWS, max(1, _LEAST // max(1, table.row_nbytes)))


def _pieces(first: int, last: int, step: int, part: int) -> Iterator[tuple[int, int]]:
    """Cut first..last at the multiples of `step`, and each step after every `part` rows."""
    while first < last:
        begin = first // step * step
        stop = min(last, begin + step, first + part - (first - begin) % part)
        yield first, stop
        first = stop
