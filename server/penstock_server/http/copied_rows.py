"""Copies the first rows of a batch out of its slot before it is sent, because a consumer may write there later.

This runs on the event loop, so it copies little: a few whole samples, and more rows only of small leaves.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto.batches.columns import TEXT, Column
from penstock_proto.batches.layout import LeafPlace

from ..coordinator.model.commands import SendSlab
from ..coordinator.model.feeds import ServedFeed
from ..shared_memory.arena import Memfd

MOST_SAMPLES = 12
"""Maximum number of samples to copy with all their leaves."""

MOST_LEAVES = 64
"""Maximum number of leaves to copy."""

_MOST_NBYTES = 8 << 20
"""Maximum cost of these samples together, in bytes. One sample is always copied, up to `_LARGEST`."""

_LARGEST = 32 << 20
"""Maximum cost of one sample. Leaves that would exceed it are left out."""

_END_COST = 16
"""Cost of each byte of the ends of text and ragged rows, which become Python numbers, in bytes that are only copied."""

_SMALL = 256 << 10
"""Bytes of a leaf up to which further rows are copied, for its histogram."""


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of one leaf.

    Attributes:
        values: their array; for text and ragged rows, all rows one after another.
        ends: where each row or string ends in `values`, after a leading 0; None if each row is a row of the array. If
            rows are lists of lists, or of any number of strings, these are the ends of the innermost lists or strings.
        outer: for such rows, where each of them ends, and each list within them but the innermost.
        strings: for other text, the number of strings in a row; None if it is not text.
    """

    values: npt.NDArray[Any]
    ends: list[int] | None = None
    strings: int | None = None
    outer: tuple[list[int], ...] = ()

    def row(self, number: int, shape: tuple[int | None, ...]) -> Any:
        """Return a row. For text, it is an array of bytes objects, or one bytes object if `shape` (the shape of a row)
        is empty. Lists of lists are lists of arrays, and any number of strings is a list of bytes objects."""
        if self.ends is None:
            return self.values[number]
        if self.outer:
            return self._list(0, number)
        if self.strings is None:
            return self.values[self.ends[number] : self.ends[number + 1]]
        found = np.empty(self.strings, object)
        for place in range(self.strings):
            found[place] = self._item(number * self.strings + place).tobytes()
        if not shape:
            return found[0]
        return found if None in shape else found.reshape([dim or 0 for dim in shape])

    def _list(self, level: int, number: int) -> Any:
        if level == len(self.outer):
            item = self._item(number)
            return item if self.strings is None else item.tobytes()
        start, stop = self.outer[level][number : number + 2]
        return [self._list(level + 1, at) for at in range(start, stop)]

    def _item(self, number: int) -> npt.NDArray[Any]:
        assert self.ends is not None
        return self.values[self.ends[number] : self.ends[number + 1]]


@dataclass(frozen=True, slots=True)
class CopiedBatch:
    """The first rows of a batch.

    Attributes:
        epoch, lane, index: the batch: its number in the lane of the epoch.
        rows: the number of rows of the batch; 1 if its leaves have no rows in common, and it counts as one sample.
        samples: the number of rows that were copied of all leaves.
        nbytes: bytes of the whole batch.
        leaves: the first `MOST_LEAVES` in the order of the spec; None for a leaf whose rows are too large to show.
        one: whether the batch counts as one sample.
    """

    epoch: int
    lane: int
    index: int
    rows: int
    samples: int
    nbytes: int
    leaves: list[CopiedRows | None]
    one: bool


