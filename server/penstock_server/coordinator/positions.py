"""Checks whether a position is possible in a feed: its lanes, its counts, its list of splits."""

from __future__ import annotations

from penstock_proto import StateMismatch
from penstock_proto.messages import FeedInfo, FeedPlan
from penstock_proto.position import Position

from .feeds import SplitsInfo

_DAMAGED = "the position was not made by this feed, or is damaged"


def check_counts(position: Position, info: FeedInfo) -> None:
    """Refuse a position that no stream of this feed can have, whatever its splits are.

    Raises:
        StateMismatch: names the number that does not fit.
    """
    lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
    highest = max(lanes, default=-1)
    batches = position.batches + position.skip
    if highest >= info.lanes:
        why = f"lane {highest}, and the feed has {info.lanes}"
    elif info.batches is not None and batches > info.batches:
        why = f"{batches} batches, and an epoch of the feed has {info.batches}"
    else:
        return
    raise StateMismatch(f"{_DAMAGED} ({why})", feed=info.name)


def check(position: Position, plan: FeedPlan, splits: SplitsInfo) -> None:
    """Refuse a position that is impossible with this list of splits.

    Raises:
        StateMismatch: says what does not fit.
    """
    name = plan.name
    if position.digest and position.digest != splits.digest:
        raise StateMismatch(
            f"the list of splits of epoch {position.epoch} is another one now: its SHA-256 was "
            f"{position.digest.hex()[:16]} and is {splits.digest.hex()[:16]}, of {splits.count} splits. The stream can "
            "only go on with the same splits in the same order: bring them back, or begin again from the start",
            feed=name,
        )
    lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
    count = 0 if plan.length is not None else min(plan.lanes, splits.count)
    fits = len(set(lanes)) == len(lanes) and max(lanes, default=0) < max(count, 1)
    if plan.length is not None:
        fits = not lanes and position.batches + position.skip <= -(-plan.length // (plan.batch_size or 1))
    elif plan.batch_size is not None:
        fits = fits and all(lane.leftover < plan.batch_size for lane in position.ended)
    if not fits:
        raise StateMismatch(_DAMAGED, feed=name)
