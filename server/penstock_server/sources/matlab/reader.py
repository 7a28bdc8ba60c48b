"""Reads the samples of MATLAB files."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock_proto.status.figures import size
from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import check_at_once
from ..hdf5.outside import OutsideFiles
from ..hdf5.reader import size_check
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack, joined
from ..splits.row_ranges import RowRange, Table, checked_rows, checked_split_rows, divide
from ..structure import Columns
from .variables import COMPLEX, Variable, common_length, native, open_variables, reading

HELD = 1 << 30
"""Bytes of the arrays of files of version 7 and older that a worker holds, at most."""

_SLAB = 1 << 20
_BAND = 256 << 20
"""Bytes of an array that are read at once: about, and at most."""

_CHEAP = 64 << 20
"""Bytes of samples that share chunks and that several splits may decompress, if the file would else make too few."""


class MatFiles:
    """The arrays of MATLAB files, for both listing and reading.

    Args:
        files: paths, patterns and URLs.
        leaves: names of variables in the structure of a sample.
        axis: 0 or -1, the dimension that counts the samples; None if the lengths decide.

    Raises:
        TypeError, ValueError: an argument cannot work.
    """

    def __init__(self, files: fs.Files, leaves: Any, axis: int | None) -> None:
        if axis not in (0, -1, None):
            raise ValueError(
                f"axis must be 0 (the first dimension counts the samples) or -1 (the last), got {shown(axis)}"
            )
        self.files = fs.checked(files)
        self.columns = Columns(leaves, "variable")
        self.axis = axis
        self.outside = OutsideFiles(self.columns.names, False, None)
        self._held: dict[str, tuple[Any, list[Any], int]] = {}

    @contextmanager
    def open(self, file: str) -> Iterator[tuple[int, list[Variable], Any]]:
        """Open a file. Yield the number of samples, the variables in the order of the names, and, for version 7.3, the
        open HDF5 file.

        Raises:
            ImportError, OSError: see `open_variables`.
            LookupError, TypeError, ValueError: a variable is missing, cannot be served, or has another length.
        """
        with open_variables(file) as (variables, h5):
            if h5 is not None:
                self.outside.of(h5, file)
            found = [_named(variables, file, name) for name in self.columns.names]
            length = common_length(found, self.axis)
            if length is None:
                shapes = " and ".join(f"{one.name!r} is {'x'.join(map(str, one.shape))}" for one in found)
                raise ValueError(
                    f"{file}: {shapes}: each sample takes one row of every array, so their first or last dimensions "
                    "must have one length. Save all with one length, or leave one of them out"
                )
            for one in found:
                check_at_once(one.nbytes // length, f"{file}: {one.name!r}", "samples")
                if h5 is not None and h5[one.name].chunks:
                    chunk = math.prod(h5[one.name].chunks) * h5[one.name].dtype.itemsize
                    check_at_once(chunk, f"{file}: {one.name!r}", "chunks")
                if h5 is None and one.nbytes > HELD:
                    raise ValueError(
                        f"{file}: {one.name!r} has {size(one.nbytes)}, which each worker would hold: save it with "
                        "-v7.3, so that it can be read in parts"
                    )
            yield length, found, h5

    def loaded(self, file: str, length: int, variables: list[Variable]) -> list[Any]:
        """Return arrays of a file of version 7 or older. They are kept until the memory is needed for others.

        Raises:
            OSError: the file cannot be read.
            TypeError: an array is complex.
        """
        stamp = fs.stamp_of(file)
        known = self._held.pop(file, None)
        if known is None or known[0] != stamp:
            names = [one.name for one in variables]
            with reading(file) as io, fs.open_binary(file) as stream:
                read = io.loadmat(stream, variable_names=names)  # mat_dtype=True would drop imaginary parts
            arrays = []
            for one in variables:
                array = read[one.name]
                if array.dtype.kind == "c":
                    raise TypeError(f"{file}: {one.name!r} {COMPLEX}")
                arrays.append(one.by_sample(array.astype(one.dtype, copy=False), one.axis(length, self.axis)))
            known = stamp, arrays, sum(array.nbytes for array in arrays)
        while self._held and known[2] + sum(one[2] for one in self._held.values()) > HELD:
            del self._held[next(iter(self._held))]
        self._held[file] = known  # as the last one that was used
        return known[1]


class MatSplits:
    """Lists the row ranges of MATLAB files."""

    def __init__(self, found: MatFiles, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_files"
        self._found = found
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)

    def __call__(self) -> list[RowRange]:
        """Open each file, and divide the samples of all.

        Raises:
            ImportError, OSError, LookupError, TypeError, ValueError: see `MatFiles.open`.
        """
        tables = []
        for file in fs.expand(self._found.files):
            with self._found.open(file) as (length, variables, h5):
                nbytes = sum(one.nbytes for one in variables) // length
                unit = 1
                if h5 is not None:
                    unit = max(_unit(h5[one.name], one.axis(length, self._found.axis)) for one in variables)
                cheap = unit * nbytes <= _CHEAP
                tables.append(Table(file, fs.size_of(file), length, nbytes, unit, unit, unit, cheap))
        return divide(tables, self._rows, self._split_rows)


@on_disk_as("penstock_server.sources.matlab.MatRows")
class MatRows(StackReader):
    """Yields the samples of a range."""

    def __init__(self, found: MatFiles) -> None:
        self.__name__ = "Feed.from_files"
        self._found = found

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._found.columns, self._found.axis

    def files_of(self, split: RowRange) -> list[str]:
        """See `Reader`."""
        return [split.file, *(self._found.outside.remembered(split.file) or ())]

    def stacks(self, split: RowRange) -> Iterator[RowStack]:
        """Yield the rows of a split; see `StackReader`.

        Raises:
            ImportError, OSError, LookupError, TypeError, ValueError: see `MatFiles.open`.
        """
        fs.check_size(split.file, split.size)
        with self._found.open(split.file) as (length, variables, h5):
            if h5 is None:
                arrays = self._found.loaded(split.file, length, variables)
                slabs = [iter([array[split.start : split.stop]]) for array in arrays]
            else:
                check = size_check(split, self._found.outside.remembered(split.file))
                axes = [one.axis(length, self._found.axis) for one in variables]
                slabs = [
                    _slabs(h5[one.name], one, axis, split, check) for one, axis in zip(variables, axes, strict=True)
                ]
            yield from joined(self._found.columns, slabs)


def _named(variables: list[Variable], file: str, name: str) -> Variable:
    one = next((one for one in variables if one.name == name.strip("/")), None)
    if one is None:
        some = ", ".join(f"{one.name} ({one.kind} {'x'.join(map(str, one.shape))})" for one in variables[:20])
        raise LookupError(f"{file} has no variable {name!r}; its variables are {some or 'none'}")
    if one.unfit:
        raise TypeError(f"{file}: {name!r} {one.unfit}")
    return one


def _unit(dataset: Any, axis: int) -> int:
    """Return how many samples share chunks. MATLAB's dimensions are in reverse order in the file."""
    return int(dataset.chunks[-1 if axis == 0 else 0]) if dataset.chunks else 1


def _slabs(dataset: Any, variable: Variable, axis: int, split: RowRange, check: fs.SizeCheck) -> Iterator[Any]:
    """Yield the samples of a dataset, slab by slab. `check` is called after each is read."""
    row = max(1, variable.nbytes // variable.shape[axis])
    unit = _unit(dataset, axis)
    rows = unit * max(1, _SLAB // (unit * row))
    rows = rows if rows * row <= _BAND else max(1, _BAND // row)
    start = split.start
    while start < split.stop:
        stop = min(split.stop, (start // rows + 1) * rows)
        try:
            slab = dataset[..., start:stop] if axis == 0 else dataset[start:stop]
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise OSError(
                f"{split.file}: samples {start} to {stop - 1} of {variable.name!r} cannot be read ({error}). The file "
                "is damaged: copy it again"
            ) from None
        check()
        slab = native(slab.astype(bool) if variable.kind == "logical" else slab)
        yield variable.by_sample(slab.T, axis)
        del slab
        start = stop
