"""Parts of HDF5 files that are no datasets of rows, and can be read like one: a field of a table of records, as pandas
and PyTables write it, and a sparse matrix or a categorical column, as anndata writes them (.h5ad).

A view has the attributes of a dataset that readers use, and `stored`: the datasets of which it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..bounds import check_at_once

Array: TypeAlias = npt.NDArray[Any]

_LEAST, _MOST = 1 << 20, 64 << 20
"""Bytes of a sparse matrix that are read together."""

_DENSE = 256 << 10
"""Bytes of rows that become dense together, unless a row has more: they stay in the caches of a core."""

_SPARSE_DATASETS = ("data", "indices", "indptr")


class Records:
    """A dataset of records, of which several fields are read: each slab is read once for all."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._last: tuple[tuple[int, int], Any] | None = None

    def slab(self, start: int, stop: int) -> Any:
        """Return records `start` to `stop`."""
        if self._last is None or self._last[0] != (start, stop):
            self._last = None  # before the next one is read
            self._last = (start, stop), self.dataset[start:stop]
        return self._last[1]


class Field:
    """A field of a dataset of records.

    Attributes:
        records: shared by all fields of the dataset that are read together.
    """

    def __init__(self, records: Records, name: str) -> None:
        dataset = records.dataset
        kind = dataset.dtype[name]
        inner = kind.subdtype
        self.records = records
        self._field = name
        self.name = f"{dataset.name}/{name}"
        self.dtype = kind if inner is None else inner[0]
        self.shape = (*dataset.shape, *(() if inner is None else inner[1]))
        self.chunks = None if dataset.chunks is None else (dataset.chunks[0], *self.shape[1:])
        self.stored = [dataset]
        self.slab_row_nbytes = int(dataset.dtype.itemsize)  # the same for all fields, so that they share slabs
        self.storage = f"field {name!r} of table {dataset.name.lstrip('/')!r}"

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, rows: slice) -> Any:
        return self.records.slab(rows.start, rows.stop)[self._field]


