"""Collects samples that differ in size and writes them to a slot as padded, ragged or text columns.

The interface is that of `collate.Rows`. A store is a list with an item for each leaf: an array for a leaf of one shape,
else a list that holds, for each row, a copy of the array, or its strings, or a `NestedRow`. A leaf has those if it is
ragged in several dimensions, or ragged text. Rows are written when a batch is complete,
because the room that each column needs is known only then. This file does not know where a slot is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.columns import PADDED, STACKED, TEXT, Column, Columns, Sizes
from penstock_proto.spec import Spec, is_list, leaves
from penstock_proto.value_text import shown

from .collate import Array, BadSample, Raised, Timed
from .leaf_check import LeafCheck, TextCheck, flattener, joined
from .nested_lists import NestedRow, dims_to_fill, filled_up, nested_fit

Store: TypeAlias = list[Any]
Fit: TypeAlias = Callable[[Any], Any]


class VariableRows(Timed):
    """Collects samples with at least one leaf that varies in size.

    Args:
        spec: of a sample.
        columns: how its leaves are stored.
        pad_value: the value of the padding: one number for all leaves, or one for each leaf in the structure of a
            sample.
        cut: whether to cut samples to the length of the last bucket. Otherwise a longer sample is an error.

    Raises:
        SpecError: `pad_value` does not have the structure of a sample, or does not fit a leaf's dtype.
    """

    def __init__(self, spec: Spec, columns: Columns, *, pad_value: Any = 0, cut: bool = False) -> None:
        super().__init__()
        self._columns = columns
        self._cut = cut
        self._flatten = flattener(spec)
        paths = [path for path, _ in leaves(spec)]
        self._pads = _pads(spec, columns, pad_value)
        self._fits = [
            self._fit(path, column, pad) for path, column, pad in zip(paths, columns.columns, self._pads, strict=True)
        ]

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each stored array."""
        return self._columns.dtypes

    def store(self, rows: int) -> Store:
        """Return memory for `rows` samples."""
        return [
            np.empty((rows, *_static(column)), column.dtype) if column.kind is STACKED else [None] * rows
            for column in self._columns.columns
        ]

    def fill(self, store: Store, row: int, stop: int, samples: Iterator[Any]) -> int:
        """Copy samples to the rows from `row` to `stop`, each before the next is requested.

        Returns and raises as `Rows.fill`.
        """
        flat_of = self._flatten
        targets = list(zip(store, self._fits, strict=True))
        try:
            for sample in islice(samples, stop - row):
                try:
                    for value, (target, fit) in zip(flat_of(sample), targets):  # noqa: B905
                        target[row] = fit(value)
                except SpecError as error:
                    raise BadSample(error.message, row) from None
                row += 1
        except BadSample:
            raise
        except BaseException as error:
            raise Raised(error, row) from error
        return row

    def move(self, store: Store, rows: npt.NDArray[np.int64], target: Store) -> None:
        """Move the given rows of `store`, in this order, to the first rows of `target`."""
        numbers = rows.tolist()
        for source, leaf in zip(store, target, strict=True):
            if isinstance(source, list):
                for at, number in enumerate(numbers):
                    leaf[at], source[number] = source[number], None
            else:
                np.take(source, rows, axis=0, out=leaf[: len(rows)], mode="clip")

    def first(self, store: Store, rows: int) -> Store:
        """Return a copy of the first rows."""
        return [leaf[:rows] if isinstance(leaf, list) else leaf[:rows].copy() for leaf in store]

    @property
    def bucketed(self) -> bool:
        """Whether batches are made of samples of similar length."""
        return self._columns.longest is not None

    def buckets_of(self, store: Store, rows: int) -> npt.NDArray[np.int64]:
        """Return the bucket number of each of the first `rows` rows: the bucket of the row's longest padded leaf."""
        found = np.zeros(rows, np.int64)
        for column, leaf in zip(self._columns.columns, store, strict=True):
            if column.has_length:
                np.maximum(found, [self._columns.bucket(len(value)) for value in leaf[:rows]], out=found)
        return found

    def is_too_long(self, sample: Any) -> bool:
        """Return whether a sample is longer than the last bucket."""
        longest = self._columns.longest
        return longest is not None and any(
            column.has_length and (isinstance(value, list) or np.ndim(value) > 0) and len(value) > longest
            for column, value in zip(self._columns.columns, self._flatten(sample), strict=True)
        )

    # --- a complete batch ---

    def sizes(self, store: Store, start: int, count: int) -> Sizes:
        """Return the sizes of `count` rows from row `start` on."""
        return tuple(
            _size(column, leaf[start : start + count])
            for column, leaf in zip(self._columns.columns, store, strict=True)
        )

    def shapes(self, store: Store, rows: int) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each stored array of a batch of the first rows."""
        return self._columns.shapes(rows, self.sizes(store, 0, rows))

    def keep(self, store: Store) -> None:
        """Do nothing: a store has copies already."""

    def count(self, store: Store, rows: int) -> int:
        """Return the number of rows of a batch of the first `rows`."""
        return rows

    def write(self, store: Store, rows: int, arrays: Sequence[Array]) -> None:
        """Write a batch of the first rows."""
        none = tuple((0,) * len(size) for size in self.sizes(store, 0, 0))
        self.write_rows(store, 0, rows, arrays, 0, none)

    def write_rows(
        self, store: Store, start: int, count: int, arrays: Sequence[Array], row: int, before: Sizes
    ) -> None:
        """Write `count` rows, from row `start` on, to a batch's arrays, from their row `row` on.

        `before`: the sizes of the batch's rows before `row`.
        """
        rest = iter(arrays)
        for column, leaf, pad, size in zip(self._columns.columns, store, self._pads, before, strict=True):
            rows = leaf[start : start + count]
            if column.kind is STACKED:
                next(rest)[row : row + count] = rows
            elif column.kind is PADDED:
                _write_padded(next(rest)[row : row + count], rows, pad)
            elif _is_nested(column):
                _write_nested([next(rest) for _ in range(column.arrays)], column, rows, row, size)
            else:
                _write_joined(next(rest), next(rest), column, rows, row, size[0])

    def _fit(self, path: str, column: Column, pad: Any) -> Fit:
        if column.kind is TEXT:
            return _text_fit(path, column)
        if _is_nested(column):
            return nested_fit(path, column.leaf)
        check = LeafCheck(path, column.leaf, ready=False)
        if column.kind is STACKED:
            return check.fit
        fit: Fit = check.fit
        if column.kind is PADDED and dims_to_fill(column.leaf) > 1:
            fit = _padded_fit(check, path, column, pad)
        longest = self._columns.longest if column.has_length else None
        if longest is None:
            return lambda value: np.array(fit(value))

        def within(value: Any) -> Array:
            array = fit(value)
            if len(array) > longest and not self._cut:
                raise SpecError(
                    f"sample{path} has length {len(array)}, and the last of buckets is {longest}: give a longer one, "
                    'or Pad(too_long="cut") or Pad(too_long="drop")'
                )
            return np.array(array[:longest])

        return within


def _static(column: Column) -> tuple[int, ...]:
    return tuple(dim or 0 for dim in column.leaf.shape)


def _is_nested(column: Column) -> bool:
    """Return whether the rows of a store are `NestedRow`s."""
    return column.ragged > 1 or (column.ragged == 1 and column.text)


def _padded_fit(check: LeafCheck, path: str, column: Column, pad: Any) -> Fit:
    """Return a function that also takes lists of arrays of different shapes, which it fills up."""

    def fit(value: Any) -> Array:
        array: Array = check.fit(filled_up(value, path, column.leaf, pad) if is_list(value) else value)
        return array

    return fit


def _text_fit(path: str, column: Column) -> Fit:
    """Return a function that checks the value of a text leaf and returns its strings as a list of bytes."""
    check, scalar = TextCheck(path, column.leaf, ready=False), not column.leaf.shape

    def fit(value: Any) -> list[bytes]:
        if type(value) is bytes and scalar:
            return [value]
        strings: list[bytes] = check.fit(value).reshape(-1).tolist()
        return strings

    return fit


def _size(column: Column, rows: Any) -> tuple[int, ...]:
    if column.kind is STACKED:
        return ()
    if column.kind is PADDED:
        shapes = [value.shape for value in rows] or [(0,) * len(column.leaf.shape)]
        return tuple(max(dims) for dims in zip(*shapes, strict=True))
    if column.kind is TEXT:
        return (sum(len(string) for strings in rows for string in strings),)
    if not _is_nested(column):
        return (sum(map(len, rows)),)
    sums = [sum(map(sum, (row.lengths[level] for row in rows))) for level in range(column.ragged)]
    return (*sums, *([sum(row.nbytes for row in rows)] if column.text else ()))


def _write_padded(target: Array, rows: Sequence[Array], pad: Any) -> None:
    target[...] = pad
    for place, value in zip(target, rows, strict=True):
        place[tuple(map(slice, value.shape))] = value


def _write_joined(values: Array, offsets: Array, column: Column, rows: Sequence[Any], row: int, at: int) -> None:
    """Write rows of a ragged or text leaf one after another, from item `at` on. The first of them is row `row`."""
    pieces: Sequence[Any]
    if column.kind is TEXT:
        pieces = [string for strings in rows for string in strings]
        first = row * column.strings
        data, ends = joined(pieces)
        values[at : at + len(data)] = data
    else:
        pieces, first = rows, row
        ends = np.cumsum([0, *map(len, pieces)])
        if pieces:
            np.concatenate(pieces, out=values[at : at + int(ends[-1])])
    offsets[first : first + len(pieces) + 1] = ends + at  # the first of them is the end of the rows before


def _write_nested(
    arrays: Sequence[Array], column: Column, rows: Sequence[NestedRow], row: int, before: tuple[int, ...]
) -> None:
    """Write rows of a leaf that is ragged in several dimensions, or of ragged text, from row `row` on. `before`: the
    sizes of the rows before it."""
    places = column.items(row, before)
    values, splits = arrays[0], arrays[1 + column.text :]
    for level, offsets in enumerate(splits):
        lengths = [length for one in rows for length in one.lengths[level]]
        _write_ends(offsets, places[level], lengths, places[level + 1])
    if column.text:
        strings = [string for one in rows for string in one.values]
        data, ends = joined(strings)
        values[before[-1] : before[-1] + len(data)] = data
        arrays[1][places[-1] : places[-1] + len(ends)] = ends + before[-1]
        return
    at = places[-1]
    for one in rows:
        values[at : at + len(one.values)] = one.values
        at += len(one.values)


def _write_ends(offsets: Array, first: int, lengths: Sequence[int], at: int) -> None:
    """Write where lists of these lengths end, if the first one is list `first` and begins at item `at`.

    Each number is written once. Another worker may write the rows before or behind these at the same time, and the
    number between them is the same for both.
    """
    offsets[first : first + 1 + len(lengths)] = np.cumsum([at, *lengths])


def _pads(spec: Spec, columns: Columns, pad_value: Any) -> list[Any]:
    """Return the padding value of each leaf."""
    given: list[Any]
    if isinstance(pad_value, dict | tuple):
        given = list(flattener(spec)(pad_value))
    else:
        given = [pad_value] * len(columns.columns)
    pads = []
    for (path, _), column, value in zip(leaves(spec), columns.columns, given, strict=True):
        if column.kind is PADDED:
            scalar = LeafCheck(path, column.item, ready=False)
            if scalar.dtype.kind == "b" and type(value) is int and value in (0, 1):
                value = bool(value)
            try:
                value = np.asarray(scalar.fit(value), scalar.dtype)[()]
            except SpecError:
                raise SpecError(
                    f"Pad(value={shown(value)}) does not fit sample{path}, which is {column.leaf}: give a number of "
                    "that dtype, or one for each leaf in the structure of a sample"
                ) from None
        pads.append(value)
    return pads
