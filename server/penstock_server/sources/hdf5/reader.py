"""HDF5 files: datasets of equal length, read in slabs of whole chunks.

HDF5 decompresses a whole chunk for one of its rows. So splits begin where chunks begin, and a split is read slab by
slab: each chunk is decompressed once in an epoch. (Several splits may decompress the same chunk of labels, if its
borders do not fit those of the images.) h5py is imported in the worker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import files as fs
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns

_SLAB = 1 << 20
"""Bytes that are read at once, unless the chunks have more."""

_SMALL = 8
"""A dataset is small if the rows of another one are more than this many times as large."""


class Hdf5Source:
    """The datasets of a file, for both listing and reading.

    Args:
        files: paths, patterns and URLs.
        leaves: names of datasets in the structure of a sample.
        locking: as in `h5py.File`; False for file systems without locks.
    """

    def __init__(self, files: fs.Files, leaves: Any, locking: bool | None) -> None:
        if locking not in (None, True, False):
            raise TypeError(f"locking must be True, False or None, got {locking!r}")
        self.files = fs.checked(files)
        self.columns = Columns(leaves, "dataset")
        self.locking = locking

    @contextmanager
    def open(self, file: str) -> Iterator[list[Any]]:
        """Open a file, and yield its datasets in the order of `columns.names`.

        Raises:
            OSError: it cannot be opened; the message says why and what to do.
            LookupError, TypeError, ValueError: a dataset is missing, cannot be served, or is shorter than another.
        """
        with opened(file, self.locking) as h5:
            yield datasets(h5, file, self.columns.names)


class Hdf5Splits:
    """Lists the row ranges of HDF5 files."""

    def __init__(self, source: Hdf5Source, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_hdf5"
        self._source = source
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)
        self._known: dict[tuple[Any, ...], Table] = {}

    def __call__(self) -> list[RowRange]:
        """Open each file that is new or has changed, and divide the rows of all.

        Raises:
            OSError, LookupError, TypeError, ValueError: as `Hdf5Source.open`; or there are no rows.
        """
        tables = [self._table(file) for file in fs.expand(self._source.files)]
        return divide(tables, self._rows, self._split_rows)

    def _table(self, file: str) -> Table:
        size = fs.size_of(file)
        key = (file, size, None if fs.is_url(file) else os.stat(file).st_mtime_ns)
        table = self._known.get(key)
        if table is None:
            with self._source.open(file) as found:
                nbytes = sum(row_nbytes(dataset) for dataset in found)
                table = Table(file, size, len(found[0]), nbytes, *chunk_rows(found))
            self._known[key] = table
        return table


@on_disk_as("penstock_server.sources.hdf5.Hdf5Rows")
class Hdf5Rows(Reader):
    """Yields the rows of a range, read in slabs."""

    def __init__(self, source: Hdf5Source) -> None:
        self.__name__ = "Feed.from_hdf5"
        self._source = source

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._source.columns

    def __call__(self, split: RowRange) -> Iterator[Any]:
        """Yield one sample for each row.

        Raises:
            OSError: the file cannot be read, or has changed since its splits were listed.
        """
        source = self._source
        fs.check_size(split.file, split.size)
        with source.open(split.file) as found:
            unit, _ = chunk_rows(found)
            rows = unit * max(1, _SLAB // max(1, unit * sum(row_nbytes(dataset) for dataset in found)))
            start = split.start
            while start < split.stop:
                stop = min(split.stop, (start // rows + 1) * rows)
                with _readable(split.file):
                    slabs = [_slab(dataset, start, stop) for dataset in found]
                yield from source.columns.samples(slabs)
                del slabs  # before the next ones are read
                start = stop


@contextmanager
def opened(file: str, locking: bool | None) -> Iterator[Any]:
    """Open an HDF5 file by path or URL.

    Raises:
        OSError: it cannot be opened; the message names it, and says what to do.
    """
    import h5py

    if fs.is_url(file):
        with fs.open_binary(file) as stream:
            with _readable(file):
                h5 = h5py.File(stream, "r")
            with h5:
                yield h5
        return
    with fs.errors_that_name(file), _readable(file):
        h5 = h5py.File(file, "r", locking=locking)
    with h5:
        yield h5


@contextmanager
def _readable(file: str) -> Iterator[None]:
    """Say what is wrong with a file, and what to do, where HDF5's message only hints at it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        text = str(error)
        if "truncated" in text:
            why = "the file is truncated: copy it again, or leave it out"
        elif "unable to lock" in text:
            why = (
                "another process has locked the file, perhaps to write it: wait until it has closed the file. If the "
                "file system has no locks (NFS), give locking=False"
            )
        elif "signature not found" in text:
            why = "this is not an HDF5 file, or its writer was killed before it closed the file"
        elif "already open for write" in text or "consistency flags" in text:
            why = "its writer still has the file open, or was killed: close it, or run h5clear -s on the file"
        elif "filter" in text:
            why = "a chunk cannot be decompressed: its filter is missing (pip install hdf5plugin), or it is damaged"
        else:
            why = "it cannot be read: is it damaged, or did a writer change it?"
        raise OSError(f"{file}: {why} ({text})") from None


