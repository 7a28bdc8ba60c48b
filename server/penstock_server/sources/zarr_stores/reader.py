"""Zarr stores: arrays of equal length, read in slabs of whole chunks.

A chunk is decompressed as a whole. So splits begin where chunks begin (or shards, which hold several), and a split is
read slab by slab. zarr is imported in the worker: its threads do not survive a fork.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock_proto import distribution

from .. import files as fs
from ..bounds import check_at_once
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..remote import stores, urls
from ..row_stacks import RowStack, joined
from ..splits.row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns

_SLAB = 4 << 20
"""Bytes that are read at once, unless the chunks have more."""

_FEW = 64 << 10
"""Bytes of an array that are read at once, at least: a read takes about a millisecond, however few they are."""

_MOST = 16 << 20
"""Bytes that are read at once so that no chunk is read twice, at most."""

_CHEAP = 64 << 20
"""Bytes of a row of chunks that several splits may decompress, if the store would else make too few."""

_SMALL = 8
"""An array is small if the rows of another one are more than this many times as large."""

_MANY = 1000
"""Arrays of a store that are looked at, at most."""

ONLY = "data"
"""The name of the leaf of a store that is a single array."""


class ZarrStores:
    """The arrays of stores, for both listing and reading.

    Args:
        files: paths, patterns and URLs.
        leaves: names of arrays in the structure of a sample; by default a dict of all arrays, or the only array.
    """

    def __init__(self, files: fs.Files, leaves: Any) -> None:
        self.files = fs.checked(files)
        self.given = None if leaves is None else Columns(leaves, "array")

    def expand(self) -> list[str]:
        """Return the stores. A store is a folder, so a pattern matches folders, too.

        Raises:
            FileNotFoundError: a pattern matches nothing.
        """
        return fs.expand_folders(self.files)

    @contextmanager
    def open(self, file: str) -> Iterator[tuple[Columns, list[Any]]]:
        """Open a store, and yield the structure of a sample with the arrays in the order of its names.

        Raises:
            ImportError: zarr is not installed.
            OSError: it cannot be opened; the message says why.
            LookupError, TypeError, ValueError: an array is missing, cannot be served, or is shorter than another.
        """
        with opened(file) as store:
            arrays = arrays_of(store)
            columns = self.given or _all_of(arrays)
            yield columns, [_checked(arrays, file, name) for name in columns.names]


def _all_of(arrays: dict[str, Any]) -> Columns:
    return Columns(ONLY if [*arrays] == [ONLY] else {name: name for name in arrays}, "array")


_METADATA = ("zarr.json", ".zarray", ".zgroup")


class ZarrSplits:
    """Lists the row ranges of Zarr stores."""

    def __init__(self, stores: ZarrStores, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_zarr"
        self._stores = stores
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)

    def __call__(self) -> list[RowRange]:
        """Open each store, and divide the rows of all.

        Raises:
            OSError, LookupError, TypeError, ValueError: as `ZarrStores.open`; or there are no rows.
        """
        tables = []
        for file in self._stores.expand():
            with self._stores.open(file) as (columns, found):
                names, lengths = columns.names, [array.shape[0] for array in found]
                for name, length in zip(names, lengths, strict=True):
                    if length != lengths[0]:
                        raise ValueError(
                            f"{file}: {names[0]!r} has {lengths[0]} rows and {name!r} has {length}: each sample takes "
                            "one row of every array, so write all with one length, or leave one of them out"
                        )
                tables.append(Table(file, None, lengths[0], sum(map(row_nbytes, found)), *chunk_rows(found)))
        return divide(tables, self._rows, self._split_rows)


@on_disk_as("penstock_server.sources.zarr_stores.ZarrRows")
class ZarrRows(StackReader):
    """Yields the rows of a range, read in slabs."""

    def __init__(self, stores: ZarrStores) -> None:
        self.__name__ = "Feed.from_zarr"
        self._stores = stores

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._stores.given

    def files_of(self, split: RowRange) -> list[str]:
        """Return the files and folders of a local store that change when an array changes. (A chunk is replaced by a
        new file, which changes its folder.)"""
        if not os.path.isdir(split.file):
            return [split.file]
        return sorted(
            os.path.join(folder, name)
            for folder, _, names in os.walk(split.file)
            for name in ("", *(name for name in names if name in _METADATA))
        )

    def compared_files(self, split: RowRange) -> list[str]:
        """See `Reader`: of a local folder, the metadata at its top. It may have a million chunks, each a file."""
        if not os.path.isdir(split.file):
            return [] if fs.is_url(split.file) else [split.file]
        return [path for name in _METADATA if os.path.exists(path := os.path.join(split.file, name))]

    def stacks(self, split: RowRange) -> Iterator[RowStack]:
        """Yield the rows of a split; see `StackReader`.

        Raises:
            OSError: the store cannot be read.
            ValueError: it has fewer rows than when its splits were listed.
        """
        with self._stores.open(split.file) as (columns, found):
            unit, _, chunk, _ = chunk_rows(found)
            nbytes = max(1, sum(map(row_nbytes, found)))
            if unit * nbytes > _MOST:  # chunks seldom meet
                unit = chunk
            rows = unit * max(1, _SLAB // (unit * nbytes))
            yield from joined(columns, [_slabs(array, split, rows) for array in found])


@contextmanager
def opened(file: str) -> Iterator[Any]:
    """Open a Zarr store by path or URL: a group, or an array.

    Raises:
        ImportError: zarr is not installed.
        OSError: it cannot be opened; the message names it.
    """
    try:
        import zarr
        from zarr.storage import ZipStore
    except ImportError:
        raise ImportError(f"{file} needs zarr 3: {distribution.pip_install('zarr')}") from None
    zipped = urls.without_query(file).endswith(".zip")
    if zipped and fs.is_url(file):
        raise OSError(f"{file}: a store in a ZIP file is read from a local disk only: copy it, or unpack it")
    try:
        if not fs.is_url(file) and not os.path.exists(file):
            where = "" if os.path.isabs(file) else f" in {os.getcwd()}"
            raise FileNotFoundError(f"{file}: no such store{where}")
        store: Any = file.removeprefix(urls.BY_NAME)
        if zipped:
            store = ZipStore(file, mode="r")
        elif urls.is_remote(file):
            from .remote_store import RemoteStore

            store = RemoteStore(file)
        root = zarr.open(store, mode="r")
    except FileNotFoundError as error:
        if "no such store" in str(error):
            raise
        raise OSError(f"{file} is not a Zarr store: it has no zarr.json, .zgroup or .zarray") from None
    except Exception as error:  # of zarr, its codecs, zipfile and obstore
        _raise_if_of_network(file, error)
        raise OSError(f"{file} cannot be opened as a Zarr store: {type(error).__name__}: {error}") from None
    try:
        yield root
    finally:
        if zipped:
            store.close()


def _raise_if_of_network(file: str, error: Exception) -> None:
    """Raise the error that says why a URL cannot be read, if that is the reason.

    Raises:
        OSError: that error.
    """
    if isinstance(error, OSError) and str(error).startswith(f"{file}: "):
        raise error
    if explained := stores.explained(file, error):
        raise explained from None


def arrays_of(store: Any) -> dict[str, Any]:
    """Return the arrays of a store by name, up to `_MANY`; the only array of a store without groups is `ONLY`."""
    if hasattr(store, "shape"):
        return {ONLY: store}
    found: dict[str, Any] = {}
    groups = [("", store)]
    while groups and len(found) < _MANY:
        path, group = groups.pop(0)
        found.update((path + name, array) for name, array in sorted(group.arrays()))
        groups += [(f"{path}{name}/", inner) for name, inner in sorted(group.groups())]
    return found


def _checked(arrays: dict[str, Any], file: str, name: str) -> Any:
    """Return an array whose rows can be leaves.

    Raises:
        LookupError: there is no such array.
        TypeError, ValueError: its rows cannot be leaves, or are too large.
    """
    if name not in arrays:
        some = [f"{one} ({array.dtype}{[*array.shape]})" for one, array in [*arrays.items()][:20]]
        raise LookupError(f"{file} has no array {name!r}; its arrays are {', '.join(some) or 'none'}")
    if why := unfit(arrays[name]):
        raise TypeError(f"{file}: {name!r} {why}")
    array = arrays[name]
    check_at_once(row_nbytes(array), f"{file}: {name!r}", "rows")
    check_at_once(math.prod(array.chunks) * array.dtype.itemsize, f"{file}: {name!r}", "chunks")
    return array


def unfit(array: Any) -> str:
    """Return why the rows of an array cannot be leaves, or ""."""
    if not array.shape:
        return "is a single value, not an array of rows: leave it out"
    if array.dtype.kind not in "biufcSUOT":
        return f"has dtype {array.dtype}, which cannot be served: leave it out, or write it as numbers"
    return ""


def row_nbytes(array: Any) -> int:
    """Return the bytes of one row of an array."""
    return int(math.prod(array.shape[1:])) * int(array.dtype.itemsize)


def chunk_rows(found: list[Any]) -> tuple[int, int, int, bool]:
    """Return where splits may begin: `unit`, `better`, `chunk` and `cheap` of `Table`.

    Arrays with rows much smaller than others (labels beside images) may have chunks that do not fit those of the large
    ones.
    """
    most = max(map(row_nbytes, found))
    read = [(array.shards or array.chunks)[0] for array in found]
    large = [(rows, row_nbytes(array)) for rows, array in zip(read, found, strict=True)]
    large = [(rows, nbytes) for rows, nbytes in large if nbytes * _SMALL >= most]
    cheap = all(rows * nbytes <= _CHEAP for rows, nbytes in large)
    return math.lcm(*(rows for rows, _ in large)), math.lcm(*read), max(rows for rows, _ in large), cheap


def _slabs(array: Any, split: RowRange, rows: int) -> Iterator[Any]:
    """Yield the rows of an array in a split, slab by slab. Read `rows` rows at a time, or more if they are small."""
    rows *= max(1, _FEW // (rows * max(1, row_nbytes(array))))
    start = split.start
    while start < split.stop:
        stop = min(split.stop, (start // rows + 1) * rows)
        slab = _slab(array, split.file, start, stop)
        yield slab
        del slab  # before the next one is read
        start = stop


def _slab(array: Any, file: str, start: int, stop: int) -> Any:
    try:
        slab = array[start:stop]
    except Exception as error:  # of zarr, its codecs and obstore
        _raise_if_of_network(file, error)
        raise OSError(
            f"{file}: rows {start} to {stop - 1} of {array.path or ONLY!r} cannot be read: is a chunk damaged? "
            f"({type(error).__name__}: {error})"
        ) from None
    if len(slab) < stop - start:
        raise ValueError(f"{file}: {array.path or ONLY!r} has become shorter since its splits were listed")
    if slab.dtype.kind in "SUOT":
        return slab.astype(object)
    return slab if slab.dtype.isnative else slab.astype(slab.dtype.newbyteorder("="))
