"""NumPy's .npy and .npz files, memory-mapped where they can be. Pickled objects are never read."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock_proto.value_text import shown

from .. import files as fs
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns

_SLAB = 1 << 20
"""Bytes that are read at once from an array that is not mapped."""


class NumpySource:
    """Arrays by row, for both listing and reading.

    Args:
        files: paths, patterns and URLs of .npy or .npz files, or a tuple or dict of these with one .npy file for each
            leaf.
        leaves: the names of a .npz file's arrays in the structure of a sample. None for a dict of all.
    """

    def __init__(self, files: Any, leaves: Any) -> None:
        self.together: Columns | None = None
        self.columns: Columns | None = None
        self.files: tuple[str, ...] = ()
        if isinstance(files, Mapping | tuple):
            if leaves is not None:
                raise ValueError("leaves= names the arrays of .npz files: leave it out, as files= has the structure")
            self.together = Columns(files, "file")
        else:
            self.files = fs.checked(files)
            self.columns = None if leaves is None else Columns(leaves, "array")

    def groups(self) -> list[tuple[str, ...]]:
        """Return the groups of files whose rows belong together: one file each, or, with a structure of files, one for
        each leaf.

        Raises:
            OSError: a file is missing.
            ValueError: patterns of different leaves match different numbers of files.
        """
        if self.together is None:
            return [(file,) for file in fs.expand(self.files)]
        matches = [fs.expand([name]) for name in self.together.names]
        for name, found in zip(self.together.names[1:], matches[1:], strict=True):
            if len(found) != len(matches[0]):
                raise ValueError(
                    f"{self.together.names[0]} matches {len(matches[0])} files and {name} matches {len(found)}: each "
                    "file of one leaf needs a file of the other"
                )
        return list(zip(*matches, strict=True))

    def open(self, group: tuple[str, ...], stack: ExitStack) -> tuple[list[NpyArray], Columns]:
        """Open the arrays of a group, which `stack` closes. Return them, and the structure of a sample.

        Raises:
            OSError: a file cannot be read.
            LookupError, TypeError, ValueError: a .npz has no such array, an array cannot be served, or lengths differ.
        """
        if self.together is not None:
            arrays = [_npy(file, stack) for file in group]
            columns = self.together
        elif group[0].lower().endswith(".npz"):
            names, arrays = _npz(group[0], None if self.columns is None else self.columns.names, stack)
            columns = self.columns or Columns({name: name for name in names}, "array")
        else:
            if self.columns is not None:
                raise ValueError(f"{group[0]}: leaves= names the arrays of .npz files, and this is one array")
            arrays, columns = [_npy(group[0], stack)], Columns("array", "array")
        for array in arrays[1:]:
            if array.rows != arrays[0].rows:
                raise ValueError(
                    f"{arrays[0].name} has {arrays[0].rows} rows and {array.name} has {array.rows}: each sample takes "
                    "one row of every array, so write both with one length, or leave one of them out"
                )
        return arrays, columns


class NumpySplits:
    """Lists row ranges of arrays."""

    def __init__(self, source: NumpySource, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_numpy"
        self._source = source
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)

    def __call__(self) -> list[tuple[RowRange, ...]]:
        """Read the headers of all files, and divide the rows. A split has one range for each file of a group.

        Raises:
            OSError, LookupError, TypeError, ValueError: as `NumpySource.open`; or there are no rows.
        """
        groups = self._source.groups()
        sizes = {file: fs.size_of(file) for group in groups for file in group}
        tables = []
        for group in groups:
            with ExitStack() as stack:
                arrays, _ = self._source.open(group, stack)
                unit = 1 if all(array.seekable for array in arrays) else max(1, arrays[0].rows)
                nbytes = sum(array.row_nbytes for array in arrays)
                tables.append(Table(group[0], sizes[group[0]], arrays[0].rows, nbytes, unit, unit))
        by_file = {group[0]: group for group in groups}
        return [
            tuple(RowRange(file, split.start, split.stop, sizes[file]) for file in by_file[split.file])
            for split in divide(tables, self._rows, self._split_rows)
        ]


@on_disk_as("penstock_server.sources.npy.NumpyRows")
class NumpyRows(Reader):
    """Yields the rows of a range."""

    def __init__(self, source: NumpySource) -> None:
        self.__name__ = "Feed.from_numpy"
        self._source = source

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._source.together, self._source.columns

    def files_of(self, split: tuple[RowRange, ...]) -> list[str]:
        """See `Reader`."""
        return [part.file for part in split]

    def __call__(self, split: tuple[RowRange, ...]) -> Iterator[Any]:
        """Yield one sample for each row.

        Raises:
            OSError: a file cannot be read, or has changed since its splits were listed.
        """
        for part in split:
            fs.check_size(part.file, part.size)
        start, stop = split[0].start, split[0].stop
        with ExitStack() as stack:
            arrays, columns = self._source.open(tuple(part.file for part in split), stack)
            step = max(1, _SLAB // max(1, sum(array.row_nbytes for array in arrays)))
            for low in range(start, stop, step):
                yield from columns.samples([array.read(low, min(stop, low + step)) for array in arrays])


class NpyArray:
    """One array of a file.

    Attributes:
        name: the file's name, with the array's name if the file has several.
        rows, row_nbytes: its length, and the bytes of a row.
        seekable: whether any rows can be read without those before them.
    """

    def __init__(self, name: str, opened: BinaryIO, place: tuple[str, int] | None) -> None:
        """Read the header. `place` is the local file and offset where `opened` begins, if it can be mapped."""
        self.name = name
        self._opened = opened
        shape, self._fortran, dtype = self._header()
        if not shape:
            raise TypeError(f"{name} is a single value, not an array of rows: leave it out")
        if dtype.hasobject:
            raise TypeError(f"{name} holds Python objects, which would be unpickled: write numbers in its place")
        if dtype.kind not in "biufc":
            raise TypeError(f"{name} has dtype {dtype}, which cannot be served: write numbers in its place")
        self._shape, self._dtype = shape, dtype
        self.rows = shape[0]
        self.row_nbytes = int(np.prod(shape[1:], dtype=np.int64)) * dtype.itemsize
        self._array: npt.NDArray[Any] | None = None
        self._start = opened.tell()
        if place is not None:
            path, offset = place
            self._check_length(os.stat(path).st_size - offset)
            if 0 not in shape:
                order: Any = "F" if self._fortran else "C"
                self._array = np.memmap(path, dtype, "r", offset + self._start, shape, order)
        self.seekable = self._array is not None or (place is None and not self._fortran and _is_seekable(opened))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return these rows, in native byte order.

        Raises:
            OSError: the file is too short, or damaged.
        """
        if self._array is None and (self._fortran or not self._opened.seekable()):
            count = self.rows * self.row_nbytes
            data = self._bytes(count)
            order: Any = "F" if self._fortran else "C"
            self._array = np.frombuffer(data, self._dtype).reshape(self._shape, order=order)
        if self._array is not None:
            rows = self._array[start:stop].view(np.ndarray)
        else:
            self._opened.seek(self._start + start * self.row_nbytes)
            data = self._bytes((stop - start) * self.row_nbytes)
            rows = np.frombuffer(data, self._dtype).reshape(stop - start, *self._shape[1:])
        return rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            version = np.lib.format.read_magic(self._opened)
            if version == (1, 0):
                return np.lib.format.read_array_header_1_0(self._opened)
            return np.lib.format.read_array_header_2_0(self._opened)
        except ValueError as error:
            raise OSError(f"{self.name}: it is not a .npy file, or is truncated ({error})") from None

    def _bytes(self, count: int) -> bytes:
        try:
            data = fs.read_exactly(self._opened, count)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise OSError(f"{self.name}: the compressed data are damaged ({error}): write the file again") from None
        self._check_length(self._start + len(data), self._start + count)
        return data

    def _check_length(self, has: int, wants: int | None = None) -> None:
        wants = self._start + self.rows * self.row_nbytes if wants is None else wants
        if has < wants:
            raise OSError(f"{self.name}: the file is truncated ({has} of {wants} bytes): copy it again")


