"""Checks whether a position is possible in a feed: its lanes, its counts, its list of splits."""

from __future__ import annotations

from penstock_proto import StateMismatch
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, FeedPlan

from .known_lists import SplitsInfo

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
    elif position.merged > position.batches:
        why = f"{position.merged} merged batches among {position.batches}"
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
            f"the list of splits of epoch {position.epoch} has changed: its SHA-256 was "
            f"{position.digest.hex()[:16]} and is {splits.digest.hex()[:16]}, of {splits.count} splits. The stream can "
            "only continue with the same splits in the same order: restore them, or begin again from the start",
            feed=name,
        )
    lanes = [place.lane for place in position.places] + [lane.lane for lane in position.ended]
    count = 0 if plan.length is not None else min(plan.lanes, splits.count)
    fits = len(set(lanes)) == len(lanes) and max(lanes, default=0) < max(count, 1)
    if plan.length is not None:
        fits = not lanes and position.batches + position.skip <= -(-plan.length // (plan.batch_size or 1))
    elif plan.batch_size is not None:
        fits = fits and all(lane.leftover < plan.batch_size for lane in position.ended)
    if position.feed.pool > 1:
        fits = fits and _between_pools(position, count)
    if not fits:
        raise StateMismatch(_DAMAGED, feed=name)


def _between_pools(position: Position, lanes: int) -> bool:
    """Whether all lanes that have not ended are at the border of two pools."""
    turn, pool = position.feed.turn, position.feed.pool
    ended = {lane.lane for lane in position.ended}
    index = {place.lane: place.index for place in position.places}
    visits: list[tuple[int, int]] = []
    """For each part of the lanes, in order: its number, and how many visits each of its lanes has had."""
    for lane in range(lanes):
        if lane not in ended:
            number, within = divmod(index.get(lane, 0), turn)
            if within or (visits and visits[-1][0] == lane // pool and visits[-1][1] != number):
                return False
            visits.append((lane // pool, number))
    counts = [number for _, number in visits]
    return counts == sorted(counts, reverse=True) and (not counts or counts[0] - counts[-1] < 2)
