"""How batches lie in a slot: their headers, then leaf by leaf, each leaf of all batches one after another.

So a leaf of consecutive batches is one array [batches, batch size, ...], which TensorFlow splits without any work per
batch. `tf.data.Dataset.from_generator` takes an array without a copy only if its address is a multiple of 64, so each
leaf begins at such an address. A slot with room for n batches is

    0     headers, 64 bytes each: int64 (native order) rows, epoch, lane, index in its lane; the rest is the consumer's
    64 n  leaf 0 of batch 0, of batch 1, ...; padded to a multiple of 64 after the last
    ...   leaf 1, ...

A slab is some consecutive batches of a slot, from place `first` on. Only the last batch of an epoch may have fewer rows
than the others, and then it is a slab of its own. Each slot of a *fixed* feed (batch size and every sample dimension
known) has room for a turn or a stripe. Any other feed has one batch in a slot, and the message carries its shapes.

This file knows no memfd and no message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..spec import Leaf, Spec, leaf_list, map_leaves, numpy_dtype

ALIGN = 64
HEADER = 64
"""Bytes of a batch's header."""
MAX_SLOT = 2**50
"""Most bytes of a slot, and of each array in it if empty dimensions had one element: more than any machine has."""
TAIL_LANE = -1
"""The lane in the header of a batch that was merged from leftovers."""
POOL_LANE = -2
"""The lane in the header of a batch whose rows were mixed in a pool."""


def aligned(nbytes: int) -> int:
    """Round `nbytes` up to a multiple of 64."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """Where a leaf lies in a slot: its byte offset in the first batch, and its dtype, whole shape and bytes per
    batch."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of a slot with room for `batches` batches, `nbytes` bytes in all (a multiple of 64)."""

    places: tuple[LeafPlace, ...]
    batches: int
    nbytes: int

    def headers(self, slot: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return a slot's headers as an array [batches, 8] over its bytes."""
        return slot[: self.batches * HEADER].view(np.int64).reshape(self.batches, -1)

    def leaves(self, slot: npt.NDArray[np.uint8]) -> list[npt.NDArray[Any]]:
        """Return an array [batches, ...] for each leaf, over the bytes of a slot."""
        return [
            slot[p.offset : p.offset + self.batches * p.nbytes].view(p.dtype).reshape(self.batches, *p.shape)
            for p in self.places
        ]

    def regions(self, first: int, batches: int, stride: int = 1) -> list[tuple[int, int]]:
        """Return where the bytes of a slab lie in its slot, as (start, stop) pairs in order. Each batch lies `stride`
        places after the one before."""
        if batches == self.batches:
            return [(0, self.nbytes)]
        if stride > 1:
            offsets = [(0, HEADER), *((p.offset, p.nbytes) for p in self.places if p.nbytes)]
            places = range(first, first + batches * stride, stride)
            return [(at + place * each, at + (place + 1) * each) for at, each in offsets for place in places]
        found = [(HEADER * first, HEADER * (first + batches))]
        for p in self.places:
            if p.nbytes:
                found.append((p.offset + first * p.nbytes, p.offset + (first + batches) * p.nbytes))
        return found

    def copy(
        self,
        source: npt.NDArray[np.uint8],
        target: npt.NDArray[np.uint8],
        first: int,
        batches: int,
        stride: int = 1,
    ) -> None:
        """Copy the bytes of a slab from a slot to the first places of another."""
        stop = first + batches * stride
        np.copyto(self.headers(target)[:batches], self.headers(source)[first:stop:stride])
        for into, of in zip(self.leaves(target), self.leaves(source), strict=True):
            np.copyto(into[:batches], of[first:stop:stride])

    def nbytes_of(self, batches: int) -> int:
        """Return the bytes of a slab of `batches` batches: the sum of its regions."""
        if batches == self.batches:
            return self.nbytes
        return batches * (HEADER + sum(p.nbytes for p in self.places))


def is_possible(layout: SlotLayout) -> bool:
    """Return whether a slot can be that large."""
    each = MAX_SLOT // max(1, layout.batches)
    arrays = (math.prod(dim or 1 for dim in place.shape) * place.dtype.itemsize for place in layout.places)
    return layout.nbytes <= MAX_SLOT and all(nbytes <= each for nbytes in arrays)


def lay_out(dtypes: Sequence[str], shapes: Sequence[Sequence[int]], batches: int = 1) -> SlotLayout:
    """Lay out a slot for batches whose leaves have these dtypes and whole shapes."""
    places = []
    offset = batches * HEADER
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = numpy_dtype(name)
        nbytes = math.prod(shape) * dtype.itemsize
        places.append(LeafPlace(offset, dtype, tuple(shape), nbytes))
        offset += aligned(batches * nbytes)
    return SlotLayout(tuple(places), batches, offset)


def is_fixed(spec: Spec, batch_size: int | None) -> bool:
    """Return whether all batches of the feed have the same size, except for the last of an epoch."""
    return batch_size is not None and all(leaf.sized for leaf in leaf_list(spec))


def fixed_layout(spec: Spec, batch_size: int, room: int) -> SlotLayout:
    """Lay out the slots of a fixed feed, with room for `room` batches. `spec` describes one sample."""
    sample = leaf_list(spec)
    return lay_out([leaf.dtype for leaf in sample], [(batch_size, *_static(leaf)) for leaf in sample], room)


def _static(leaf: Leaf) -> tuple[int, ...]:
    if None in leaf.shape:
        raise ValueError(f"{leaf} is not static")
    return tuple(dim for dim in leaf.shape if dim is not None)


def batch_spec(spec: Spec, batch_size: int | None, drop_remainder: bool) -> Spec:
    """Return the spec of a batch: `spec` with a batch dimension in front, or, for ready batches, `spec` itself.

    The batch dimension is `batch_size` with `drop_remainder`, otherwise None, since the last batch may be smaller.
    """
    if batch_size is None:
        return spec
    rows = batch_size if drop_remainder else None
    return map_leaves(lambda leaf: Leaf(leaf.dtype, (rows, *leaf.shape)), spec)