def _is_seekable(opened: BinaryIO) -> bool:
    return opened.seekable() and not isinstance(opened, zipfile.ZipExtFile)


def _npy(file: str, stack: ExitStack) -> NpyArray:
    opened = stack.enter_context(fs.open_binary(file))
    return NpyArray(file, opened, None if fs.is_url(file) else (file, 0))


def _npz(file: str, names: list[str] | None, stack: ExitStack) -> tuple[list[str], list[NpyArray]]:
    opened = stack.enter_context(fs.open_binary(file))
    try:
        archive = stack.enter_context(zipfile.ZipFile(opened))
    except zipfile.BadZipFile as error:
        raise OSError(f"{file}: it is not a .npz file, or is truncated ({error}): copy it again") from None
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    arrays = []
    names = list(members) if names is None else names
    for name in names:
        if name not in members:
            raise LookupError(f"{file} has no array {name!r}; its arrays are {', '.join(members) or 'none'}")
        info = members[name]
        place = None
        if info.compress_type == zipfile.ZIP_STORED and not fs.is_url(file):
            place = file, _data_offset(file, opened, info)
        member: Any = stack.enter_context(archive.open(info))
        arrays.append(NpyArray(f"{file}: {shown(name)}", member, place))
    return names, arrays


def _data_offset(file: str, opened: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes: after its local header, whose length differs from that in the
    directory."""
    opened.seek(info.header_offset)
    head = fs.read_exactly(opened, 30)
    if len(head) < 30 or head[:4] != b"PK\3\4":
        raise OSError(f"{file}: it is damaged: write it again")
    return info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
