"""Reads a CSV file into arrays: numbers where all cells of a column are numbers, else text.

Each worker holds the columns that its feed uses. So samples have an index, and an epoch is a permutation of all rows.
Larger tables belong into Parquet files.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto.value_text import shown

from .. import files as fs

MOST_BYTES = 1 << 30
"""Bytes of a table, at most, after decompression."""

MOST_COLUMNS = 20_000

_CHUNK = 1 << 18
"""Cells that are text at one time."""

_HEAD = 1 << 16
_BOOLS = {"true": True, "false": False}
_CODE = re.compile(r"^\s*[+-]?0[0-9]|_", re.MULTILINE)
"""Finds a cell that is text though it looks like a number: 007, 1_000."""

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of a CSV file.

    Attributes:
        file: the path or URL.
        names: the names of all columns, in order.
        rows: the number of rows.
        columns: those that were read, by name: arrays of bools, int64, uint64 or float64, and lists of text.
        empty: for columns of numbers that were read, the first row with an empty cell; from 0.
        digest: of the bytes that were read, after decompression.
    """

    file: str
    names: tuple[str, ...]
    rows: int
    columns: dict[str, npt.NDArray[Any] | list[str]]
    empty: dict[str, int]
    digest: str

    def values(self, name: str) -> npt.NDArray[Any] | list[str]:
        """Return a column that was read.

        Raises:
            ValueError: its cells are numbers, but for some empty ones.
        """
        if (row := self.empty.get(name)) is not None:
            raise ValueError(
                f"{self.file}: row {row + 1} of column {name!r} is empty, and others are numbers: fill the empty "
                "cells, or leave the column out of leaves="
            )
        return self.columns[name]


def read_table(
    file: str,
    chosen: Callable[[Sequence[str]], Iterable[str]] | None = None,
    text: Iterable[str] = (),
    most_rows: int | None = None,
) -> Table:
    """Read a CSV file, of UTF-8 and perhaps compressed with gzip. Its first line names the columns.

    Columns are separated by tabs if the name ends in .tsv; otherwise by the most frequent of comma, semicolon and tab
    in the first line. A column is of bools, int64, uint64 or float64 if all of its cells are such values, empty ones
    apart. Numbers with leading zeros are text, as they are codes. So are integers beyond 64 bits.

    Args:
        file: the path or URL.
        chosen: returns the names of the columns to read, given those of all; by default all.
        text: columns to read as text, whatever they hold.
        most_rows: rows to read, at most.

    Raises:
        OSError: it cannot be read; the message names it.
        ValueError: it is no such table, or is too large; the message names the file and the line.
    """
    table, kinds = _read(file, chosen, dict.fromkeys(text, _TEXT), most_rows)
    while kinds:  # a later cell did not fit the kind of the earlier ones, and numbers have lost their spelling
        table, kinds = _read(file, chosen, kinds, most_rows)
    return table


_BOOL, _INT, _UINT, _FLOAT, _TEXT = range(5)
"""The kinds of a column, from the narrowest."""


class _Column:
    """Gathers the cells of one column, as values of its kind.

    Attributes:
        kind: the kind; None if all cells are empty.
        stale: whether the kind became wider after some rows. Then the values are incomplete.
        empty: the first row with an empty cell, unless the column is text.
    """

    def __init__(self, kind: int | None) -> None:
        self.kind = kind
        self.stale = False
        self.empty: int | None = None
        self._rows = 0
        self._parts: list[npt.NDArray[Any]] = []
        self._text: list[str] = []

    def add(self, cells: Sequence[str]) -> None:
        """Add the cells of some rows."""
        filled = cells
        if "" in cells:
            filled = [cell for cell in cells if cell]
            if self.empty is None:
                self.empty = self._rows + cells.index("")
        if filled or self.kind == _TEXT:
            least = self.kind or _BOOL
            kind, values = next(
                (kind, made) for kind in range(least, _TEXT + 1) if (made := _made(filled, kind)) is not None
            )
            if self.kind == _BOOL and kind != _BOOL:
                kind = _TEXT  # bools and numbers together
            if kind == _FLOAT and least != _FLOAT and all(map(_is_integer, filled)):
                kind = _TEXT  # they are beyond 64 bits, and floats would make different ones equal
            self.stale |= bool(self._rows) and kind != self.kind and not (self.kind is None and kind != _TEXT)
            self.kind = kind
            if kind == _TEXT:
                self._text += cells
            else:
                self._parts.append(values)
        self._rows += len(cells)

    def values(self) -> npt.NDArray[Any] | list[str]:
        """Return all cells, but for empty ones among numbers. A column that is empty everywhere is text."""
        if self.kind is None or self.kind == _TEXT:
            self.empty = None
            return self._text or [""] * self._rows
        return np.concatenate(self._parts)


def _made(cells: Sequence[str], kind: int) -> Any:
    """Return cells as values of a kind; None if one does not fit."""
    if kind == _TEXT:
        return cells
    if kind == _BOOL:
        if cells and cells[0].strip().lower() not in _BOOLS:
            return None
        found = [_BOOLS.get(cell.strip().lower()) for cell in cells]
        return None if None in found else np.array(found, bool)
    if _CODE.search("\n".join(cells)):
        return None
    try:
        if kind == _FLOAT:
            return np.array(list(map(float, cells)), np.float64)
        return np.array(list(map(int, cells)), np.int64 if kind == _INT else np.uint64)
    except (ValueError, OverflowError):
        return None


def _is_integer(cell: str) -> bool:
    """Whether a cell of a number is spelled as an integer."""
    return cell.strip().lstrip("+-").isdigit()


