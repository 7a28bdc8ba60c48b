"""Which arrays hold a batch. A leaf whose samples all have one size is one array; other leaves are stored as follows.

    stacked   values [rows, ...]                             all samples have this shape
    padded    values [rows, ...]                             samples are filled up to the largest, or to a bucket
    ragged    values [sum of lengths, ...], offsets [rows + 1]   one sample after another
    text      bytes [sum of lengths], offsets [strings + 1]  one string after another

Sample (or string) i of a ragged leaf (or text) is `values[offsets[i] : offsets[i + 1]]`; offsets are int64. TensorFlow
calls them row splits. If a leaf is ragged in several dimensions, it has offsets for each, the outermost first: those of
samples count lists, and those of the innermost lists count values. Ragged text is text whose strings are such values:
bytes, offsets of strings, then those of samples and lists.

The *sizes* of some rows say how much room they need, as a tuple for each leaf: empty for a stacked leaf and the largest
dimensions for a padded one. For a ragged leaf they are the sums of lengths, for each ragged dimension, and for text the
number of bytes comes last.

This file knows no slot and no message.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from ..spec import Leaf, Spec, leaf_list, numpy_dtype

Sizes: TypeAlias = tuple[tuple[int, ...], ...]
"""How much room some rows need; see the file's head."""


class Kind(Enum):
    """How a leaf is stored."""

    STACKED = "stacked"
    PADDED = "padded"
    RAGGED = "ragged"
    TEXT = "text"


STACKED, PADDED, RAGGED, TEXT = Kind


@dataclass(frozen=True, slots=True)
class Column:
    """How one leaf is stored: `kind`, and the leaf of a sample (of a batch if the feed yields whole batches).

    Attributes:
        text: whether it is stored as bytes, and the offsets of strings.
        ragged: how many arrays of row splits it has: one for each ragged dimension.
    """

    kind: Kind
    leaf: Leaf
    text: bool = field(init=False)
    ragged: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.leaf.text)
        object.__setattr__(self, "ragged", self.leaf.ragged_dims if self.kind is RAGGED else 0)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The leaf's NumPy dtype."""
        return numpy_dtype(self.leaf.dtype)

    @property
    def item(self) -> Leaf:
        """One number of the leaf."""
        return Leaf(self.leaf.dtype, ())

    @property
    def strings(self) -> int:
        """Strings in a sample of a text leaf; 1 if it is ragged, for each innermost item."""
        return math.prod(dim or 0 for dim in self.leaf.shape[self.ragged :])

    @property
    def has_length(self) -> bool:
        """Whether its samples have a length that decides their bucket: its first dimension varies."""
        return self.kind is PADDED and self.leaf.shape[0] is None

    @property
    def arrays(self) -> int:
        """How many arrays hold it."""
        return 1 + self.text + self.ragged

    @property
    def has_offsets(self) -> bool:
        """Whether offsets lie behind its values."""
        return self.arrays > 1

    def items(self, rows: int, size: tuple[int, ...]) -> list[int]:
        """Return the numbers of items at each level of rows with these sizes: of rows, then for each ragged dimension.
        The last one counts innermost items."""
        return [rows, *size[: self.ragged]]


class Columns:
    """How the batches of a feed are stored.

    Args:
        spec: of a sample, or of a batch if `batch_size` is None.
        batch_size: rows of a full batch; None: user code makes the batches.
        buckets: the lengths to which a padded leaf's first dimension is filled up, in ascending order; empty: to the
            longest of the batch.

    Attributes:
        columns: one for each leaf, in the order of the spec.
        arrays: the dtype and shape of each stored array, with None for dimensions that vary; leaves in order.
    """

    def __init__(self, spec: Spec, batch_size: int | None, buckets: Sequence[int] = ()) -> None:
        self._ready = batch_size is None
        self._buckets = tuple(buckets)
        self.columns = tuple(Column(_kind(leaf, self._ready), leaf) for leaf in leaf_list(spec))
        self.arrays = tuple(array for column in self.columns for array in self._arrays(column))

    @property
    def dtypes(self) -> list[str]:
        """The dtype of each stored array."""
        return [array.dtype for array in self.arrays]

    def shapes(self, rows: int, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """Return the shape of each stored array of a batch with these rows. (Not for ready batches.)"""
        found: list[tuple[int, ...]] = []
        for column, size in zip(self.columns, sizes, strict=True):
            shape = tuple(dim or 0 for dim in column.leaf.shape)
            if column.has_offsets:
                *outer, innermost = column.items(rows, size)
                if column.text:
                    found += [(size[-1],), (innermost * column.strings + 1,)]
                else:
                    found.append((innermost, *shape[column.ragged :]))
                found += [(items + 1,) for items in outer]
            elif column.kind is PADDED:
                found.append((rows, *self._filled_up(column, size)))
            else:
                found.append((rows, *shape))
        return tuple(found)

    def joined(self, parts: Iterable[Sizes]) -> Sizes:
        """Return the sizes of all rows of these parts together."""
        total = [[0] * _size_length(column) for column in self.columns]
        for part in parts:
            for column, sums, size in zip(self.columns, total, part, strict=True):
                for at, number in enumerate(size):
                    sums[at] = max(sums[at], number) if column.kind is PADDED else sums[at] + number
        return tuple(map(tuple, total))

    def fit(self, sizes: Sizes) -> bool:
        """Return whether these can be sizes of rows of this feed."""
        return [len(size) for size in sizes] == [_size_length(column) for column in self.columns]

    @property
    def longest(self) -> int | None:
        """The length of the last bucket; None without buckets."""
        return self._buckets[-1] if self._buckets else None

    def bucket(self, length: int) -> int:
        """Return the number of the first bucket that is long enough, or the number of buckets."""
        return bisect_left(self._buckets, length)

    def _filled_up(self, column: Column, size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the dimensions of a padded leaf's filled-up samples. `size`: the largest of the batch."""
        place = self.bucket(size[0]) if column.has_length else len(self._buckets)
        return (self._buckets[place], *size[1:]) if place < len(self._buckets) else size

    def _arrays(self, column: Column) -> list[Leaf]:
        leaf, offsets = column.leaf, Leaf("int64", (None,))
        splits = [offsets] * column.ragged
        if column.text:
            return [Leaf("uint8", (None,)), offsets, *splits]
        if splits:
            return [Leaf(leaf.dtype, (None, *leaf.shape[column.ragged :])), *splits]
        return [leaf if self._ready else Leaf(leaf.dtype, (None, *leaf.shape))]


def _kind(leaf: Leaf, ready: bool) -> Kind:
    if leaf.text and (ready or not leaf.ragged):
        return TEXT
    if ready or leaf.static:
        return STACKED
    return RAGGED if leaf.ragged else PADDED


def _size_length(column: Column) -> int:
    if column.kind is PADDED:
        return len(column.leaf.shape)
    return column.ragged + column.text