def copy_batch(feed: ServedFeed, slab: SendSlab, memfd: Memfd) -> CopiedBatch:
    """Copy rows of the first batch of a slab.

    Raises:
        OSError: the memory cannot be read.
        ValueError: the contents of the slot do not fit the feed.
    """
    layout = feed.layout(slab.shapes)
    places = iter(layout.places)
    stored = [_Stored.of(column, list(itertools.islice(places, column.arrays))) for column in feed.columns.columns]
    rows, one = slab.rows // slab.batches, False
    if feed.plan.batch_size is None:
        counts = {leaf.ready_rows() for leaf in stored}
        one = len(counts) != 1 or None in counts
        rows = 1 if one else counts.pop() or 0
    shown = stored[:MOST_LEAVES]
    total, costs = 0, []
    for leaf in shown:
        cost = leaf.row_cost(rows)
        fits = total + cost <= _LARGEST
        total += cost if fits else 0
        costs.append(cost if fits else None)
    samples = min(rows, MOST_SAMPLES, max(1, _MOST_NBYTES // max(1, total)))
    leaves = [
        None
        if cost is None
        else leaf.rows(memfd.fd, slab.first, rows, min(rows, max(samples, _SMALL // max(1, cost))), one=one)
        for leaf, cost in zip(shown, costs, strict=True)
    ]
    return CopiedBatch(slab.epoch, slab.lane, slab.index, rows, samples, slab.nbytes // slab.batches, leaves, one)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A leaf as it lies in a slot: its values, where each row or string ends in them, and the outer lists."""

    column: Column
    values: LeafPlace
    ends: LeafPlace | None
    outer: tuple[LeafPlace, ...]

    @classmethod
    def of(cls, column: Column, places: list[LeafPlace]) -> _Stored:
        """Return the leaf that is stored in these arrays."""
        values, *offsets = places
        innermost = offsets.pop(0 if column.text else -1) if offsets else None
        return cls(column, values, innermost, tuple(offsets))

    def ready_rows(self) -> int | None:
        """Return how many rows it has in a batch that user code has made; None if it has no dimension."""
        if self.ends is None:
            return self.values.shape[0] if self.values.shape else None
        shape = self.column.leaf.shape
        if not shape or shape[0] is not None:
            return shape[0] if shape else None
        return (self.ends.shape[0] - 1) // max(1, math.prod(dim or 1 for dim in shape[1:]))

    def row_cost(self, rows: int) -> int:
        """Return what it costs on average to copy a row, in bytes."""
        ends = _END_COST * sum(place.nbytes for place in (self.ends, *self.outer) if place)
        return -(-(self.values.nbytes + ends) // max(1, rows))

    def rows(self, fd: int, number: int, rows: int, count: int, *, one: bool) -> CopiedRows | None:
        """Read `count` of the `rows` rows of batch `number`; with `one`, read all of it as one row. Return None if
        these rows are much larger than the average, and so too large."""
        shape = self.values.shape
        if self.ends is None:
            shape = (1, *shape) if one else (count, *shape[1:])
            return CopiedRows(_read(fd, self.values, number, math.prod(shape)).reshape(shape))
        strings = (self.ends.shape[0] - 1) // max(1, rows) if self.column.kind is TEXT else None
        items, outer = count * (1 if strings is None else strings), []
        for place in self.outer:
            outer.append(_read(fd, place, number, items + 1).tolist())
            items = outer[-1][-1]
        ends = _read(fd, self.ends, number, items + 1).tolist()
        shape = (ends[-1], *(() if self.column.text else shape[1:]))
        if math.prod(shape) * self.values.dtype.itemsize > _LARGEST:
            return None
        values = _read(fd, self.values, number, math.prod(shape)).reshape(shape)
        return CopiedRows(values, ends, 1 if self.column.text and outer else strings, tuple(outer))


def _read(fd: int, place: LeafPlace, number: int, count: int) -> npt.NDArray[Any]:
    """Read the first `count` values of an array of batch `number`."""
    nbytes = count * place.dtype.itemsize
    if not 0 <= nbytes <= place.nbytes:
        raise ValueError(f"{count} values of an array of {place.nbytes} bytes")
    return np.frombuffer(os.pread(fd, nbytes, place.offset + number * place.nbytes), place.dtype)
