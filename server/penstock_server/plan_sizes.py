"""Sizes that follow from a feed's plan: of a slot, of a shuffle block, of an epoch in segments.

The coordinator and the workers use the same figures. This file must not know a feed's source.
"""

from __future__ import annotations

from penstock_proto.layout import SlotLayout, fixed_layout
from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Spec

ENDLESS = 2**62
"""The number of segments of an endless feed: more than are ever read."""


def segment_count(plan: FeedPlan) -> int:
    """Return the number of segments in an epoch: ENDLESS if there is no last one."""
    assert plan.segment is not None
    return ENDLESS if plan.samples is None else -(-plan.samples // plan.segment)


def fixed_slots(plan: FeedPlan, spec: Spec, batch_size: int) -> SlotLayout:
    """Return the layout of the slots of a feed with fixed batches; a slot holds one turn.

    Long turns cost less per batch, but mix the lanes less. So turns are shorter if the feed shuffles.
    """
    one = fixed_layout(spec, batch_size, plan.turn or 1)
    if plan.turn is not None:
        return one
    about = (2 if plan.shuffle and plan.length is None else 4) << 20
    return fixed_layout(spec, batch_size, max(1, min(256, (about + one.nbytes // 2) // one.nbytes)))


def block_samples(shuffle: int, lanes: int, batch_size: int | None) -> int:
    """Return the number of samples in a lane's shuffle block: `shuffle / lanes`, rounded up to whole batches; 0 without
    shuffling.

    `lanes` counts the lanes that have any splits. With `batch_size` None, the unit is ready batches.
    """
    rows = batch_size or 1
    return -(-shuffle // (lanes * rows)) * rows
