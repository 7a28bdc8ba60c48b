"""How a batch lies in memory: a header, then every leaf at a multiple of 64 bytes.

`tf.data.Dataset.from_generator` takes an array without a copy only where its address is a multiple of 64, so every
offset here is one. A batch is

    0    int64 rows, int64 epoch, int64 lane, int64 index of the batch in its lane (native order), zeros to 64
    64   leaf 0: rows * row bytes, padded to a multiple of 64
    ...  leaf 1, ...

A *fixed* feed (batch size and every sample dimension known) lays every batch out as a full one, `stride` bytes, of
which the first `rows` rows of each leaf are filled; a slab is n such batches one after another. Any other feed has one
batch in a slab, laid out by the shapes that its message carries.

This file knows no segment, slot or message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .spec import Leaf, Spec, leaf_list, map_leaves, numpy_dtype

ALIGN = 64
HEADER = 64
TAIL_LANE = -1
"""The lane in the header of a batch that was merged from leftovers."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 64."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class LeafPlace:
    """Where one leaf of a batch lies: byte offset from the batch's start, dtype, whole shape, bytes."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each leaf of one batch lies, and how many bytes the batch takes (a multiple of 64)."""

    places: tuple[LeafPlace, ...]
    stride: int

    def views(self, buffer: npt.NDArray[np.uint8], start: int = 0) -> list[npt.NDArray[Any]]:
        """One array over `buffer` (uint8, one dimension) for each leaf of the batch at `start`; no copy."""
        return [
            buffer[start + p.offset : start + p.offset + p.nbytes].view(p.dtype).reshape(p.shape) for p in self.places
        ]


def lay_out(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> BatchLayout:
    """The layout of a batch whose leaves have these dtypes and whole shapes."""
    places = []
    offset = HEADER
    for name, shape in zip(dtypes, shapes, strict=True):
        dtype = numpy_dtype(name)
        nbytes = math.prod(shape) * dtype.itemsize
        places.append(LeafPlace(offset, dtype, tuple(shape), nbytes))
        offset += aligned(nbytes)
    return BatchLayout(tuple(places), offset)


def is_fixed(spec: Spec, batch_size: int | None) -> bool:
    """Whether all batches of the feed have the one layout of a full batch."""
    return batch_size is not None and all(leaf.static for leaf in leaf_list(spec))


def fixed_layout(spec: Spec, batch_size: int) -> BatchLayout:
    """The layout of a full batch of a fixed feed, of which `spec` describes one sample."""
    sample = leaf_list(spec)
    return lay_out([leaf.dtype for leaf in sample], [(batch_size, *_static(leaf)) for leaf in sample])


def _static(leaf: Leaf) -> tuple[int, ...]:
    if None in leaf.shape:
        raise ValueError(f"{leaf} is not static")
    return tuple(dim for dim in leaf.shape if dim is not None)


def batch_spec(spec: Spec, batch_size: int | None, drop_remainder: bool) -> Spec:
    """The spec of a batch: that of a sample behind the batch dimension, or, for ready batches, as it is.

    The batch dimension is `batch_size` with `drop_remainder`, otherwise None, since the last batch may be smaller.
    """
    if batch_size is None:
        return spec
    rows = batch_size if drop_remainder else None
    return map_leaves(lambda leaf: Leaf(leaf.dtype, (rows, *leaf.shape)), spec)


def default_turn(stride: int) -> int:
    """How many batches the order takes from a lane in turn: as many as make about 1 MiB, 1 to 256."""
    return max(1, min(256, (1 << 20) // stride))
