"""The rows of a column in Arrow's memory layout: what Parquet and Arrow files, pyarrow, polars and `datasets` hold.

A column is read in chunks. Of numbers and of lists of numbers nothing is copied, so a table that is mapped into memory
stays there. This file imports pyarrow only when it is called: its threads do not survive a fork.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Place(NamedTuple):
    """Names a column in messages.

    Attributes:
        name: such as "a.parquet row group 3: column 'age'".
        fill: how to fill its nulls.
        other: what to do about a type that cannot be served.
        row: the number of the first row of the chunk that is being read.
    """

    name: str
    fill: str
    other: str
    row: int = 0

    def within(self, field: str) -> Place:
        """Return the place of a field of a struct."""
        return self._replace(name=f"{self.name}, field {field!r}")


class Chunked(Sequence[Any]):
    """The rows of several chunks."""

    def __init__(self, chunks: Sequence[Sequence[Any]]) -> None:
        self._chunks = chunks
        self._starts = np.cumsum([0, *map(len, chunks)]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        number = bisect_right(self._starts, index) - 1
        return self._chunks[number][index - self._starts[number]]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self._chunks)


class _Scalars(Sequence[Any]):
    """Text, bytes and what else Arrow converts to Python objects."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return self._array[index].as_py()

    def __iter__(self) -> Iterator[Any]:
        array = self._array
        if hasattr(array, "dictionary"):
            words = array.dictionary.to_pylist()
            return (words[index] for index in array.indices.to_pylist())
        return iter(array.to_pylist())


