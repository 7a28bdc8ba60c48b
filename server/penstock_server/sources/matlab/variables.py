"""The variables of a MATLAB file, and which of their dimensions counts the samples.

Files of version 7.3 are HDF5 files, whose dimensions are in reverse order, and h5py reads any of their rows. Older ones
are read with scipy, and as a whole.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_proto import distribution

from .. import files as fs
from ..hdf5.opening import opened
from ..hdf5.reader import damage_of
from ..hdf5.views import attribute

_MANY = 1000
"""Variables of a file that are looked at, at most."""

_NBYTES = {"double": 8, "single": 4, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4, "int16": 2, "uint16": 2}
_NBYTES |= {"int8": 1, "uint8": 1, "logical": 1}
"""The bytes of a number of each class of MATLAB's arrays."""

_DTYPES = {"double": "float64", "single": "float32", "logical": "bool"}
"""The dtypes of MATLAB's classes that have other names in NumPy."""

COMPLEX = "is complex: save its real and imaginary parts"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a file.

    Attributes:
        name: its name; that of a field of a struct has a slash, such as "data/X".
        shape: its dimensions in MATLAB's order.
        kind: the name of its class in MATLAB, such as "double".
        unfit: why it cannot be served, as a clause; or "".
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    unfit: str = ""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * _NBYTES.get(self.kind, 8)

    @property
    def dtype(self) -> str:
        """Its dtype in NumPy."""
        return _DTYPES.get(self.kind, self.kind)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that can count samples: that of a vector, or of the first and the last dimension."""
        if self.is_vector:
            return (max(self.shape),)
        return tuple(dict.fromkeys((self.shape[0], self.shape[-1])))

    @property
    def is_vector(self) -> bool:
        """Whether it is a row or a column."""
        return len(self.shape) == 2 and 1 in self.shape

    def axis(self, length: int, axis: int | None) -> int:
        """Return 0 if the first dimension counts `length` samples, -1 if the last does."""
        if self.is_vector:
            return 0 if self.shape[0] == max(self.shape) else -1
        return (0 if self.shape[0] == length else -1) if axis is None else axis

    def by_sample(self, array: Any, axis: int) -> Any:
        """Return the array, or a slab of it, with the samples in its first dimension. A vector has no other."""
        return array.reshape(-1) if self.is_vector else np.moveaxis(array, axis, 0)


def common_length(variables: Sequence[Variable], axis: int | None) -> int | None:
    """Return the number of samples that all variables can have; None if there is none."""
    for length in variables[0].lengths if axis is None else _lengths(variables[0], axis):
        if all(length in (one.lengths if axis is None else _lengths(one, axis)) for one in variables):
            return length
    return None


def _lengths(variable: Variable, axis: int) -> tuple[int, ...]:
    return variable.lengths if len(variable.lengths) == 1 else (variable.shape[axis],)


@contextmanager
def open_variables(file: str) -> Iterator[tuple[list[Variable], Any]]:
    """Open a file, and yield its variables and, for version 7.3, the open HDF5 file.

    Raises:
        ImportError: scipy is not installed, and the file needs it.
        OSError: it is no MATLAB file, or is damaged; the message names it.
    """
    if is_hdf5(file):
        with opened(file, None) as h5:
            with damage_of(file):
                found = list(_of_hdf5(h5))
            yield found, h5
        return
    _check_version(file)
    with reading(file) as io, fs.open_binary(file) as stream:
        listed = io.whosmat(stream)
    yield [_variable(str(name), tuple(map(int, shape)), str(kind)) for name, shape, kind in listed[:_MANY]], None


@contextmanager
def reading(file: str) -> Iterator[Any]:
    """Yield `scipy.io`. Name a file that it cannot read.

    Raises:
        ImportError: scipy is not installed.
        OSError: the file cannot be read; the message says what to do.
    """
    try:
        io = importlib.import_module("scipy.io")
    except ImportError:
        raise ImportError(
            f"{file} is a MATLAB file of version 7 or older, which needs scipy: {distribution.pip_install('matlab')}"
        ) from None
    try:
        yield io
    except (FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except MemoryError:
        raise MemoryError(f"{file} needs more memory than there is, or is damaged") from None
    except Exception as error:  # of scipy, which raises any
        raise OSError(
            f"{file} is not a MATLAB file, or is truncated or damaged: copy it again ({type(error).__name__}: {error})"
        ) from None


def _check_version(file: str) -> None:
    """Check that a file has version 5 to 7. scipy takes any other for one of version 4, and crashes on some.

    Raises:
        OSError: it has another.
    """
    with fs.open_binary(file) as stream:
        head = stream.read(128)
    if head[124:128] not in (b"\x00\x01IM", b"\x01\x00MI") or 0 in head[:4]:
        raise OSError(
            f"{file} is not a MATLAB file of version 5 to 7.3, or is truncated or damaged: copy it again, or save it "
            "with -v7"
        )


def is_hdf5(file: str) -> bool:
    """Return whether a file has version 7.3.

    Raises:
        OSError: it cannot be read.
    """
    with fs.open_binary(file) as stream:
        head = stream.read(520)
    return head.startswith(b"\x89HDF\r\n\x1a\n") or head[512:520] == b"\x89HDF\r\n\x1a\n"


def _of_hdf5(h5: Any) -> Iterator[Variable]:
    """Yield the variables of a file of version 7.3, and the fields of its structs."""
    seen = 0
    groups = [("", h5)]
    while groups:
        prefix, group = groups.pop(0)
        for part in group:
            seen += 1
            if seen > _MANY:
                return
            name = f"{prefix}{part}"
            if name.startswith("#") or hasattr(group.get(part, getlink=True), "path"):  # MATLAB writes no links
                continue
            item = group[part]
            kind = _class_of(item)
            if hasattr(item, "visititems"):
                if kind == "struct":
                    groups.append((f"{name}/", item))
                elif "MATLAB_sparse" in item.attrs:
                    yield Variable(name, (), "sparse", "is sparse: save full(X)")
                continue
            try:
                dtype = item.dtype
            except (TypeError, ValueError):
                yield Variable(name, (), kind, "has a type that NumPy lacks: save an array of numbers")
                continue
            empty = "MATLAB_empty" in item.attrs
            shape = () if empty or item.shape is None else tuple(reversed(item.shape))
            if not kind and dtype.kind in "biuf":
                kind = {"f8": "double", "f4": "single"}.get(dtype.str[1:], dtype.name)
            if dtype.names:
                yield Variable(name, shape, kind, COMPLEX)
            else:
                yield _variable(name, shape, kind)


def _class_of(item: Any) -> str:
    text = attribute(item, "MATLAB_class")
    return text or ("struct" if hasattr(item, "visititems") and "MATLAB_sparse" not in item.attrs else "")


def _variable(name: str, shape: tuple[int, ...], kind: str) -> Variable:
    unfit = ""
    if kind == "char":
        unfit = "is text: save a number for each sample"
    elif kind == "cell":
        unfit = "is a cell array: save one array, such as cat(1, X{:})"
    elif kind == "sparse":
        unfit = "is sparse: save full(X)"
    elif kind not in _NBYTES:
        unfit = f"is of the class {kind or 'unknown'}: save an array of numbers"
    elif not math.prod(shape):
        unfit = "is empty"
    elif math.prod(shape) == 1:
        unfit = "is a single value, not an array of samples: leave it out"
    return Variable(name, shape, kind, unfit)


def native(array: Any) -> Any:
    """Return an array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
