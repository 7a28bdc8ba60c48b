"""Arrow files and streams, a few record batches at a time.

A local file is mapped into memory, so numbers are not copied. A stream has no list of its record batches. The heads of
its messages, which each worker reads once, say where they are. A stream with dictionaries is read from its beginning.
The worker imports pyarrow: its threads do not survive a fork.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from penstock_proto import distribution

from .. import files as fs
from ..arrow_columns import Place, rows_of
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack
from ..structure import Columns
from .stream_index import StreamIndex, index_of

_MAGIC = b"ARROW1"
_SPLITS = 256
"""Most splits of a file."""

_HEADS = 4096
"""Bytes that are read at once from a local stream while its record batches are found."""

_STREAMS = 64
"""Streams whose record batches a process has found, and remembers."""


@on_disk_as("penstock_server.sources.arrow.reader.RecordBatches")
@dataclass(frozen=True, slots=True, repr=False)
class RecordBatches:
    """Record batches of a file that has `size` bytes (None: not known): those from `start` to `stop`."""

    file: str
    start: int
    stop: int
    size: int | None

    def __repr__(self) -> str:
        last = f" to {self.stop - 1}" if self.stop > self.start + 1 else ""
        return f"{self.file} record batch {self.start}{last}"


class ArrowSplits:
    """Lists the record batches of files."""

    def __init__(self, files: fs.Files) -> None:
        self.__name__ = "Feed.from_files"
        self._files = fs.checked(files)
        self._known: dict[tuple[Any, ...], list[RecordBatches]] = {}

    def __call__(self) -> list[RecordBatches]:
        """Count the record batches of each file that is new or has changed.

        Raises:
            OSError: a file is missing or cannot be read.
        """
        return [split for file in fs.expand(self._files) for split in self._splits(file)]

    def _splits(self, file: str) -> list[RecordBatches]:
        size = fs.size_of(file)
        key = (file, size, *fs.stamp_of(file))
        if key not in self._known:
            with opened_arrow(file) as arrow:
                count = arrow.count
            step = -(-count // _SPLITS) or 1
            self._known[key] = [
                RecordBatches(file, start, min(start + step, count), size) for start in range(0, count, step)
            ]
        return self._known[key]


@on_disk_as("penstock_server.sources.arrow.reader.ArrowRows")
class ArrowRows(StackReader):
    """Yields the rows of record batches."""

    def __init__(self, leaves: Any) -> None:
        self.__name__ = "Feed.from_files"
        self._columns = None if leaves is None else Columns(leaves, "column")

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns

    def stacks(self, split: RecordBatches) -> Iterator[RowStack]:
        """Yield the rows of record batches; see `StackReader`.

        Raises:
            LookupError, TypeError, ValueError: a column is missing, cannot be served, or holds nulls.
            OSError: the file cannot be read, or has changed since its splits were listed.
        """
        fs.check_size(split.file, split.size)
        with opened_arrow(split.file) as arrow:
            has = arrow.schema.names
            columns = self._columns or Columns({name: name for name in has}, "column")
            for name in columns.names:
                if has.count(name) != 1:
                    many = "two columns" if name in has else "no column"
                    fix = ". Write the file with one name for each" if name in has else ""
                    raise LookupError(f"{split.file} has {many} {name!r}; its columns are {', '.join(has)}{fix}")
            for number, batch in arrow.batches(split.start, split.stop):
                where = f"{split.file} record batch {number}"
                with _readable(where):
                    batch = batch.select([*dict.fromkeys(columns.names)])
                    batch.validate(full=True)  # pyarrow trusts offsets, and would read anywhere in memory
                rows = [rows_of(batch.column(name), _place(where, name)) for name in columns.names]
                yield RowStack(columns, rows, batch.num_rows)


class OpenedArrow:
    """An Arrow file, or a stream.

    Args:
        name: of the file.
        source: a file, which can be one of pyarrow.
        index: where the record batches of a stream are; None for a file.

    Attributes:
        schema: its columns.
    """

    def __init__(self, name: str, source: Any, index: StreamIndex | None) -> None:
        from pyarrow import ipc

        self._name = name
        self._source = source
        self._is_stream = is_stream = index is not None
        self._places = None if index is None else index.places
        with _readable(name):
            self._reader = ipc.open_stream(source) if is_stream else ipc.open_file(source)
            self.schema = self._reader.schema
            assert self.schema.names is not None  # decodes them

    @property
    def count(self) -> int:
        """The number of record batches. Those of a stream may have to be read, and then it cannot be read again."""
        if not self._is_stream:
            return int(self._reader.num_record_batches)
        return sum(1 for _ in self._streamed()) if self._places is None else len(self._places)

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Any]]:
        """Yield record batches with their numbers. A stream can be read only once.

        Raises:
            OSError: the file is damaged.
        """
        if self._is_stream and self._places is None:
            yield from islice(enumerate(self._streamed()), start, stop)
            return
        for number in range(start, self.count if stop is None else min(stop, self.count)):
            with _readable(self._name):
                batch = self._reader.get_batch(number) if self._places is None else self._at(self._places[number])
            yield number, batch

    def _at(self, place: int) -> Any:
        from pyarrow import ipc

        self._source.seek(place)
        return ipc.read_record_batch(ipc.read_message(self._source), self.schema)

    def _streamed(self) -> Iterator[Any]:
        while True:
            with _readable(self._name):
                try:
                    batch = self._reader.read_next_batch()
                except StopIteration:
                    return
            yield batch


@contextmanager
def opened_arrow(file: str) -> Iterator[OpenedArrow]:
    """Open an Arrow file or stream by path or URL.

    Raises:
        ImportError: pyarrow is not installed.
        OSError: it cannot be opened; the message names it.
    """
    try:
        import pyarrow
    except ImportError:
        raise ImportError(f"Arrow files need pyarrow: {distribution.pip_install('parquet')}") from None
    with fs.open_binary(file) as stream:
        is_file = fs.read_exactly(stream, len(_MAGIC)) == _MAGIC
        index = None if is_file else _remembered_index(file, fs.size_of(file), *fs.stamp_of(file))
        if index is not None and not index.whole:  # pyarrow takes one that was cut between two record batches for whole
            raise OSError(
                f"{file}: it is not an Arrow file, or a stream that is damaged or cut off: copy it again, or close its "
                "writer"
            )
        stream.seek(0)
        if fs.is_url(file):
            yield OpenedArrow(file, stream, index)
        else:
            with _readable(file), pyarrow.memory_map(file) as mapped:
                yield OpenedArrow(file, mapped, index)


@lru_cache(_STREAMS)
def _remembered_index(file: str, size: int | None, stamp: Any) -> StreamIndex:
    with fs.open_binary(file) if fs.is_url(file) else open(file, "rb", buffering=_HEADS) as stream:
        return index_of(stream, sys.maxsize if size is None else size)


@contextmanager
def _readable(file: str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if file in str(error):
            raise
        raise OSError(f"{file}: it is not an Arrow file, or is truncated or damaged: copy it again ({error})") from None


def _place(where: str, column: str) -> Place:
    return Place(
        f"{where}: column {column!r}",
        "fill them when you write the file, or serve other columns with leaves=",
        "name the columns to serve with leaves=, or write numbers in its place",
    )