class CsrRows:
    """A sparse matrix that is stored by rows. Its rows are dense: arrays with all columns."""

    def __init__(self, group: Any, shape: tuple[int, int]) -> None:
        self._data, self._columns, self._starts = (group[name] for name in _SPARSE_DATASETS)
        self.name = group.name
        self.shape = shape
        self.dtype = self._data.dtype
        self.chunks = (self._rows_together(), shape[1])
        self.stored = [self._data, self._columns, self._starts]
        many = self._data.shape[0]
        share = many / max(1, shape[0] * shape[1])
        self.storage = (
            f"sparse matrix {group.name.lstrip('/')!r} (CSR), {self.dtype}{[*shape]}, {many:,} values "
            f"({share:.1%} of all); rows are served dense"
        )

    def _rows_together(self) -> int:
        """Return how many rows are read together: those of 1 MiB, or of several chunks if these are larger."""
        nbytes = len(self._data) * (self.dtype.itemsize + self._columns.dtype.itemsize) // max(1, len(self))
        chunks = [one.chunks[0] * one.dtype.itemsize for one in (self._data, self._columns) if one.chunks]
        together = int(min(_MOST, max(_LEAST, 4 * max(chunks, default=0))))
        return max(1, min(len(self), together // max(1, int(nbytes))))

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> SparseSlab:
        if self._starts.shape != (self.shape[0] + 1,):
            raise ValueError(f"indptr has {self._starts.shape[0]} numbers, not {self.shape[0] + 1}")
        starts = self._starts[rows.start : rows.stop + 1].astype(np.int64)
        counts, width = np.diff(starts), self.shape[1]
        if len(counts) and (counts.min() < 0 or counts.max() > width or starts[0] < 0):
            raise ValueError("indptr does not ascend, or a row has more values than columns")
        check_at_once(int(counts.sum()) * (self.dtype.itemsize + 8), self.name, "rows")
        columns = self._columns[starts[0] : starts[-1]]
        values = self._data[starts[0] : starts[-1]]
        if len(columns) != len(values) or len(values) != counts.sum():
            raise ValueError("data and indices have fewer values than indptr says")
        if len(columns) and (columns.min() < 0 or columns.max() >= width):
            raise ValueError(f"an index is not a column from 0 to {width - 1}")
        return SparseSlab(starts - starts[0], columns, values.astype(values.dtype.newbyteorder("="), copy=False), width)


class SparseSlab:
    """Rows of a sparse matrix, which become dense a few at a time."""

    def __init__(self, starts: Array, columns: Array, values: Array, width: int) -> None:
        self._starts, self._columns, self._values = starts, columns, values
        self._width = width
        self.dtype = values.dtype
        ascends = np.diff(columns) > 0
        ascends[starts[1:-1][(starts[1:-1] > 0) & (starts[1:-1] < len(columns))] - 1] = True  # between two rows
        self._once = bool(ascends.all())

    def dense(self) -> Iterator[Array]:
        """Yield the rows, some at a time."""
        many = max(1, _DENSE // max(1, self._width * self.dtype.itemsize))
        for first in range(0, len(self._starts) - 1, many):
            starts = self._starts[first : first + many + 1]
            begins = np.arange(len(starts) - 1) * self._width  # of the rows, in all dense values
            columns, values = (part[starts[0] : starts[-1]] for part in (self._columns, self._values))
            places = np.repeat(begins, np.diff(starts)) + columns.astype(np.int64, copy=False)
            dense = np.zeros((len(starts) - 1, self._width), self.dtype)
            if self._once:
                dense.reshape(-1)[places] = values
            else:  # values of one place are added
                np.add.at(dense.reshape(-1), places, values)
            yield dense


def view_of(h5: Any, name: str) -> Any:
    """Return what `name` stands for: a dataset, a view, another group, or None if there is no such thing.

    Raises:
        TypeError: it is a sparse matrix whose rows cannot be read; the message says what to do.
    """
    item = h5.get(name)
    if item is not None:
        view = view_of_group(item) if hasattr(item, "visititems") else None
        return item if view is None else view
    above, _, field = name.rpartition("/")
    table = h5.get(above) if above else None
    if table is not None and field in fields_of(table):
        return Field(Records(table), field)
    return None


def view_of_group(group: Any) -> Any:
    """Return the view of a group, or None if it is only a group.

    Raises:
        TypeError: see `view_of`.
    """
    kind = _encoding(group)
    if kind == "categorical" and hasattr(group.get("codes"), "chunks"):
        return group["codes"]
    if kind not in ("csr", "csc") or any(not hasattr(group.get(one), "chunks") for one in _SPARSE_DATASETS):
        return None
    shape = [int(length) for length in group.attrs.get("shape", group.attrs.get("h5sparse_shape", ()))]
    parts = [group[one] for one in _SPARSE_DATASETS]
    if len(shape) != 2 or parts[0].dtype.kind not in "biuf" or any(part.ndim != 1 for part in parts):
        return None
    if kind == "csc":
        raise TypeError(
            "is a sparse matrix that is stored by columns (CSC), so its rows cannot be read: write it by rows, such as "
            "adata.X = adata.X.tocsr()"
        )
    return CsrRows(group, (shape[0], shape[1]))


def parts_of(group: Any) -> tuple[str, ...]:
    """Return the names of the datasets in a group of which its view is made; () if a group has no view."""
    kind = _encoding(group)
    return ("codes",) if kind == "categorical" else _SPARSE_DATASETS if kind in ("csr", "csc") else ()


def is_table_index(group: Any) -> bool:
    """Return whether a group holds only the indices that PyTables keeps of a table."""
    return hasattr(group, "visititems") and attribute(group, "CLASS") == "TINDEX"


def fields_of(item: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataset of records; () for any other item."""
    if not hasattr(item, "chunks"):
        return ()
    try:
        return item.dtype.names or ()
    except (TypeError, ValueError):  # a type that NumPy lacks
        return ()


def attribute(item: Any, name: str) -> str:
    """Return an attribute that is text; "" if there is none."""
    found = item.attrs.get(name, "")
    return found.decode(errors="replace") if isinstance(found, bytes) else found if isinstance(found, str) else ""


def _encoding(item: Any) -> str:
    """Return how anndata has encoded a group: "csr", "csc", "categorical", another word, or ""."""
    if not hasattr(item, "visititems"):
        return ""
    return (attribute(item, "encoding-type") or attribute(item, "h5sparse_format")).removesuffix("_matrix")