def datasets(h5: Any, file: str, names: list[str]) -> list[Any]:
    """Return the datasets with these names, which must have one length.

    Raises:
        LookupError: there is no such dataset; the message lists the existing ones.
        TypeError: one cannot be served.
        ValueError: their lengths differ.
    """
    found = []
    for name in names:
        dataset = h5.get(name)
        if dataset is None or not hasattr(dataset, "chunks"):
            what = "no dataset" if dataset is None else "a group, not a dataset,"
            raise LookupError(f"{file} has {what} {name!r}; its datasets are {', '.join(_all(h5)) or 'none'}")
        check_servable(dataset, file, name)
        found.append(dataset)
    for name, dataset in zip(names[1:], found[1:], strict=True):
        if len(dataset) != len(found[0]):
            raise ValueError(
                f"{file}: {names[0]!r} has {len(found[0])} rows and {name!r} has {len(dataset)}: each sample takes one "
                "row of every dataset, so write both with one length, or leave one of them out"
            )
    return found


def chunk_rows(found: list[Any]) -> tuple[int, int]:
    """Return the least number of rows at whose multiples a chunk of each large dataset begins, and the least one at
    whose multiples a chunk of every dataset begins.

    Only compressed datasets count. A small one (labels beside images) may have chunks that do not fit those of the
    large ones. If splits always followed its chunks, a file could end up with a single split.
    """
    compressed = [one for one in found if one.chunks is not None and one.id.get_create_plist().get_nfilters()]
    most = max(map(row_nbytes, compressed), default=0)
    large = [one.chunks[0] for one in compressed if row_nbytes(one) * _SMALL >= most]
    return math.lcm(*large), math.lcm(*(one.chunks[0] for one in compressed))


def row_nbytes(dataset: Any) -> int:
    """Return the bytes of one row of a dataset."""
    return int(math.prod(dataset.shape[1:])) * int(dataset.dtype.itemsize)


def _slab(dataset: Any, start: int, stop: int) -> Any:
    slab = dataset[start:stop]
    return slab if slab.dtype.isnative else slab.astype(slab.dtype.newbyteorder("="))


def check_servable(dataset: Any, file: str, name: str) -> None:
    """Check that the rows of a dataset can be leaves.

    Raises:
        TypeError: they cannot; the message names the file and the dataset.
    """
    import h5py

    if not dataset.shape:
        raise TypeError(f"{file}: {name!r} is a single value, not an array of rows: leave it out")
    kind = dataset.dtype
    text = h5py.check_string_dtype(kind) is not None
    if kind.kind == "V" or (kind.kind == "O" and not text and h5py.check_vlen_dtype(kind) is None):
        raise TypeError(f"{file}: {name!r} has dtype {kind}, which cannot be served: write each field as a dataset")


def _all(h5: Any) -> list[str]:
    names: list[str] = []

    def note(name: str, item: Any) -> None:
        if hasattr(item, "chunks"):
            names.append(f"{name} ({item.dtype}{list(item.shape)})")

    h5.visititems(note)
    return names[:20]
