"""Tables as indexable objects whose items are dicts of columns: frames of pandas and polars, pyarrow's tables, and
NumPy's structured arrays.

A table is recognized by its type, so this file imports none of these libraries. The columns are checked when the feed
is declared: their types, and whether values are missing. Numbers are not copied, unless the library stores them in
another way than NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import distribution
from penstock_proto.batches.inferring import is_masked
from penstock_proto.value_text import shown

from ...sources.arrow_columns import Place, rows_of
from ...sources.row_stacks import IndexedRows, RowStack, values_at
from ...sources.structure import Columns


class Table(IndexedRows):
    """The rows of a table.

    Args:
        kind: the type of the table, for messages.
        columns: its columns by name, each with the values of all rows.
        rows: their number.
    """

    def __init__(self, kind: str, columns: dict[str, Any], rows: int) -> None:
        self._kind = kind
        self._columns = columns
        self._items = list(columns.items())
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._items}

    def rows_at(self, indices: Sequence[int]) -> RowStack | None:
        """See `IndexedRows`."""
        if not self._items:
            return None
        return RowStack(self._structure, [_at(column, indices) for _, column in self._items], len(indices))

    @cached_property
    def _structure(self) -> Columns:
        return Columns({name: name for name in self._columns}, "column")

    def __repr__(self) -> str:
        return f"<{self._kind} of {self._rows} rows: {shown(list(self._columns))[1:-1]}>"


def as_indexable(source: Any) -> Any:
    """Return the rows of a table, or `source` itself if it is none.

    Raises:
        TypeError, ValueError: a column cannot be served; the message names it, and the row of a missing value.
        ImportError: a polars frame needs pyarrow.
    """
    for base in type(source).__mro__:
        make = _TABLES.get((base.__module__.partition(".")[0], base.__name__))
        if make is not None:
            return make(source)
    return source


def _at(column: Any, indices: Sequence[int]) -> Any:
    """Return these values of a column."""
    return column[indices] if isinstance(column, _Categories | _Texts) else values_at(column, indices)


# --- NumPy ---


def _of_array(array: npt.NDArray[Any]) -> Any:
    if not array.dtype.names:
        return array
    if array.ndim != 1:
        raise TypeError(f"a structured array needs one dimension, and this one has the shape {array.shape}: reshape it")
    return _of_fields(array, "array")


def _of_fields(array: npt.NDArray[Any], path: str) -> Table:
    columns: dict[str, Any] = {}
    for name in array.dtype.names or ():
        values: Any = array[name]
        where = f"{path}[{name!r}]"
        if values.dtype.names and values.ndim == 1:
            columns[name] = _of_fields(values, where)
            continue
        if is_masked(values) and (rows := values.mask.reshape(len(array), -1).any(1)).any():
            raise ValueError(
                f"{where} has no value in row {rows.argmax()} (it is a masked array), and a batch has no nulls: fill "
                "them, array = array.filled(...), or leave out these rows or the field"
            )
        values = np.asarray(values)
        if values.dtype.kind in "mMV":
            raise TypeError(
                f"{where} has dtype {values.dtype}, which cannot be served: give an array without this field, or with "
                "numbers in its place"
            )
        else:
            columns[name] = values
    return Table("structured array", columns, len(array))


# --- pandas ---


class _Categories:
    """A categorical column: the category of each row."""

    def __init__(self, codes: npt.NDArray[Any], categories: npt.NDArray[Any]) -> None:
        self._codes, self._categories = codes, categories

    def __getitem__(self, index: Any) -> Any:
        return self._categories[self._codes[index]]


class _Texts:
    """A column of text, which is copied when its first row is read."""

    def __init__(self, series: Any) -> None:
        self._series = series
        self._values: Any = None

    def __getitem__(self, index: Any) -> Any:
        if self._values is None:
            self._values = self._series.to_numpy(object)
        return self._values[index]


class _Series:
    """The values of a series by their place: its own `[]` looks for the label of a row."""

    def __init__(self, values: Any, rows: int) -> None:
        self._values, self._rows = values, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


def _of_pandas(frame: Any) -> Table:
    names = _text_names(frame.columns, "df.columns = df.columns.map(str)")
    columns = {name: _column(frame.iloc[:, at], f"df[{name!r}]") for at, name in enumerate(names)}
    return Table("pandas.DataFrame", columns, len(frame))


def _of_series(series: Any) -> _Series:
    return _Series(_column(series, "series"), len(series))


def _column(series: Any, name: str) -> Any:
    dtype = series.dtype
    kind = dtype.kind if isinstance(dtype, np.dtype) else type(dtype).__name__
    if kind in ("m", "M", "DatetimeTZDtype"):
        raise TypeError(
            f"{name} has dtype {dtype}, which cannot be served: give numbers, {name} = {name}.astype('int64'), or "
            f"text, {name}.astype(str), or leave the column out"
        )
    if kind in ("PeriodDtype", "IntervalDtype"):
        raise TypeError(
            f"{name} has dtype {dtype}, which cannot be served: give text, {name} = {name}.astype(str), or leave the "
            "column out"
        )
    if kind == "SparseDtype":
        return series.to_numpy()
    if kind not in ("b", "i", "u", "f", "c"):  # a missing number is NaN there
        _check_missing(series, name)
    if kind == "CategoricalDtype":
        return _Categories(series.cat.codes.to_numpy(), series.cat.categories.to_numpy())
    if kind == "ArrowDtype":
        pa = _pyarrow("A column of pandas with an Arrow dtype")
        array = pa.array(series.array)
        place = Place(name, "fill them", f"give numbers or text, with {name}.astype(...), or leave the column out")
        return rows_of(array, place)
    if kind == "StringDtype":
        return _Texts(series)
    unmasked = getattr(dtype, "numpy_dtype", None)
    return series.to_numpy() if unmasked is None else series.to_numpy(unmasked)


def _check_missing(series: Any, name: str) -> None:
    missing = np.flatnonzero(series.isna().to_numpy())
    if not len(missing):
        return
    first = int(missing[0])
    label = series.index[first : first + 1].tolist()[0]
    row = f"row {first}" if label == first else f"row {first} (index {shown(label)})"
    more = f" and in {len(missing) - 1} more" if len(missing) > 1 else ""
    column = name.removeprefix("df[").removesuffix("]")
    rest = f"df = df.dropna(subset=[{column}])" if column != name else f"{name} = {name}.dropna()"
    raise ValueError(
        f"{name} has no value in {row}{more}, and a batch has no nulls: fill them, {name} = {name}.fillna(...), or "
        f"leave these rows out, {rest}"
    )


# --- pyarrow and polars ---


def _of_arrow(table: Any) -> Table:
    names = _text_names(table.schema.names, "table.rename_columns([...])")
    columns = {}
    for at, name in enumerate(names):
        place = Place(
            f"column {name!r} of the table",
            "fill them, with pyarrow.compute.fill_null, or leave out these rows or the column",
            "cast it to numbers or text, or leave the column out",
        )
        columns[name] = rows_of(table.column(at), place)
    return Table("pyarrow.Table", columns, table.num_rows)


def _of_polars(frame: Any) -> Table:
    _pyarrow("A polars frame")
    polars: Any = sys.modules["polars"]
    columns = {}
    for name, dtype in frame.schema.items():
        if dtype == polars.Object:
            raise TypeError(
                f"df[{name!r}] holds Python objects, which cannot be served: make numbers or text of them, or leave "
                f"the column out, df.drop({name!r})"
            )
        column = frame.select(name).to_arrow(compat_level=polars.CompatLevel.newest()).column(0)
        place = Place(
            f"df[{name!r}]",
            f"fill them, df.with_columns(pl.col({name!r}).fill_null(...)), or leave these rows out, "
            f"df.drop_nulls({name!r})",
            f"give numbers or text, df.with_columns(pl.col({name!r}).cast(...)), or leave the column out, "
            f"df.drop({name!r})",
        )
        columns[name] = rows_of(column, place)
    return Table("polars.DataFrame", columns, frame.height)


def _refused(instead: str) -> Callable[[Any], Any]:
    """Return a function that says what to give instead of an object that has no rows yet."""

    def refuse(source: Any) -> Any:
        kind = type(source)
        raise TypeError(f"{kind.__module__.partition('.')[0]}.{kind.__name__} has no rows in memory: {instead}")

    return refuse


def _text_names(names: Iterable[Any], rename: str) -> list[str]:
    """Return the names of columns.

    Raises:
        TypeError, ValueError: one is no text, or comes twice.
    """
    found: dict[str, None] = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"the table has a column with the name {shown(name)}, and names are text: {rename}")
        if name in found:
            raise ValueError(f"the table has two columns with the name {name!r}: rename one of them")
        found[name] = None
    return list(found)


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ImportError(f"{what} is read with pyarrow: {distribution.pip_install('parquet')}") from None
    return pyarrow


_TABLES: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("numpy", "ndarray"): _of_array,
    ("pandas", "DataFrame"): _of_pandas,
    ("pandas", "Series"): _of_series,
    ("polars", "DataFrame"): _of_polars,
    ("polars", "LazyFrame"): _refused("give what it collects, Feed(frame.collect(), ...)"),
    ("pyarrow", "Table"): _of_arrow,
    ("pyarrow", "RecordBatch"): _of_arrow,
    ("pyarrow", "Dataset"): _refused(
        "give Feed(dataset.to_table(), ...), or serve its files as they are, Feed.from_parquet(dataset.files, ...)"
    ),
}
"""What makes an indexable object, by the package and the name of a type."""
