"""A lane of a mix: the order of its samples, and how to go on from a restart record.

Unlike those of other lanes, its samples come from several components. See `mixed_splits.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from penstock_proto import GeneratorError, ProtocolError
from penstock_proto.messages import FeedPlan

from ...feed.options.plan_sizes import block_samples
from ..batch.collate import Collate
from .lane import LaneRun
from .lane_splits import LaneSplits, Split
from .mixed_splits import Draws, MixedSplits
from .restart_record import MAX_SKIPPED


@dataclass(frozen=True)
class Component:
    """A component of a mix.

    Attributes:
        plan: its options, with the mix's ordering options.
        weight: how often it is drawn.
        n_splits: the length of its list of splits.
        open_split: starts to read a split; called with its number in the mixed lane and its index in the list.
        on_skip: as in `LaneRun`, with the split's number in the mixed lane.
    """

    plan: FeedPlan
    weight: float
    n_splits: int
    open_split: Callable[[int, int], Split]
    on_skip: Callable[[int, int, int, GeneratorError | None], None] = lambda *_: None


class MixedLane(LaneRun):
    """One lane of one epoch of a mix, read from its start or from a record.

    Args:
        plan: the mix's options.
        components: the components of the mix.
        stop_first: whether the lane ends when a drawn component has no more samples.
        epoch, lane, collate, record, ahead, skip, in_slots: as in `LaneRun`.

    Raises:
        ProtocolError: `record`, `ahead` or `skip` is not of this lane.
    """

    def __init__(
        self,
        plan: FeedPlan,
        components: Sequence[Component],
        *,
        stop_first: bool,
        epoch: int,
        lane: int,
        collate: Collate,
        record: bytes = b"",
        ahead: bytes = b"",
        skip: Iterable[int] = (),
        in_slots: bool = False,
    ) -> None:
        lanes, skip = live_lanes(plan, [component.n_splits for component in components]), tuple(skip)
        if lane >= lanes:
            raise ProtocolError(f"lane {lane} of a mix that has {lanes}")
        block_rows = block_samples(plan.shuffle, lanes, plan.batch_size) or plan.batch_size or 1
        seats = min(plan.interleave, block_rows) if plan.shuffle else 1
        parts = [
            _splits_of(component, k, len(components), lanes, epoch, lane, seats, collate, skip)
            for k, component in enumerate(components)
        ]
        draws = Draws([component.weight for component in components], plan.seed, epoch, lane)
        splits = MixedSplits(parts, draws, seats=seats, stop_first=stop_first)
        self._begin(plan, epoch, lane, collate, splits, block_rows, record, ahead, in_slots=in_slots)


def live_lanes(plan: FeedPlan, counts: Iterable[int]) -> int:
    """Return the number of lanes of a mix whose components have `counts` splits: each lane needs a split of each
    component."""
    return min(plan.lanes, *counts)


def _splits_of(
    component: Component,
    k: int,
    count: int,
    lanes: int,
    epoch: int,
    lane: int,
    seats: int,
    collate: Collate,
    skip: Iterable[int],
) -> LaneSplits:
    """Return the splits of component `k` (of `count`) in lane `lane` (of `lanes`)."""

    def open_split(number: int, index: int) -> Split:
        return component.open_split(number * count + k, index)

    def on_skip(number: int, index: int, samples: int, error: GeneratorError | None) -> None:
        component.on_skip(number * count + k, index, samples, error)

    return LaneSplits(
        msgspec.structs.replace(component.plan, lanes=lanes),
        epoch=epoch,
        lane=lane,
        n_splits=component.n_splits,
        seats=seats,
        collate=collate,
        open_split=open_split,
        on_skip=on_skip,
        to_skip=[number // count for number in skip if number % count == k],
        most_skipped=max(1, MAX_SKIPPED // count),
    )