class _Lists(Sequence[Any]):
    """Lists of any length: views of the array that holds the items of all of them.

    Attributes:
        one_length: their length if all have the same, else 0.
    """

    def __init__(self, items: Array, starts: Array, lengths: Array) -> None:
        self._items = items
        self._starts, self._lengths = starts, lengths
        self.one_length = int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else 0

    def __len__(self) -> int:
        return len(self._starts)

    def stacked(self) -> Any:
        """Return lists of one length as one array. They lie one after the other."""
        first, rows = int(self._starts[0]), len(self)
        items = self._items[first : first + rows * self.one_length]
        return items.reshape(rows, self.one_length, *items.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        return self._items[start : start + self._lengths[index]]

    def __iter__(self) -> Iterator[Any]:
        items = self._items
        for start, length in zip(self._starts.tolist(), self._lengths.tolist(), strict=True):
            yield items[start : start + length]


class _ListsOfLists(Sequence[Any]):
    """Lists whose items are lists again. If those have one length, as boxes have, a row is an array of more dimensions,
    and else a list of arrays."""

    def __init__(self, items: Sequence[Any], starts: Array, lengths: Array, empty: Array) -> None:
        self._items = items
        self._starts, self._lengths = starts.tolist(), lengths.tolist()
        self._empty = empty

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        rows = [self._items[number] for number in range(start, start + self._lengths[index])]
        if not rows:
            return self._empty
        shapes = {row.shape if isinstance(row, np.ndarray) else None for row in rows}
        return np.array(rows) if len(shapes) == 1 and None not in shapes else rows


class _Structs(Sequence[Any]):
    """Structs, as dicts."""

    def __init__(self, names: Sequence[str], fields: Sequence[Sequence[Any]], rows: int) -> None:
        self._names, self._fields, self._rows = names, fields, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        return {name: field[index] for name, field in zip(self._names, self._fields, strict=True)}


def why_not_served(kind: Any) -> str:
    """Return why columns of a type cannot be served, and what to write in their place."""
    import pyarrow as pa

    instead = "serve other columns, or write numbers, text or lists of numbers in its place"
    if pa.types.is_temporal(kind):
        number = {32: "int32", 64: "int64"}.get(getattr(kind, "bit_width", 0), "int64")
        instead = f"write it as numbers, such as column.cast({number!r})"
    elif pa.types.is_decimal(kind):
        instead = "write it as numbers, such as column.cast('float64')"
    elif pa.types.is_map(kind):
        instead = "write a column of lists for each field"
    elif pa.types.is_null(kind):
        instead = "it holds nothing but nulls, so leave it out"
    return f"has type {kind}, which cannot be served: {instead}"


def rows_of(column: Any, place: Place) -> Sequence[Any]:
    """Return the rows of an array, or of a chunked array: numbers, arrays, text, bytes, or dicts of these.

    Raises:
        TypeError: its type cannot be served; the message names the column.
        ValueError: it holds a null; the message names the column and the row.
    """
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return _stacked(_rows(column, place))
    if not can_be_served(column.type):
        raise TypeError(f"{place.name} has type {column.type}, which cannot be served: {place.other}")
    chunks, row = [], place.row
    for chunk in column.chunks:
        if len(chunk):
            chunks.append(_stacked(_rows(chunk, place._replace(row=row))))
            row += len(chunk)
    return chunks[0] if len(chunks) == 1 else Chunked(chunks)


def _stacked(rows: Sequence[Any]) -> Sequence[Any]:
    """Return rows as an array, if they are lists of one length."""
    return rows.stacked() if isinstance(rows, _Lists) and rows.one_length else rows


def can_be_served(kind: Any) -> bool:
    """Return whether columns of this type can be leaves."""
    import pyarrow as pa

    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
    if isinstance(kind, pa.FixedShapeTensorType):
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return can_be_served(kind.storage_type)
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _can_be_in_lists(kind.value_type)
    if pa.types.is_struct(kind):
        return is_encoded(kind) or (kind.num_fields > 0 and all(can_be_served(field.type) for field in kind))
    return _is_number(kind) or _is_text(kind) or _is_binary(kind)


def _can_be_in_lists(kind: Any) -> bool:
    """Return whether lists with items of this type can be leaves. Lists of structs become dicts of lists, at the
    outermost level only."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return is_encoded(kind) or (
            kind.num_fields > 0 and all(can_be_served(pa.large_list(field.type)) for field in kind)
        )
    innermost = kind
    while _is_nested(innermost):
        innermost = innermost.value_type
    return not pa.types.is_struct(innermost) and can_be_served(kind)


def is_encoded(kind: Any) -> bool:
    """Return whether this is the type of images and sounds of `datasets`: struct<bytes: binary, path: string>."""
    import pyarrow as pa

    return (
        pa.types.is_struct(kind)
        and {field.name for field in kind} == {"bytes", "path"}
        and _is_binary(kind.field("bytes").type)
    )


def is_list(kind: Any) -> bool:
    """Return whether this is a type of lists whose lengths may differ."""
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _rows(array: Any, place: Place) -> Sequence[Any]:
    import pyarrow as pa

    kind = array.type
    if not can_be_served(kind):
        raise TypeError(f"{place.name} has type {kind}, which cannot be served: {place.other}")
    _check_nulls(array, place)
    if isinstance(kind, pa.DictionaryType):
        return _rows(array.dictionary_decode(), place) if _is_number(kind.value_type) else _Scalars(array)
    if isinstance(kind, pa.FixedShapeTensorType):
        rows: Sequence[Any] = array.to_numpy_ndarray()
    elif isinstance(kind, pa.BaseExtensionType):
        rows = _rows(array.storage, place)
    elif pa.types.is_fixed_size_list(kind) or is_list(kind):
        rows = _rows_of_lists(array, place)
    elif pa.types.is_struct(kind):
        rows = _rows_of_structs(array, place)
    elif _is_number(kind):
        rows = array.to_numpy(zero_copy_only=False)
    else:
        rows = _Scalars(array)
    return rows


def _rows_of_lists(array: Any, place: Place) -> Sequence[Any]:
    import pyarrow as pa

    items, kind = array.flatten(), array.type
    if items.null_count:
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        first = int(np.searchsorted(np.cumsum(lengths), _first_null(items), side="right"))
        raise _nulls(items.null_count, first, place, "in its lists ")
    lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_struct(kind.value_type):
        return _rows_of_lists_of_structs(items, lengths, place)
    if _holds_text(kind):
        _rows(items, place)  # which finds nulls
        return _Scalars(array)
    inner = _rows(items, place)
    if pa.types.is_fixed_size_list(kind) and isinstance(inner, np.ndarray):
        return inner.reshape(len(array), kind.list_size, *inner.shape[1:])
    starts = np.cumsum(lengths) - lengths
    if isinstance(inner, np.ndarray):
        return _Lists(inner, starts, lengths)
    return _ListsOfLists(inner, starts, lengths, _empty(kind.value_type, getattr(inner, "one_length", 0)))


def _rows_of_lists_of_structs(items: Any, lengths: Array, place: Place) -> Sequence[Any]:
    """Return lists of structs as dicts of lists, as TensorFlow Datasets and `datasets` make of sequences of dicts."""
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    _check_nulls(items, place)
    if is_encoded(items.type):
        return _Scalars(pa.LargeListArray.from_arrays(offsets, _encoded(items, place)))
    names = [field.name for field in items.type]
    lists = [pa.LargeListArray.from_arrays(offsets, items.field(name)) for name in names]
    fields = [_stacked(_rows(of, place.within(name))) for of, name in zip(lists, names, strict=True)]
    return _Structs(names, fields, len(lengths))


def _rows_of_structs(array: Any, place: Place) -> Sequence[Any]:
    kind = array.type
    if is_encoded(kind):
        return _rows(_encoded(array, place), place)
    names = [field.name for field in kind]
    return _Structs(names, [_rows(array.field(name), place.within(name)) for name in names], len(array))


def _encoded(array: Any, place: Place) -> Any:
    """Return the bytes of images and sounds."""
    encoded = array.field("bytes")
    if encoded.null_count:
        row = _first_null(encoded)
        path = array.field("path")[row].as_py()
        raise ValueError(
            f"{place.name} holds no bytes in row {place.row + row}, only the path {path!r}: the data are in that "
            "file, so read it in a transform, or write the table again with the bytes (datasets: "
            "embed_external_files=True)"
        )
    return encoded


def _holds_text(kind: Any) -> bool:
    """Return whether the innermost items of lists are text or bytes."""
    while _is_nested(kind):
        kind = kind.value_type
    if hasattr(kind, "index_type"):
        kind = kind.value_type
    return _is_text(kind) or _is_binary(kind)


def _empty(kind: Any, length: int) -> Array:
    """Return an array of no lists of this type, which have `length` items where the type does not say it."""
    dims = []
    while not _is_number(kind):
        dims.append(getattr(kind, "list_size", length))
        kind = kind.value_type
    return np.empty((0, *dims), kind.to_pandas_dtype())


def _check_nulls(array: Any, place: Place) -> None:
    if array.null_count:
        raise _nulls(array.null_count, _first_null(array), place, "")


def _nulls(count: int, first: int, place: Place, where: str) -> ValueError:
    many = "a null" if count == 1 else f"{count} nulls"
    row = f"in row {place.row + first}" if count == 1 else f"the first in row {place.row + first}"
    return ValueError(f"{place.name} holds {many} {where}({row}), and an array cannot: {place.fill}")


def _first_null(array: Any) -> int:
    import pyarrow.compute as pc

    return int(pc.index(pc.is_null(array), True).as_py())


def _is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(is_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_view(kind, "string_view"))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or _is_view(kind, "binary_view")
    )


def _is_view(kind: Any, name: str) -> bool:
    """Return whether this is a type of views, which pyarrow has from version 16 on, and polars uses."""
    return str(kind) == name
