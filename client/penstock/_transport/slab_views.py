"""Views slabs as batches: arrays over the slabs' memory.

If the feed is fixed, all slabs have the same layout. Otherwise the shapes of each slab define its layout. This module
knows no connection and no TensorFlow.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto.batches.columns import TEXT, Column, Columns
from penstock_proto.batches.layout import SlotLayout, batch_spec, fixed_layout, is_fixed, is_possible, lay_out
from penstock_proto.messages import FeedInfo, Slab
from penstock_proto.spec import unflatten

from .ragged import Ragged


class SlabViews:
    """Views the slabs of one feed as batches.

    Attributes:
        spec: the spec of a batch.
        columns: how each leaf is stored.
        has_offsets: whether leaves are text or ragged, so that slabs have offsets.
        fixed: the layout of every slot, or None if batches differ in shape.
    """

    def __init__(self, info: FeedInfo) -> None:
        """View the slabs of the feed `info`.

        Raises:
            SpecError: the feed has a dtype of a package that is not installed.
            ProtocolError: its slots would be larger than any memory.
        """
        self.spec = batch_spec(info.spec, info.batch_size, info.drop_remainder)
        self.fixed: SlotLayout | None = None
        if info.batch_size is not None and is_fixed(info.spec, info.batch_size):
            self.fixed = fixed_layout(info.spec, info.batch_size, info.room)
            if not is_possible(self.fixed):
                raise ProtocolError(f"the daemon serves batches of {self.spec}, which are larger than any memory")
        self.columns = Columns(info.spec, info.batch_size).columns
        self._arrays = Columns(info.spec, info.batch_size).arrays
        self._full = info.batch_size
        self.has_offsets = any(column.has_offsets for column in self.columns)
        known = 1 if info.batch_size is None else 0  # from this dimension on
        if any(column.kind is TEXT and None in column.leaf.shape[known:] for column in self.columns):
            raise ProtocolError(f"the daemon serves text of an unknown shape, {self.spec}")

    def layout(self, slab: Slab) -> SlotLayout:
        """Return the layout of the slot that holds `slab`.

        Raises:
            ProtocolError: the sizes of the slab do not match the feed's spec.
        """
        if self.fixed is not None:
            layout, good = self.fixed, not slab.shapes
            most = slab.batches * (self._full or 0)
            good = good and (slab.rows == most or (slab.batches == 1 and 0 < slab.rows < most))
            good = good and len(slab.lanes) <= slab.batches * slab.stride
        else:
            good = (
                len(slab.lanes) <= 1
                and slab.stride == 1
                and len(slab.shapes) == len(self._arrays)
                and all(
                    len(shape) == len(array.shape)
                    and all(want is None or want == dim for want, dim in zip(array.shape, shape, strict=True))
                    for array, shape in zip(self._arrays, slab.shapes, strict=True)
                )
            )
            good = good and (self._full is None or self._have_rows(slab))
            layout = lay_out([array.dtype for array in self._arrays], slab.shapes) if good else SlotLayout((), 0, 0)
            good = good and is_possible(layout)
        good = good and slab.first + (slab.batches - 1) * slab.stride < layout.batches
        if not good or slab.nbytes != layout.nbytes_of(slab.batches):
            raise ProtocolError(f"{slab} does not match the batches of the feed, {self.spec}")
        return layout

    def check_offsets(self, layout: SlotLayout, slot: npt.NDArray[np.uint8]) -> None:
        """Check the offsets in a slab of a feed that is not fixed: TensorFlow trusts them.

        Raises:
            ProtocolError: they lie outside the values, or the number of strings does not fit the feed.
        """
        rest = iter(leaf[0] for leaf in layout.leaves(slot))
        for column in self.columns:
            values, *offsets = itertools.islice(rest, column.arrays)
            if not offsets:
                continue
            items, good = len(values), True
            ends = [offsets.pop(0)] if column.text else []
            for array in (*ends, *reversed(offsets)):  # the innermost first
                good = good and _divides(array, items)
                items = len(array) - 1
            if column.kind is TEXT and self._full is None:
                good = good and _holds(column.leaf.shape, items)
            if not good:
                raise ProtocolError(
                    f"the daemon sent offsets that do not fit the {len(values)} values of {column.leaf}"
                )

    def batches(self, slab: Slab, layout: SlotLayout, slot: npt.NDArray[np.uint8]) -> Iterator[Any]:
        """Yield the batches of a slab in the feed's structure: arrays over its `slot`, trimmed to their rows."""
        leaves = layout.leaves(slot)
        for place in range(slab.first, slab.first + slab.batches):
            batch = [leaf[place] for leaf in leaves]
            if self.fixed is not None:
                batch = [leaf[: slab.rows // slab.batches] for leaf in batch]
            yield unflatten(self.spec, list(self.leaves_of(batch)))

    def leaves_of(self, arrays: Sequence[npt.NDArray[Any]]) -> Iterator[Any]:
        """Yield the leaves of a batch that is stored in these arrays."""
        rest = iter(arrays)
        for column in self.columns:
            value: Any = next(rest)
            if column.text:
                value = strings(value, next(rest), column, self._full is None)
            if column.ragged:
                for row_splits in reversed([next(rest) for _ in range(column.ragged)]):  # the innermost first
                    value = Ragged(value, row_splits)
            yield value

    def _have_rows(self, slab: Slab) -> bool:
        """Return whether the arrays of a slab have as many rows as the slab says."""
        shapes = iter(slab.shapes)
        for column in self.columns:
            values, *offsets = itertools.islice(shapes, column.arrays)
            if column.ragged:
                good = offsets[int(column.text)][0] == slab.rows + 1
            elif column.text:
                good = offsets[0][0] == slab.rows * column.strings + 1
            else:
                good = values[0] == slab.rows
            if not good:
                return False
        return 0 < slab.rows <= (self._full or 0)


def _divides(offsets: npt.NDArray[np.int64], items: int) -> bool:
    """Return whether these offsets begin at 0, never decrease, and end at the number of items."""
    good = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == items
    return bool(good and (offsets[1:] >= offsets[:-1]).all())


def _holds(shape: tuple[int | None, ...], strings: int) -> bool:
    """Return whether a text leaf of a whole batch, of which only the first dimension may vary, can have so many."""
    known = math.prod(dim for dim in shape if dim is not None)
    if None not in shape:
        return strings == known
    return strings % known == 0 if known else strings == 0


def strings(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64], column: Column, ready: bool) -> Any:
    """Return the strings of a text leaf as an array of `bytes` objects, made from the arrays that store the leaf.

    In a `ready` batch, which the generator made as a whole, the leaf's own first dimension counts the rows. Of ragged
    text, the array has all strings, one after another.
    """
    text, ends = data.tobytes(), offsets.tolist()
    found = np.empty(len(ends) - 1, object)
    for at in range(len(found)):
        found[at] = text[ends[at] : ends[at + 1]]
    shape = column.leaf.shape[column.ragged :]
    if ready:
        return found.reshape([-1 if dim is None else dim for dim in shape])
    return found.reshape([-1, *shape]) if len(found) or 0 not in shape else found.reshape([0, *shape])
