"""NumPy's .npy and .npz files, memory-mapped where they can be. Pickled objects are never read.

The members of a .npz file have checksums. zipfile compares them while it reads to the end of a member. A mapped member
is not read by zipfile, so `NumpySplits` compares its checksum once, before its rows are served.
"""

from __future__ import annotations

import io
import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import IO, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import COLUMNS, check_at_once
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack
from ..splits.row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns
from .pairs import pairs

_SLAB = 1 << 20
"""Bytes that are read at once from arrays whose rows take memory."""

_CHECKED = 8 << 30
"""Bytes of the largest mapped member whose checksum is compared: about 10 s of work, before the first batch."""

_HEADER = 64 << 10
"""Bytes of the longest header of an array. NumPy reads none of more than 10,000 bytes."""

_EMPTY_ROWS = 1 << 20
"""Rows without values, at most: a file need not hold any bytes of them."""

_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError)
"""The errors of zipfile about damaged data."""


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
            ValueError: a file of one leaf has none of another.
        """
        if self.together is None:
            return [(file,) for file in fs.expand(self.files)]
        return pairs([(name, fs.expand([name])) for name in self.together.names])

    def open(self, group: tuple[str, ...], stack: ExitStack) -> tuple[list[NpyArray], Columns]:
        """Open the arrays of a group, which `stack` closes. Return them, and the structure of a sample.

        Raises:
            OSError: a file cannot be read.
            LookupError, TypeError, ValueError: a .npz has no such array, an array cannot be served, or lengths differ.
        """
        if self.together is not None:
            arrays = [_npy(file, stack) for file in group]
            columns = self.together
        elif is_npz(group[0]):
            archive = Archive(group[0], stack)
            names = archive.all_names() if self.columns is None else self.columns.names
            arrays = [archive.array(name) for name in names]
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

    def check_mapped(self, file: str) -> None:
        """Compare the checksums of the arrays of a local .npz file that are mapped.

        Raises:
            OSError: one is wrong, or the file cannot be read.
        """
        with ExitStack() as stack:
            archive = Archive(file, stack)
            for name in archive.all_names() if self.columns is None else self.columns.names:
                archive.check_mapped(name)


class NumpySplits:
    """Lists row ranges of arrays."""

    def __init__(self, source: NumpySource, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_numpy"
        self._source = source
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)
        self._intact: set[tuple[str, int, int]] = set()

    def __call__(self) -> list[tuple[RowRange, ...]]:
        """Read the headers of all files, and divide the rows. A split has one range for each file of a group.

        Compare the checksums of mapped arrays, unless this process did so and the file is still the same.

        Raises:
            OSError, LookupError, TypeError, ValueError: as `NumpySource.open`; or a checksum is wrong, or there are no
                rows.
        """
        groups = self._source.groups()
        sizes = {file: fs.size_of(file) for group in groups for file in group}
        tables = []
        for group in groups:
            with ExitStack() as stack:
                arrays, _ = self._source.open(group, stack)
                self._check(group[0])
                unit = 1 if all(array.seekable for array in arrays) else max(1, arrays[0].rows)
                nbytes = sum(array.row_nbytes for array in arrays)
                tables.append(Table(group[0], sizes[group[0]], arrays[0].rows, nbytes, unit, unit))
        by_file = {group[0]: group for group in groups}
        return [
            tuple(RowRange(file, split.start, split.stop, sizes[file]) for file in by_file[split.file])
            for split in divide(tables, self._rows, self._split_rows)
        ]

    def _check(self, file: str) -> None:
        if not is_npz(file) or fs.is_url(file):
            return
        found = os.stat(file)
        stamp = file, found.st_size, found.st_mtime_ns
        if stamp not in self._intact:
            self._source.check_mapped(file)
            self._intact.add(stamp)


@on_disk_as("penstock_server.sources.npy.NumpyRows")
class NumpyRows(StackReader):
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

    def stacks(self, split: tuple[RowRange, ...]) -> Iterator[RowStack]:
        """Yield the rows of a split; see `StackReader`.

        Raises:
            OSError: a file cannot be read, or has changed since its splits were listed.
        """
        for part in split:
            fs.check_size(part.file, part.size)
        start, stop = split[0].start, split[0].stop
        with ExitStack() as stack:
            arrays, columns = self._source.open(tuple(part.file for part in split), stack)
            step = max(1, _SLAB // max(1, sum(array.row_nbytes for array in arrays if array.copies)))
            for low in range(start, stop, step):
                high = min(stop, low + step)
                yield RowStack(columns, [array.read(low, high) for array in arrays], high - low)
            for array in arrays:
                array.check_rest()


class NpyArray:
    """One array of a file.

    Attributes:
        name: the file's name, with the array's name if the file has several.
        rows, row_nbytes: its length, and the bytes of a row.
        seekable: whether any rows can be read without those before them.
        mapped: whether the file is mapped into memory.
        copies: whether rows that are read take memory, so that only some of them should be read at once.
    """

    def __init__(self, name: str, opened: BinaryIO, place: tuple[str, int] | None, nbytes: int | None = None) -> None:
        """Read the header. `place` is the local file and offset where `opened` begins, if it can be mapped. `nbytes` is
        the length of `opened`, if it is known."""
        self.name = name
        self._opened = opened
        shape, self._fortran, dtype = self._header()
        if not shape:
            raise TypeError(f"{name} is a single value, not an array of rows: leave it out")
        if dtype.hasobject:
            raise TypeError(
                f"{name} holds Python objects, which would be unpickled: write numbers in its place. If you trust the "
                "file, load it in a module with np.load(FILE, allow_pickle=True), and give the array to Feed(...)"
            )
        if dtype.kind not in "biufc":
            raise TypeError(
                f"{name} has dtype {dtype}, which cannot be served: write numbers in its place, or load it in a module "
                "with np.load(FILE), and give the array to Feed(...)"
            )
        self._shape, self._dtype = shape, dtype
        self.rows = shape[0]
        self.row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        check_at_once(self.row_nbytes, name, "rows")
        if not self.row_nbytes and self.rows > _EMPTY_ROWS:
            raise ValueError(f"{name} has shape {shape}: {self.rows:,} rows without values: leave it out")
        self._array: npt.NDArray[Any] | None = None
        with _damage_of(self.name):
            self._start = opened.tell()
        if nbytes is not None:
            self._check_length(nbytes)
        if place is not None:
            path, offset = place
            self._check_length(os.stat(path).st_size - offset)
            if 0 not in shape:
                order: Any = "F" if self._fortran else "C"
                self._array = np.memmap(path, dtype, "r", offset + self._start, shape, order).view(np.ndarray)
        self.mapped = self._array is not None
        self.copies = not self.mapped or not dtype.isnative
        self.seekable = self.mapped or (place is None and not self._fortran and _is_seekable(opened))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return these rows, in native byte order.

        Raises:
            OSError: the file is too short, or damaged.
            ValueError: an array that has to be read as a whole is too large.
        """
        if self._array is None and (self._fortran or not self._opened.seekable()):
            count = self.rows * self.row_nbytes
            check_at_once(count, f"{self.name} is in Fortran order, so it", "arrays")
            data = self._bytes(count)
            order: Any = "F" if self._fortran else "C"
            self._array = np.frombuffer(data, self._dtype).reshape(self._shape, order=order)
            self.check_rest()
        if self._array is not None:
            rows = self._array[start:stop]
        else:
            with _damage_of(self.name):
                self._opened.seek(self._start + start * self.row_nbytes)
            data = self._bytes((stop - start) * self.row_nbytes)
            rows = np.frombuffer(data, self._dtype).reshape(stop - start, *self._shape[1:])
        return rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))

    def check_rest(self) -> None:
        """Read a member of an archive that is not mapped to its end, where zipfile compares its checksum.

        Raises:
            OSError: the checksum is wrong.
        """
        if not self.mapped and isinstance(self._opened, zipfile.ZipExtFile):
            with _damage_of(self.name):
                _read_to_the_end(self._opened)

    def _header(self) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        try:
            with _damage_of(self.name):
                version = np.lib.format.read_magic(self._opened)
                width = 2 if version == (1, 0) else 4
                length = fs.read_exactly(self._opened, width)
                count = int.from_bytes(length, "little")
                if count > _HEADER:
                    raise ValueError(f"its header claims {count:,} bytes")
                text = io.BytesIO(length + fs.read_exactly(self._opened, count))
            if version == (1, 0):
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(text)
            else:
                shape, fortran, dtype = np.lib.format.read_array_header_2_0(text)
            if any(dim < 0 for dim in shape):
                raise ValueError(f"its shape is {shape}")
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, tokenize.TokenError) as error:
            raise OSError(f"{self.name}: it is not a .npy file, or is truncated or damaged ({error})") from None
        return shape, fortran, dtype

    def _bytes(self, count: int) -> bytes:
        with _damage_of(self.name):
            data = fs.read_exactly(self._opened, count)
        self._check_length(self._start + len(data), self._start + count)
        return data

    def _check_length(self, has: int, wants: int | None = None) -> None:
        wants = self._start + self.rows * self.row_nbytes if wants is None else wants
        if has < wants:
            raise OSError(f"{self.name}: the file is truncated ({has} of {wants} bytes): copy it again")


