"""Lists of lists of different lengths: rows of leaves that vary in more than one dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import SpecError
from penstock_proto.batches.inferring import strings_of
from penstock_proto.spec import Leaf, is_list, numpy_dtype
from penstock_proto.value_text import shown

from .leaf_check import LeafCheck, TextCheck

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class NestedRow:
    """A row of a ragged leaf.

    Attributes:
        values: the innermost items, one after another: an array `[items, ...]`, or strings.
        lengths: the lengths of the lists at each level. At the first level there is one list, the row.
    """

    values: Array | list[bytes]
    lengths: tuple[list[int], ...]

    @property
    def nbytes(self) -> int:
        """How many bytes its values take."""
        return sum(map(len, self.values)) if isinstance(self.values, list) else self.values.nbytes


def nested_fit(path: str, leaf: Leaf) -> Callable[[Any], NestedRow]:
    """Return a function that checks a value against a ragged leaf, and copies it to a row.

    The value is an array, or a list of what fits the leaf without its first dimension. The function raises `SpecError`.
    """
    levels = leaf.ragged_dims
    whole = None if leaf.text else LeafCheck(path, leaf, ready=False)
    items = _Items(path, leaf, levels)

    def fit(value: Any) -> NestedRow:
        if whole is not None and not is_list(value):
            array = whole.fit(value)
            lengths = tuple([dim] * count for count, dim in _counts(array.shape[:levels]))
            return NestedRow(array.reshape(math.prod(array.shape[:levels]), *array.shape[levels:]).copy(), lengths)
        parts, lists = items.of(value)
        lengths = (*lists, list(map(len, parts)))
        if whole is None:
            return NestedRow(list(chain.from_iterable(parts)), lengths)
        empty = np.empty((0, *whole.shape[levels:]), whole.dtype)
        return NestedRow(np.concatenate([empty, *parts]), lengths)

    return fit


def filled_up(value: Any, path: str, leaf: Leaf, pad: Any) -> Array:
    """Return lists of arrays of different shapes as one array, filled up with `pad`.

    Raises:
        SpecError: they do not fit the leaf.
    """
    parts, lists = _Items(path, leaf, dims_to_fill(leaf)).of(value)
    most = [max(dims) for dims in zip(*(part.shape for part in parts), strict=True)]
    most = most or [dim or 0 for dim in leaf.shape[len(lists) :]]
    array = np.full((*(max(lengths, default=0) for lengths in lists), *most), pad, numpy_dtype(leaf.dtype))
    for place, part in zip(_places(lists), parts, strict=True):
        array[place + tuple(map(slice, part.shape))] = part
    return array


def dims_to_fill(leaf: Leaf) -> int:
    """Return how many dimensions a padded leaf has, from the first to the last one that varies."""
    return max((number for number, dim in enumerate(leaf.shape, 1) if dim is None), default=0)


class _Items:
    """Takes the values of a leaf apart: into arrays, or lists of strings, that are the items of its innermost lists."""

    def __init__(self, path: str, leaf: Leaf, levels: int) -> None:
        self._path, self._leaf, self._levels = path, leaf, levels
        self._inner = Leaf(leaf.dtype, leaf.shape[levels - 1 :], ragged=leaf.ragged)
        self._check = self._check_of(path)

    def of(self, value: Any) -> tuple[list[Any], list[list[int]]]:
        """Return the innermost lists of a value, and the lengths of the lists at each level above them.

        Raises:
            SpecError: the value does not fit the leaf.
        """
        items: list[Any] = [value]
        lists: list[list[int]] = []
        for _ in range(self._levels - 1):
            for number, item in enumerate(items):
                if not isinstance(item, list | tuple if lists else list) and not len(getattr(item, "shape", ())):
                    raise SpecError(
                        f"sample{self._named(lists, number)} is {shown(item)}, but the feed's spec has {self._leaf} at "
                        f"sample{self._path}: yield a list of lists, or of arrays"
                    )
            lists.append(list(map(len, items)))
            items = list(chain.from_iterable(items))
        return [self._fitted(item, lists, number) for number, item in enumerate(items)], lists

    def _fitted(self, item: Any, lists: list[list[int]], number: int) -> Any:
        if isinstance(item, tuple) and lists:  # as within any list
            item = list(item)
        if self._leaf.text and type(item) is list and (strings := strings_of(item)) is not None:
            return strings
        try:
            found = self._check.fit(item)
        except SpecError:
            self._check_of(self._named(lists, number)).fit(item)
            raise
        return found.tolist() if self._leaf.text else found

    def _check_of(self, path: str) -> LeafCheck | TextCheck:
        return (TextCheck if self._leaf.text else LeafCheck)(path, self._inner, ready=False)

    def _named(self, lists: list[list[int]], number: int) -> str:
        return self._path + "".join(f"[{at}]" for at in place_of(lists, number))


def place_of(lists: Sequence[Sequence[int]], number: int) -> tuple[int, ...]:
    """Return the index at each level of item `number` within opened lists."""
    place: list[int] = []
    for lengths in reversed(lists):
        of = 0
        while number >= lengths[of]:
            number -= lengths[of]
            of += 1
        place.append(number)
        number = of
    return tuple(reversed(place))


def _places(lists: Sequence[Sequence[int]]) -> list[tuple[int | slice, ...]]:
    """Return the index at each level of every item within opened lists."""
    places: list[tuple[int | slice, ...]] = [()]
    for lengths in lists:
        places = [(*place, at) for place, length in zip(places, lengths, strict=True) for at in range(length)]
    return places


def _counts(dims: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return for each dimension how many lists there are in an array, and their length."""
    found, count = [], 1
    for dim in dims:
        found.append((count, dim))
        count *= dim
    return found
