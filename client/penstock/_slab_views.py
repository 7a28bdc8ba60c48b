"""Slabs as batches: arrays over their memory, by one layout if the feed is fixed, else by the shapes of each slab.

This module knows no connection and no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto.layout import SlotLayout, batch_spec, fixed_layout, is_fixed, lay_out
from penstock_proto.messages import FeedInfo, Slab
from penstock_proto.spec import leaf_list, unflatten


class SlabViews:
    """Views the slabs of one feed as batches.

    Attributes:
        spec: the spec of a batch.
        fixed: the layout of every slot, or None if batches differ in shape.
    """

    def __init__(self, info: FeedInfo) -> None:
        """Raises SpecError if the feed has a dtype of a package that is not installed."""
        self.spec = batch_spec(info.spec, info.batch_size, info.drop_remainder)
        self.fixed: SlotLayout | None = None
        if info.batch_size is not None and is_fixed(info.spec, info.batch_size):
            self.fixed = fixed_layout(info.spec, info.batch_size, info.turn)
        self._leaves = leaf_list(self.spec)
        self._full = info.batch_size

    def layout(self, slab: Slab) -> SlotLayout:
        """Return the layout of the slot that holds `slab`.

        Raises:
            ProtocolError: the sizes of the slab do not match the feed's spec.
        """
        if self.fixed is not None:
            layout, good = self.fixed, not slab.shapes
            most = slab.batches * (self._full or 0)
            good = good and (slab.rows == most or (slab.batches == 1 and 0 < slab.rows < most))
        else:
            good = len(slab.shapes) == len(self._leaves)
            good = good and all(
                len(shape) == len(leaf.shape)
                and all(want is None or want == dim for want, dim in zip(leaf.shape, shape, strict=True))
                for leaf, shape in zip(self._leaves, slab.shapes, strict=True)
            )
            layout = lay_out([leaf.dtype for leaf in self._leaves], slab.shapes) if good else SlotLayout((), 0, 0)
        good = good and slab.first + slab.batches <= layout.batches
        if not good or slab.nbytes != layout.nbytes_of(slab.batches):
            raise ProtocolError(f"{slab} does not match the batches of the feed, {self.spec}")
        return layout

    def batches(self, slab: Slab, layout: SlotLayout, slot: npt.NDArray[np.uint8]) -> Iterator[Any]:
        """Yield the batches of a slab in the feed's structure: arrays over its `slot`, trimmed to their rows."""
        leaves = layout.leaves(slot)
        for place in range(slab.first, slab.first + slab.batches):
            batch = [leaf[place] for leaf in leaves]
            if self.fixed is not None:
                batch = [leaf[: slab.rows // slab.batches] for leaf in batch]
            yield unflatten(self.spec, batch)