def _read(
    file: str,
    chosen: Callable[[Sequence[str]], Iterable[str]] | None,
    kinds: dict[str, int],
    most_rows: int | None,
) -> tuple[Table, dict[str, int]]:
    """Read a table. Also return the kinds of the columns if those that were begun with did not fit, else nothing."""
    with _opened(file) as (lines, source):
        reader = _rows(file, lines)
        names = tuple(name.strip() for name in next(reader))
        _check_names(file, names)
        wanted = [*dict.fromkeys(names if chosen is None else chosen(names))]
        columns = {name: (names.index(name), _Column(kinds.get(name))) for name in wanted}
        rows, step = 0, max(1, _CHUNK // len(names))
        while chunk := list(islice(reader, step if most_rows is None else min(step, most_rows - rows))):
            rows += len(chunk)
            cells = list(zip(*chunk, strict=True))
            for place, column in columns.values():
                column.add(cells[place])
    if not rows:
        raise ValueError(f"{file} has no rows, only the names of its columns")
    if any(column.stale for _, column in columns.values()):
        found = {name: column.kind for name, (_, column) in columns.items()}
        return Table(file, names, rows, {}, {}, ""), {name: kind for name, kind in found.items() if kind is not None}
    values = {name: column.values() for name, (_, column) in columns.items()}
    empty = {name: column.empty for name, (_, column) in columns.items() if column.empty is not None}
    return Table(file, names, rows, values, empty, source.digest), {}


@contextmanager
def _opened(file: str) -> Iterator[tuple[io.TextIOWrapper[Any], _Bounded]]:
    """Open a file as text, and as the bytes of that text."""
    with fs.open_binary(file) as opened:
        head = opened.read(2)
        opened.seek(0)
        source: Any = gzip.GzipFile(fileobj=opened) if head == _GZIP else opened
        bounded = _Bounded(file, source)
        text: Any = bounded
        with io.TextIOWrapper(text, "utf-8-sig", newline="") as lines:
            yield lines, bounded


class _Bounded(io.BufferedIOBase):
    """The bytes of a file, up to MOST_BYTES.

    Raises, when it is read:
        OSError: the file is damaged.
        ValueError: the file is longer.
    """

    def __init__(self, file: str, source: Any) -> None:
        self._file = file
        self._source = source
        self._left = MOST_BYTES
        self._digest = hashlib.blake2b(digest_size=16)

    @property
    def digest(self) -> str:
        """A digest of the bytes that were read so far."""
        return self._digest.hexdigest()

    def readable(self) -> bool:
        return True

    def read1(self, size: int | None = -1) -> bytes:
        try:
            data: bytes = self._source.read(_HEAD if size is None or size < 0 else size)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise OSError(f"{self._file} is truncated or damaged ({error}): copy it again") from None
        self._left -= len(data)
        self._digest.update(data)
        if self._left < 0:
            raise ValueError(
                f"{self._file} has more than {MOST_BYTES >> 20} MiB, and each worker would hold them: write a Parquet "
                "file (pandas: read_csv(...).to_parquet(...)), which is read in parts"
            )
        return data

    read = read1


def _rows(file: str, lines: io.TextIOWrapper[Any]) -> Iterator[list[str]]:
    """Yield the cells of the first line, and then of each row. Empty lines are left out.

    Raises:
        ValueError: the file is not CSV, or rows differ in length; the message has the line.
    """
    reader: Any = None
    limit = csv.field_size_limit(MOST_BYTES)
    try:
        first = lines.readline()
        if not first.strip():
            raise ValueError(f"{file} has no first line with the names of its columns")
        ending = file.lower().removesuffix(".gz")
        delimiter = "\t" if ending.endswith(".tsv") else max(",;\t", key=first.count)
        reader = csv.reader(_after(first, lines), delimiter=delimiter, strict=True)
        names = next(reader)
        yield names
        for row in reader:
            if not row:
                continue
            if len(row) != len(names):
                raise ValueError(
                    f"{file}: line {reader.line_num} has {len(row)} cell{'s' * (len(row) > 1)}, and the first line "
                    f"{len(names)}: does a cell have a separator that is not in quotes?"
                )
            yield row
    except csv.Error as error:
        raise ValueError(f"{file}: line {reader.line_num} is not CSV: {error}") from None
    except UnicodeDecodeError:
        after = f" after line {reader.line_num}" if reader is not None and reader.line_num else ""
        kind = "utf-16" if _begins_with_utf16(file) else "latin1"
        raise ValueError(
            f"{file} is not UTF-8{after}: convert it, such as with iconv -f {kind} -t utf-8 {file} > new.csv"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _begins_with_utf16(file: str) -> bool:
    with fs.open_binary(file) as opened:
        return opened.read(2) in (b"\xff\xfe", b"\xfe\xff")


def _after(first: str, lines: Iterable[str]) -> Iterator[str]:
    yield first
    yield from lines


def _check_names(file: str, names: tuple[str, ...]) -> None:
    if len(names) > MOST_COLUMNS:
        raise ValueError(f"{file} has {len(names)} columns, and at most {MOST_COLUMNS} are read")
    if len(names) == 1 and (found := next((mark for mark in "|:" if names[0].count(mark) > 1), "")):
        raise ValueError(
            f"{file}: columns seem to be separated by {found!r}, and commas, semicolons and tabs are known: rewrite "
            f"the file, such as with pandas.read_csv({file!r}, sep={found!r}).to_csv('new.csv', index=False)"
        )
    if _made(names, _FLOAT) is not None:
        raise ValueError(
            f"{file}: its first line has numbers, not the names of columns ({shown(names[0])}): add a line with names"
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{file}: the column {shown(twice[0])} is there more than once: give each a name of its own")
