"""Parquet files. A row group is a split, and is decoded batch by batch.

If files have few row groups, large ones are divided. pyarrow decodes a row group from its beginning, so each part costs
decoding the rows before it, but not making samples of them. Local files are mapped, and the workers share their pages.

The worker imports pyarrow: its threads do not survive a fork.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_proto import distribution

from .. import files as fs
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..structure import Columns

_BATCH = 16 << 20
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
        key = (file, size, None if fs.is_url(file) else os.stat(file).st_mtime_ns)
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
class ParquetRows(Reader):
    """Yields the rows of a row group."""

    def __init__(self, leaves: Any) -> None:
        self.__name__ = "Feed.from_parquet"
        self._columns = None if leaves is None else Columns(leaves, "column")

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns

    def __call__(self, split: RowGroup | RowGroupPart) -> Iterator[Any]:
        """Yield one sample for each row.

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
                if name not in has:
                    raise LookupError(f"{split.file} has no column {name!r}; its columns are {', '.join(has)}")
            at = 0
            for table in _tables(parquet, split, columns.names):
                wanted = table.slice(max(0, part.start - at), part.stop - max(at, part.start))
                if at + table.num_rows > part.start:
                    yield from columns.samples([_values(wanted, name, split) for name in columns.names])
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
        yield pa.Table.from_batches([batch])


def can_be_served(kind: Any) -> bool:
    """Whether columns of this Arrow type can be leaves."""
    import pyarrow as pa

    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if any(test(kind) for test in (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)):
        return _is_number(kind.value_type)
    return _is_number(kind) or _is_text(kind) or _is_binary(kind)


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


def _values(table: Any, name: str, split: RowGroup) -> Any:
    """Return one value for each row of a column: an array, or a list."""
    import pyarrow as pa

    array = table.column(name).combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # as pyarrow may return for no rows or too many bytes
        array = pa.concat_arrays(array.chunks)
    if isinstance(array.type, pa.DictionaryType):
        if _is_text(array.type.value_type) or _is_binary(array.type.value_type):
            _check_nulls(array, name, split)
            _check_nulls(array.dictionary, name, split)
            words = _as_list(array.dictionary, name, split)
            return [words[index] for index in array.indices.to_numpy(zero_copy_only=False)]
        array = array.dictionary_decode()
    kind = array.type
    _check_nulls(array, name, split)
    if isinstance(kind, pa.FixedShapeTensorType):
        return array.to_numpy_ndarray()
    if pa.types.is_fixed_size_list(kind) and _is_number(kind.value_type):
        items = array.flatten()
        _check_nulls(items, name, split)
        return items.to_numpy(zero_copy_only=False).reshape(len(array), kind.list_size)
    if (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_number(kind.value_type):
        items = array.flatten()
        _check_nulls(items, name, split)
        ends = np.cumsum(array.value_lengths().to_numpy(zero_copy_only=False))
        return np.split(items.to_numpy(zero_copy_only=False), ends[:-1])
    if _is_number(kind):
        return array.to_numpy(zero_copy_only=False)
    if _is_text(kind) or _is_binary(kind):
        return _as_list(array, name, split)
    raise TypeError(
        f"{split}: column {name!r} has type {kind}, which cannot be served: name the columns to serve with leaves=, or "
        "write numbers in its place"
    )


def _as_list(array: Any, name: str, split: RowGroup) -> list[Any]:
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError as error:
        raise ValueError(f"{split}: column {name!r} holds text that is not UTF-8 ({error}): write bytes") from None


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def _check_nulls(array: Any, name: str, split: RowGroup) -> None:
    if array.null_count:
        raise ValueError(
            f"{split}: column {name!r} holds {array.null_count} nulls, and an array cannot: fill them when you write "
            "the file, or serve other columns with leaves="
        )
