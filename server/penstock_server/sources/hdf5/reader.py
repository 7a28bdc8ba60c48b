"""HDF5 files: datasets of equal length, read in slabs of whole chunks.

HDF5 decompresses a whole chunk for one of its rows. So splits begin where chunks begin, and each dataset of a split is
read slab by slab: a chunk is decompressed once in an epoch. The exceptions are chunks that lie across the border of two
splits: those of small datasets (labels beside images), and those of any dataset if the file would else make too few
splits. h5py is imported in the worker.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import files as fs
from ..bounds import check_at_once
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack, joined
from ..splits.row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns
from .opening import opened
from .outside import OutsideFiles
from .views import CsrRows, Field, Records, SparseSlab, fields_of, view_of

_SLAB = 1 << 20
"""Bytes of a dataset that are read at once, unless a row of chunks has more."""

_BAND = 256 << 20
"""Bytes of a dataset that are read at once, at most, unless one sample has more. A row of chunks of more bytes is
decompressed several times."""

_CHEAP = 64 << 20
"""Bytes of a row of chunks that several splits may decompress, if the file would else make too few: 0.3 s of work."""

_SMALL = 8
"""A dataset is small if the rows of another one are more than this many times as large."""


class Hdf5Source:
    """The datasets of a file, for both listing and reading.

    Args:
        files: paths, patterns and URLs.
        leaves: names of datasets in the structure of a sample.
        locking: as in `h5py.File`; False for file systems without locks.
        allow_outside: whether a file may depend on files in other folders.
    """

    def __init__(self, files: fs.Files, leaves: Any, locking: bool | None, allow_outside: bool = False) -> None:
        if allow_outside not in (True, False):
            raise TypeError(f"allow_outside must be True or False, got {allow_outside!r}")
        if locking not in (None, True, False):
            raise TypeError(f"locking must be True, False or None, got {locking!r}")
        self.files = fs.checked(files)
        self.columns = Columns(leaves, "dataset")
        self.locking = locking
        self._outside = OutsideFiles(self.columns.names, allow_outside, locking)

    @contextmanager
    def open(self, file: str) -> Iterator[list[Any]]:
        """Open a file, and yield its datasets in the order of `columns.names`.

        Raises:
            OSError: it cannot be opened, or depends on a file that cannot be read; the message says why and what to do.
            LookupError, TypeError, ValueError: a dataset is missing, cannot be served, or is shorter than another.
        """
        with opened(file, self.locking) as h5:
            with damage_of(file):
                self._outside.of(h5, file)
                found = datasets(h5, file, self.columns.names)
            yield found

    def remembered(self, file: str) -> list[str] | None:
        """Return the files on which a file depends; None if they have not been found yet, or one has changed."""
        return [] if fs.is_url(file) else self._outside.remembered(file)

    def files_of(self, file: str) -> list[str]:
        """Return a file and all others on which its datasets depend."""
        found = self.remembered(file)
        if found is None:
            try:
                with opened(file, self.locking) as h5, damage_of(file):
                    found = self._outside.of(h5, file)
            except OSError:  # it will be raised again when the file is read
                found = []
        return [file, *found]


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
        others = self._source.remembered(file)
        known = None if others is None else self._known.get((file, size, *fs.stamp_of(file, *others)))
        if known is not None:
            return known
        with self._source.open(file) as found:
            nbytes = sum(row_nbytes(dataset) for dataset in found)
            table = Table(file, size, len(found[0]), nbytes, *chunk_rows(found))
        self._known[file, size, *fs.stamp_of(file, *(self._source.remembered(file) or ()))] = table
        return table


@on_disk_as("penstock_server.sources.hdf5.Hdf5Rows")
class Hdf5Rows(StackReader):
    """Yields the rows of a range, read in slabs."""

    def __init__(self, source: Hdf5Source) -> None:
        self.__name__ = "Feed.from_hdf5"
        self._source = source

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._source.columns

    def files_of(self, split: RowRange) -> list[str]:
        """See `Reader`."""
        return self._source.files_of(split.file)

    def stacks(self, split: RowRange) -> Iterator[RowStack]:
        """Yield the rows of a split; see `StackReader`.

        Raises:
            OSError: the file cannot be read, or has changed since its splits were listed.
        """
        source = self._source
        fs.check_size(split.file, split.size)
        with source.open(split.file) as found:
            check = size_check(split, source.remembered(split.file))
            names = source.columns.names
            slabs = [_slabs(dataset, split, name, check) for name, dataset in zip(names, found, strict=True)]
            yield from joined(source.columns, slabs)


def size_check(split: RowRange, others: list[str] | None) -> fs.SizeCheck:
    """Return what compares the sizes of a split's file, and of those on which it depends, with those of now."""
    return fs.SizeCheck(
        {file: fs.size_of(file) for file in others or () if os.path.exists(file)} | {split.file: split.size}
    )


