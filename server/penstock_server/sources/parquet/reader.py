"""Parquet files. A row group is a split, and is decoded batch by batch.

If files have few row groups, large ones are divided. pyarrow decodes a row group from its beginning, so each part costs
decoding the rows before it, but not making samples of them. Local files are mapped, and the workers share their pages.

The worker imports pyarrow: its threads do not survive a fork.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock_proto import distribution

from .. import files as fs
from ..arrow_columns import Place, rows_of
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack
from ..structure import Columns

_BATCH = 4 << 20
"""Bytes that are decoded at once, by the sizes in the metadata."""

_FEW = 8
"""Row groups that are so few that large ones are divided. Also the most parts of one: on average, reading a part costs
decoding half of the row group."""

_LEAST_ROWS = 64
_LEAST = 1 << 20
"""The least size of a part of a row group."""

_BATCH_ROWS = 8192
"""Rows that are decoded at once, at most. A repeated value has few bytes in the file, but many in memory."""


@on_disk_as("penstock_server.sources.parquet.RowGroup")
@dataclass(frozen=True, slots=True, repr=False)
class RowGroup:
    """A row group of a file that has `size` bytes (None: not known)."""

    file: str
    group: int
    rows: int
    size: int | None

    def __repr__(self) -> str:
        return f"{self.file} row group {self.group}"


@on_disk_as("penstock_server.sources.parquet.RowGroupPart")
@dataclass(frozen=True, slots=True, repr=False)
class RowGroupPart:
    """Rows `start` to `stop` (not included) of a row group."""

    whole: RowGroup
    start: int
    stop: int

    def __repr__(self) -> str:
        return f"{self.whole} rows {self.start} to {self.stop - 1}"

    @property
    def file(self) -> str:
        """The file that has the row group."""
        return self.whole.file


class ParquetSplits:
    """Lists the row groups of files, and divides large ones if they are few."""

    def __init__(self, files: fs.Files) -> None:
        self.__name__ = "Feed.from_parquet"
        self._files = fs.checked(files)
        self._known: dict[tuple[Any, ...], list[tuple[RowGroup, int]]] = {}

    def __call__(self) -> list[RowGroup | RowGroupPart]:
        """Read the metadata of each file that is new or has changed.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError: the files have no rows.
        """
        files = fs.expand(self._files)
        groups = [group for file in files for group in self._groups(file)]
        if not groups:
            more = f" (the first of {len(files)} files)" if len(files) > 1 else ""
            raise ValueError(f"no samples to read: {files[0]}{more} has no rows")
        return divided(groups)

    def _groups(self, file: str) -> list[tuple[RowGroup, int]]:
        size = fs.size_of(file)
        key = (file, size, *fs.stamp_of(file))
        if key not in self._known:
            with opened_parquet(file) as parquet:
                found = [parquet.metadata.row_group(group) for group in range(parquet.num_row_groups)]
                self._known[key] = [
                    (RowGroup(file, number, group.num_rows, size), group.total_byte_size)
                    for number, group in enumerate(found)
                    if group.num_rows
                ]
        return self._known[key]


def divided(groups: list[tuple[RowGroup, int]]) -> list[RowGroup | RowGroupPart]:
    """Return the splits that row groups make, each given with its bytes when decoded.

    With fewer than 8 row groups, large ones are divided into up to 8 parts each, of 64 rows and 1 MiB at least, so that
    there are about 16 splits.
    """
    found: list[RowGroup | RowGroupPart] = []
    wanted = min(_FEW, -(-2 * _FEW // max(1, len(groups)))) if len(groups) < _FEW else 1
    for group, nbytes in groups:
        parts = min(wanted, group.rows // _LEAST_ROWS, nbytes // _LEAST)
        if parts < 2:
            found.append(group)
            continue
        rows = -(-group.rows // parts)
        starts = range(0, group.rows, rows)
        found += [RowGroupPart(group, start, min(group.rows, start + rows)) for start in starts]
    return found


@on_disk_as("penstock_server.sources.parquet.ParquetRows")
class ParquetRows(StackReader):
    """Yields the rows of a row group."""

    def __init__(self, leaves: Any) -> None:
        self.__name__ = "Feed.from_parquet"
        self._columns = None if leaves is None else Columns(leaves, "column")

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns

    def stacks(self, split: RowGroup | RowGroupPart) -> Iterator[RowStack]:
        """Yield the rows of a row group, or of a part of it; see `StackReader`.

        Raises:
            LookupError, TypeError, ValueError: a column is missing, cannot be served, or holds nulls.
            OSError: the file cannot be read, or has changed since its splits were listed.
        """
        part = split if isinstance(split, RowGroupPart) else RowGroupPart(split, 0, split.rows)
        split = part.whole
        fs.check_size(split.file, split.size)
        with opened_parquet(split.file) as parquet:
            has = parquet.schema_arrow.names
            columns = self._columns or Columns({name: name for name in has}, "column")
            for name in columns.names:
                if has.count(name) != 1:
                    many = "two columns" if name in has else "no column"
                    fix = ". Write the file with one name for each" if name in has else ""
                    raise LookupError(f"{split.file} has {many} {name!r}; its columns are {', '.join(has)}{fix}")
            at = 0
            for table in _tables(parquet, split, columns.names):
                first, stop = max(0, part.start - at), min(table.num_rows, part.stop - at)
                if first < stop:
                    wanted = table.slice(first, stop - first)
                    places = [_place(split, name, at + first) for name in columns.names]
                    rows = [
                        rows_of(wanted.column(name), place) for name, place in zip(columns.names, places, strict=True)
                    ]
                    yield RowStack(columns, rows, wanted.num_rows)
                at += table.num_rows
                if at >= part.stop:
                    break
            if at < part.stop:
                raise OSError(f"{split}: it has {at} rows, and the metadata say {split.rows}: write the file again")


def _tables(parquet: Any, split: RowGroup, names: list[str]) -> Iterator[Any]:
    """Decode the columns of a row group, a part of its rows after the other."""
    import pyarrow as pa

    group = parquet.metadata.row_group(split.group)
    rows = max(1, min(_BATCH_ROWS, _BATCH * split.rows // max(1, group.total_byte_size)))
    batches = parquet.iter_batches(rows, row_groups=[split.group], columns=names, use_threads=False)
    while True:
        with readable(str(split)):
            batch = next(batches, None)
        if batch is None:
            return
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column.validate(full=True)
            except pa.ArrowInvalid as error:
                raise ValueError(
                    f"{split}: column {name!r} holds text that is not UTF-8, or is damaged ({error}): write bytes, or "
                    "copy the file again"
                ) from None
        yield pa.Table.from_batches([batch])


@contextmanager
def opened_parquet(file: str) -> Iterator[Any]:
    """Open a Parquet file by path or URL.

    Raises:
        ImportError: pyarrow is not installed.
        OSError: it cannot be opened; the message names it.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"Parquet files need pyarrow: {distribution.pip_install('parquet')}") from None
    with fs.open_binary(file) as stream:
        with readable(file):
            source, mapped = (stream, False) if fs.is_url(file) else (file, True)
            opened = parquet.ParquetFile(source, memory_map=mapped, page_checksum_verification=True)
        with opened:
            yield opened


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Name a file that pyarrow cannot read, and say what to do.

    Raises:
        MemoryError: there is not enough memory for a page.
        OSError: instead of all other errors of pyarrow.
    """
    import pyarrow

    try:
        yield
    except pyarrow.ArrowMemoryError as error:
        raise MemoryError(f"{where}: there is not enough memory for a page: write smaller pages ({error})") from None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise OSError(
            f"{where}: it is not a Parquet file, or is truncated or damaged: copy it again ({error})"
        ) from None


def _place(split: RowGroup, column: str, row: int) -> Place:
    return Place(
        f"{split}: column {column!r}",
        "fill them when you write the file, or serve other columns with leaves=",
        "name the columns to serve with leaves=, or write numbers in its place",
        row,
    )
