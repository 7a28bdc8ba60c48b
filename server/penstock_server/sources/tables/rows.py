"""The rows of a CSV file by index."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import converted
from ..images.decoder import ImageDecoder
from ..reader import ReadAtImport
from ..row_stacks import IndexedRows, RowStack, values_at
from ..structure import Columns
from .patterns import matches
from .table import Table, read_table


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What samples need of a table: the values of their columns, the names of classes by column, the number of rows,
    the names of all columns, and a digest of the file."""

    values: dict[str, Any]
    classes: dict[str, tuple[str, ...]]
    rows: int
    names: tuple[str, ...]
    digest: str


class TableRows(IndexedRows, ReadAtImport):
    """The rows of a CSV file, as samples.

    The file is read at the first use.

    Args:
        file: the path or URL.
        leaves: names of columns in the structure of a sample, as for `Columns`; by default a dict of all columns. A
            name with `*` stands for all columns that match, as one array.
        images: by column, the paths of its images, with {} for the cell. They are relative to the file's folder.
        classes: columns whose values become numbers from 0, in the order of the sorted values.
        dtypes: dtypes of columns of numbers.
        decoder: reads the images.
    """

    def __init__(
        self,
        file: str,
        leaves: Any,
        images: Mapping[str, str],
        classes: Sequence[str],
        dtypes: Mapping[str, np.dtype[Any]],
        decoder: ImageDecoder,
    ) -> None:
        self._file = file
        self._leaves = leaves
        self._images, self._numbered, self._dtypes = dict(images), tuple(classes), dict(dtypes)
        self._decoder = decoder

    def __len__(self) -> int:
        return self._loaded.rows

    def __getitem__(self, index: int) -> Any:
        """Return the sample of a row.

        Raises:
            OSError, ValueError: an image of the row cannot be read; the message names it, and the row.
        """
        index = range(len(self))[index]
        columns = self._columns
        return columns.maker()([self._value(name, index) for name in columns.names])

    def rows_at(self, indices: Sequence[int]) -> RowStack | None:
        """See `IndexedRows`. Images are read one by one."""
        if self._images:
            return None
        columns, values = self._columns, self._loaded.values
        return RowStack(columns, [values_at(values[name], indices) for name in columns.names], len(indices))

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """The names of the classes by number, by column."""
        return self._loaded.classes

    @property
    def contents(self) -> str:
        """See `ReadAtImport`: a digest of the file."""
        return self._loaded.digest

    def column(self, name: str) -> Any:
        """Return all values of a column that samples have, by index: an array of numbers, or a list of text.

        Raises:
            KeyError: samples do not have it.
        """
        return self._loaded.values[name]

    @cached_property
    def _columns(self) -> Columns:
        leaves = {name: name for name in self._loaded.names} if self._leaves is None else self._leaves
        return Columns(leaves, "column")

    @cached_property
    def _loaded(self) -> _Loaded:
        named = None if self._leaves is None else Columns(self._leaves, "column").names
        members: dict[str, list[str]] = {}

        def chosen(names: Sequence[str]) -> list[str]:
            members.update((name, _members(self._file, name, names)) for name in named or names)
            for name in {**self._images, **dict.fromkeys(self._numbered), **self._dtypes}:
                if name not in members:
                    raise ValueError(
                        f"{self._file}: {name!r} is in images=, classes= or dtypes=, and not in leaves=. "
                        f"{_known(names)}"
                    )
            return [one for some in members.values() for one in some]

        table = read_table(self._file, chosen, [*self._images, *self._numbered])
        classes: dict[str, tuple[str, ...]] = {}
        values = {name: self._column(table, name, some, classes) for name, some in members.items()}
        return _Loaded(values, classes, table.rows, table.names, table.digest)

    def _column(self, table: Table, name: str, members: list[str], classes: dict[str, tuple[str, ...]]) -> Any:
        found = _stacked(table, name, members) if members != [name] else table.values(name)
        if name in self._numbered:
            classes[name] = tuple(sorted({*found}))
            number = {value: place for place, value in enumerate(classes[name])}
            return np.array([number[cell] for cell in found], np.int32)
        return found if name not in self._dtypes else _as_dtype(table, name, found, self._dtypes[name])

    def _value(self, name: str, index: int) -> Any:
        value = self._loaded.values[name][index]
        template = self._images.get(name)
        if template is None:
            return value
        path = os.path.join(os.path.dirname(self._file), template.replace("{}", value))
        try:
            return self._decoder.read(path)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{path}: no such file. Row {index + 1} of {self._file} names it, in column {name!r}"
            ) from None


def _members(file: str, name: str, names: Sequence[str]) -> list[str]:
    """Return the columns that a name, perhaps with `*`, stands for.

    Raises:
        ValueError: there are none.
    """
    found = [name] if name in names else [one for one in names if "*" in name and matches(one, name)]
    if not found:
        raise ValueError(f"{file} has no column {name!r}. {_known(names)}")
    return found


def _stacked(table: Table, pattern: str, members: list[str]) -> npt.NDArray[Any]:
    """Return columns as one array, with a row for each row of the table.

    Raises:
        ValueError: one is text.
    """
    columns = []
    for name in members:
        column = table.values(name)
        if not isinstance(column, np.ndarray):
            raise ValueError(f"{table.file}: {pattern!r} takes columns of numbers, and {name!r} is text")
        columns.append(column)
    return np.stack(columns, axis=1)


def _as_dtype(table: Table, name: str, values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return numbers in another dtype.

    Raises:
        ValueError: they are text, or the dtype cannot hold them.
    """
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{table.file}: column {name!r} is text, which dtypes= cannot make {dtype}")
    found = converted(values, dtype)
    if found is None:
        finite = values[np.isfinite(values)] if dtype.kind == "f" else values
        low, high = finite.min(), finite.max()
        raise ValueError(f"{table.file}: column {name!r} has values that {dtype} cannot hold ({low} to {high})")
    return found


def _known(names: Sequence[str]) -> str:
    return f"Its columns are {', '.join(map(repr, names[:12]))}{', ...' if len(names) > 12 else ''}"