def _slabs(dataset: Any, split: RowRange, name: str, check: fs.SizeCheck) -> Iterator[Any]:
    """Yield the rows of a dataset in a split, in slabs that end where chunks do. After each is read, `check` is called:
    a file that is truncated while it is open has zeros in the place of rows."""
    row = max(1, getattr(dataset, "slab_row_nbytes", 0) or row_nbytes(dataset))
    chunk = dataset.chunks[0] if is_compressed(dataset) else 1
    rows = chunk * max(1, _SLAB // (chunk * row))
    if rows * row > _BAND:
        rows = max(1, _BAND // row)
    start = split.start
    while start < split.stop:
        stop = min(split.stop, (start // rows + 1) * rows)
        try:
            slab = _slab(dataset, start, stop)
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise OSError(
                f"{split.file}: rows {start} to {stop - 1} of {name!r} cannot be read ({error}). The file is damaged, "
                "or a writer changes it: copy it again, or leave these rows out with rows="
            ) from None
        check()
        if isinstance(slab, SparseSlab):
            yield from slab.dense()
        else:
            yield slab
        del slab  # before the next one is read
        start = stop


@contextmanager
def damage_of(file: str) -> Iterator[None]:
    """Name a file where h5py has met damage that it does not report as an OSError.

    Raises:
        OSError: instead of these.
    """
    try:
        yield
    except (KeyError, RuntimeError, SystemError, UnicodeDecodeError, OSError) as error:
        if file in str(error):
            raise
        raise OSError(f"{file}: the file is damaged ({error}): copy it again, or leave it out") from None


def datasets(h5: Any, file: str, names: list[str]) -> list[Any]:
    """Return the datasets with these names, which must have one length.

    Raises:
        LookupError: there is no such dataset; the message lists the existing ones.
        TypeError: one cannot be served.
        ValueError: their lengths differ.
    """
    found = []
    tables: dict[tuple[str, str], Records] = {}
    for name in names:
        dataset = servable(h5, file, name)
        if isinstance(dataset, Field):
            table = dataset.records.dataset
            dataset.records = tables.setdefault((table.file.filename, table.name), dataset.records)
        found.append(dataset)
    for name, dataset in zip(names[1:], found[1:], strict=True):
        if len(dataset) != len(found[0]):
            raise ValueError(
                f"{file}: {names[0]!r} has {len(found[0])} rows and {name!r} has {len(dataset)}: each sample takes one "
                "row of every dataset, so write both with one length, or leave one of them out"
            )
    return found


def servable(h5: Any, file: str, name: str) -> Any:
    """Return the dataset, or the view, with this name.

    Raises:
        LookupError: there is no such dataset; the message lists the existing ones.
        OSError, TypeError, ValueError: it cannot be served; see `check_servable`.
    """
    try:
        dataset = view_of(h5, name)
    except TypeError as error:
        raise TypeError(f"{file}: {name!r} {error}") from None
    if dataset is None or not hasattr(dataset, "chunks"):
        what = "no dataset" if dataset is None else "a group, not a dataset,"
        raise LookupError(f"{file} has {what} {name!r}; its datasets are {', '.join(_all(h5)) or 'none'}")
    check_servable(dataset, file, name)
    return dataset


def chunk_rows(found: list[Any]) -> tuple[int, int, int, bool]:
    """Return where splits may begin: `unit`, `better`, `chunk` and `cheap` of `Table`.

    Only compressed datasets count. A small one (labels beside images) may have chunks that do not fit those of the
    large ones. If splits always followed its chunks, a file could end up with a single split. The same holds for the
    chunks of large ones: 625 rows of images and 313 rows of masks meet again after 195,625 rows. Then splits follow
    only the larger chunks, or divide these too if decompressing a row of chunks again costs little.
    """
    compressed = [one for one in found if is_compressed(one)]
    most = max(map(row_nbytes, compressed), default=0)
    large = [one for one in compressed if row_nbytes(one) * _SMALL >= most]
    unit = math.lcm(*(one.chunks[0] for one in large))
    better = math.lcm(*(one.chunks[0] for one in compressed))
    chunk = max((one.chunks[0] for one in large), default=1)
    cheap = all(one.chunks[0] * row_nbytes(one) <= _CHEAP for one in large)
    return unit, better, chunk, cheap


def row_nbytes(dataset: Any) -> int:
    """Return the bytes of one row of a dataset."""
    return int(math.prod(dataset.shape[1:])) * int(dataset.dtype.itemsize)


def is_compressed(dataset: Any) -> bool:
    """Return whether HDF5 has to decode a whole chunk of a dataset for one of its rows."""
    if dataset.chunks is None:
        return False
    if isinstance(dataset, CsrRows):
        return True
    return any(one.id.get_create_plist().get_nfilters() for one in stored_in(dataset))


def stored_in(dataset: Any) -> list[Any]:
    """Return the datasets in which a dataset or a view is stored."""
    return list(getattr(dataset, "stored", [dataset]))


def _slab(dataset: Any, start: int, stop: int) -> Any:
    slab = dataset[start:stop]
    return slab if slab.dtype.isnative else slab.astype(slab.dtype.newbyteorder("="))


def check_servable(dataset: Any, file: str, name: str) -> None:
    """Check that the rows of a dataset can be leaves.

    Raises:
        OSError: it needs a filter that is not installed.
        TypeError: it has another type; the message names the file and the dataset.
        ValueError: a row or a chunk is too large to be read.
    """
    import h5py

    where = f"{file}: {name!r}"
    if dataset.shape is None:
        raise TypeError(f"{where} holds no data: leave it out")
    if not dataset.shape:
        raise TypeError(f"{where} is a single value, not an array of rows: leave it out")
    try:
        kind = dataset.dtype
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where} has a type that NumPy lacks ({error}): leave it out, or write it as float64"
        ) from None
    if fields := fields_of(dataset):
        raise TypeError(
            f"{where} is a table of records: name its fields, such as {f'{name}/{fields[0]}'!r}. They are "
            f"{', '.join(fields[:20])}{', ...' if len(fields) > 20 else ''}"
        )
    base = h5py.check_vlen_dtype(kind)
    if kind.subdtype is not None:
        base = kind.subdtype[0]
    text = h5py.check_string_dtype(kind) is not None
    if not text and not _is_number(base or kind) and not (kind.kind in "SU" and base is None):
        raise TypeError(
            f"{where} has dtype {base or kind}, which cannot be served: write numbers, each field as a dataset"
        )
    check_at_once(row_nbytes(dataset), where, "rows")
    for one in stored_in(dataset):
        check_at_once(row_nbytes(one), where, "rows")
        if one.chunks is not None:
            check_at_once(math.prod(one.chunks) * one.dtype.itemsize, where, "chunks")
            _check_filters(one, where)


def _is_number(kind: Any) -> bool:
    return kind.kind in "biu" or (kind.kind == "f" and kind.itemsize <= 8) or (kind.kind == "c" and kind.itemsize <= 16)


def _check_filters(dataset: Any, where: str) -> None:
    """Check that all filters of a dataset can be used, if need be after importing hdf5plugin."""
    import h5py

    properties = dataset.id.get_create_plist()
    for number in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(number)
        if h5py.h5z.filter_avail(code):
            continue
        try:
            import hdf5plugin  # noqa: F401 (it registers its filters)
        except ImportError:
            advice = "pip install hdf5plugin, where the workers run"
        else:
            advice = "hdf5plugin does not have it. Install its plugin, and set HDF5_PLUGIN_PATH to the plugin's folder"
        if not h5py.h5z.filter_avail(code):
            words = name.decode(errors="replace") or "without a name"
            raise OSError(f"{where} is compressed by the filter {code} ({words}), which is not installed: {advice}")


def _all(h5: Any) -> list[str]:
    names: list[str] = []

    def note(name: str, item: Any) -> bool | None:
        if hasattr(item, "chunks"):
            names.append(f"{name} ({_described(item)})")
        return True if len(names) == 20 else None  # True ends `visititems`

    h5.visititems(note)
    return names


def _described(dataset: Any) -> str:
    try:
        if fields := fields_of(dataset):
            return f"a table with the fields {', '.join(fields[:20])}"
        return f"{dataset.dtype}{list(dataset.shape or ())}"
    except (TypeError, ValueError):
        return "of a type that NumPy lacks"
