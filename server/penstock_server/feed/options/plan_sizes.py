"""Sizes that follow from a feed's plan: of a slot, a shuffle block and an epoch in segments, and the number of open
splits.

The coordinator and the workers use the same figures. This file must not know a feed's source.
"""

from __future__ import annotations

from penstock_proto.batches.layout import SlotLayout, fixed_layout, is_fixed
from penstock_proto.messages import MAX_POOLED, FeedPlan
from penstock_proto.spec import Spec

ENDLESS = 2**62
"""The number of segments of an endless feed: more than any stream reads."""

SHUFFLED_TURN = 4
"""Most batches in a turn of a feed that shuffles its splits, and whose lanes do not mix their rows. During a turn, all
batches come from one lane, and so from the same few splits. A shorter turn costs more if batches are small: with
TensorFlow, a slab takes 0.6 ms of a core."""

_POOL = 256 << 20
"""Most bytes of the slots of a pool. So if slots are large, fewer lanes mix their rows."""

_TURN = 4 << 20
"""About how many bytes a turn has."""

_STRIPE = 16 << 20
"""About how many bytes a stripe has. A visit to a lane gets only its share of that, and each visit costs the worker and
the daemon 0.2 ms."""

_MOST = 256
_MOST_STRIPED = 1024
"""Most batches in a turn, and in a stripe."""

TURNS = 64
"""Fewest turns in an epoch of an indexable feed, if it has enough batches. Workers share the epoch turn by turn."""

FEWEST_OPEN, _MOST_OPEN = 4, 16
_RUN = 64
"""Samples of each open split that a block should have."""


def segment_count(plan: FeedPlan) -> int:
    """Return the number of segments in an epoch, or ENDLESS."""
    assert plan.segment is not None
    return ENDLESS if plan.samples is None else -(-plan.samples // plan.segment)


def fixed_slots(plan: FeedPlan, spec: Spec, batch_size: int) -> SlotLayout:
    """Return the layout of the slots of a feed with fixed batches; a slot holds one turn or one stripe.

    Long turns cost less per batch, but workers can share fewer of them, and without pools they mix the lanes less. So
    turns are shorter if the feed is indexable and its epoch is short, or if it shuffles its splits. In the latter case
    a turn is at most a shuffle block, because a pool needs a turn of each of its lanes.
    """
    one = fixed_layout(spec, batch_size, plan.turn or 1)
    if plan.turn is not None:
        return one
    if _may_have_stripes(plan):
        batches = min(_MOST_STRIPED, (_STRIPE + one.nbytes // 2) // one.nbytes)
        return fixed_layout(spec, batch_size, batches if one.nbytes * 2 <= _TURN else 1)
    about, most = _TURN, _MOST
    if plan.length is not None:
        most = min(most, max(1, plan.length // (batch_size * TURNS)))
    elif plan.shuffle:
        block = block_samples(plan.shuffle, plan.lanes, batch_size) // batch_size
        about, most = 2 << 20, min(most, block) if _has_pools(plan) else SHUFFLED_TURN
    return fixed_layout(spec, batch_size, max(1, min(most, (about + one.nbytes // 2) // one.nbytes)))


def sample_slots(sample_spec: Spec, batch_size: int, slot: SlotLayout | None) -> SlotLayout:
    """Return the layout of batches whose rows have the fixed `sample_spec`, before the feed's `batch_transform`, in
    such slots: as many batches as those have after it."""
    return fixed_layout(sample_spec, batch_size, 1 if slot is None else slot.batches)


def turn_of(plan: FeedPlan, slot: SlotLayout) -> int:
    """Return the most batches of a lane in a row, for a feed with such slots."""
    return 1 if plan.turn is None and _may_have_stripes(plan) else slot.batches


def _may_have_stripes(plan: FeedPlan) -> bool:
    """Whether lanes take turns after each batch, and small batches share slots. Then the stream is as even as it can
    be, however slow the generators are."""
    return plan.order == "exact" and plan.length is None and not plan.shuffle


def _has_pools(plan: FeedPlan) -> bool:
    return plan.shuffle > 0 and plan.order == "exact" and plan.length is None and plan.lanes > 1


def pooled_lanes(plan: FeedPlan, spec: Spec, sample_spec: Spec | None = None) -> int:
    """Return how many lanes mix their rows with each other, or 1 if none do. `sample_spec`: that of a sample before the
    feed's `batch_transform`, if it has one.

    Lanes do so if the feed shuffles its splits, its order is exact, and its batches have a fixed size.
    """
    rows = plan.batch_size
    if rows is None or not _has_pools(plan) or not is_fixed(spec, rows) or not is_fixed(sample_spec or spec, rows):
        return 1
    slot = fixed_slots(plan, spec, rows)
    nbytes = max(slot.nbytes, sample_slots(sample_spec or spec, rows, slot).nbytes)
    return max(1, min(plan.lanes, MAX_POOLED, (_POOL + nbytes // 2) // nbytes))


def blocks_fill_slots(plan: FeedPlan, spec: Spec, lanes: int, sample_spec: Spec | None = None) -> bool:
    """Return whether a visit of a pool is one whole shuffle block. Pools put their rows into a random order, so such a
    block needs no order of its own, and is filled directly in its slot.

    `lanes` counts the lanes that have any splits. `sample_spec`: as in `pooled_lanes`.
    """
    rows = plan.batch_size
    if rows is None or pooled_lanes(plan, spec, sample_spec) == 1:
        return False
    return fixed_slots(plan, spec, rows).batches * rows == block_samples(plan.shuffle, lanes, rows)


def block_samples(shuffle: int, lanes: int, batch_size: int | None) -> int:
    """Return the number of samples in a lane's shuffle block: `shuffle / lanes`, rounded up to whole batches; 0 without
    shuffling.

    `lanes` counts the lanes that have any splits. With `batch_size` None, the unit is ready batches.
    """
    rows = batch_size or 1
    return -(-shuffle // (lanes * rows)) * rows


def open_splits(shuffle: int, lanes: int, batch_size: int | None) -> int:
    """Return how many splits a lane that shuffles reads at once by default: one for each 64 samples of its block, 4 to
    16 in total.

    More splits mix better. But each is open in a worker, and is read again from its start after a fault.
    """
    return max(FEWEST_OPEN, min(_MOST_OPEN, block_samples(shuffle, lanes, batch_size) // _RUN))