class Archive:
    """A .npz file, which `stack` closes.

    Raises:
        OSError: it cannot be read; the message names it.
    """

    def __init__(self, file: str, stack: ExitStack) -> None:
        self._file = file
        self._stack = stack
        self._opened = stack.enter_context(fs.open_binary(file))
        try:
            self._archive = stack.enter_context(zipfile.ZipFile(self._opened))
        except (*_DAMAGE, ValueError, OSError, NotImplementedError) as error:
            raise OSError(f"{file}: it is not a .npz file, or is truncated ({error}): copy it again") from None
        self.members = {info.filename.removesuffix(".npy"): info for info in self._archive.infolist()}

    def all_names(self) -> list[str]:
        """Return the names of all arrays.

        Raises:
            ValueError: there are none, or too many to be served together.
        """
        if not self.members:
            raise ValueError(f"{self._file} has no arrays")
        if len(self.members) > COLUMNS:
            raise ValueError(
                f"{self._file} has {len(self.members):,} arrays: name those to serve, with leaves= or --leaf NAME=ARRAY"
            )
        return list(self.members)

    def array(self, name: str) -> NpyArray:
        """Open an array.

        Raises:
            LookupError: there is no such array; the message lists the existing ones.
            OSError, TypeError, ValueError: it cannot be read, or cannot be served.
        """
        file, info = self._file, self.members.get(name)
        if info is None:
            raise LookupError(f"{file} has no array {name!r}; its arrays are {_some(list(self.members)) or 'none'}")
        where = f"{file}: {shown(name)}"
        if info.flag_bits & 1:
            raise OSError(f"{where}: it is encrypted: write the file without a password")
        place = None
        try:
            if info.compress_type == zipfile.ZIP_STORED and not fs.is_url(file):
                place = file, _data_offset(self._opened, info)
            member: Any = self._stack.enter_context(self._archive.open(info))
        except NotImplementedError:
            raise OSError(
                f"{where}: it is compressed with the ZIP method {info.compress_type}, which Python cannot read: write "
                "the file with numpy.savez_compressed"
            ) from None
        except (*_DAMAGE, ValueError, OSError) as error:
            raise OSError(f"{where}: the file is damaged ({error}): copy it again") from None
        return NpyArray(where, member, place, info.file_size)

    def check_mapped(self, name: str) -> None:
        """Compare the checksum of an array that is mapped.

        Raises:
            OSError: it is wrong.
        """
        info = self.members[name]
        if info.compress_type == zipfile.ZIP_STORED and info.file_size <= _CHECKED:
            with _damage_of(f"{self._file}: {shown(name)}"), self._archive.open(info) as member:
                _read_to_the_end(member)


def is_npz(file: str) -> bool:
    """Return whether a file is an archive of arrays, by its name."""
    return file.lower().endswith(".npz")


@contextmanager
def _damage_of(name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise OSError(f"{name}: the data are damaged ({error}): copy the file again, or write it again") from None


def _read_to_the_end(opened: IO[bytes]) -> None:
    while opened.read(_SLAB):
        pass


def _some(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20:,} more" if len(names) > 20 else "")


def _is_seekable(opened: BinaryIO) -> bool:
    return opened.seekable() and not isinstance(opened, zipfile.ZipExtFile)


def _npy(file: str, stack: ExitStack) -> NpyArray:
    opened = stack.enter_context(fs.open_binary(file))
    return NpyArray(file, opened, None if fs.is_url(file) else (file, 0))


def _data_offset(opened: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's bytes: after its local header, whose length differs from that in the
    directory."""
    opened.seek(info.header_offset)
    head = fs.read_exactly(opened, 30)
    if len(head) < 30 or head[:4] != b"PK\3\4":
        raise zipfile.BadZipFile("the header of a member is missing")
    return info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
