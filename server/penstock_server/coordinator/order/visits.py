"""Visits: which lane, or which range of an indexable feed, is next in an epoch, as far as the lanes' ends are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from penstock_proto.batches.position import Position

from ..model.turn import Turn


class LaneVisits:
    """The visits to the lanes of an epoch, in stream order, as far as the lanes' ends are known.

    Lane i belongs to set i mod `sets`, and each set of lanes has its own order. Exact order has one set, fast order one
    for each worker. With a position, the visits go on from there: first a turn that was begun is completed, and then
    the lanes with the fewest visits come.

    Attributes:
        exhausted: whether every lane is known to have ended.
    """

    def __init__(self, lanes: int, turn: int, sets: int = 1, position: Position | None = None, pool: int = 1) -> None:
        self._turn = turn
        self._pool = pool
        self._next = [0] * lanes
        live = set(range(lanes))
        if position is not None:
            live -= {lane.lane for lane in position.ended}
            for place in position.places:
                self._next[place.lane] = place.index
        self._live = [deque(lane for lane in range(number, lanes, sets) if lane in live) for number in range(sets)]
        for visited in self._live:
            visited.rotate(-self._first(visited))
        if pool > 1:
            self._live = [deque(sorted(live, key=lambda lane: (self.pool_of(lane, self._next[lane]), lane)))]
        self._ended = {*range(lanes)} - live
        self._lanes = lanes
        self.exhausted = len(self._ended) == lanes

    def next(self, lane_set: int = 0) -> Turn | None:
        """Return the next visit to a lane of the set; None if all its lanes have ended."""
        live = self._live[lane_set]
        while live:
            lane = live.popleft()
            if lane not in self._ended:
                live.append(lane)
                index = self._next[lane]
                batches = self._turn - index % self._turn
                self._next[lane] = index + batches
                return Turn(lane, index, batches, lane)
        return None

    def stripe(self, batches: int) -> list[Turn]:
        """Return the visits that make the next `batches` batches, by the place of the first; none if all lanes have
        ended. A turn has one batch."""
        live = self._live[0]
        for _ in range(len(live)):
            lane = live.popleft()
            if lane not in self._ended:
                live.append(lane)
        step = min(batches, len(live))
        visits = []
        for place in range(step):
            lane, index, count = live[place], self._next[live[place]], -(-(batches - place) // step)
            self._next[lane] = index + count
            visits.append(Turn(lane, index, count, lane, place=place, step=step, striped=True))
        live.rotate(-(batches % len(live)) if live else 0)
        return visits

    @property
    def parts(self) -> int:
        """The number of parts of the lanes. The lanes of a part mix their rows."""
        return -(-self._lanes // self._pool)

    def pool_of(self, lane: int, index: int) -> tuple[int, int]:
        """Return the pool of that visit to `lane` that has batch `index` of the lane: the number of the visit, and the
        part of the lanes that mix their rows with each other."""
        return index // self._turn, lane // self._pool

    def upcoming(self) -> tuple[int, int] | None:
        """Return the pool of the next visit; None if every lane is known to have ended."""
        live = self._live[0]
        while live and live[0] in self._ended:
            live.popleft()
        return self.pool_of(live[0], self._next[live[0]]) if live else None

    def on_lane_ended(self, lane: int) -> None:
        """Note that the lane has ended: it is not visited again."""
        self._ended.add(lane)
        self.exhausted = len(self._ended) == self._lanes

    def _first(self, live: Collection[int]) -> int:
        """Return the index in `live` of the lane that is visited next."""
        for position, lane in enumerate(live):
            if self._next[lane] % self._turn:
                return position
        fewest = min((self._next[lane] for lane in live), default=0)
        return next((position for position, lane in enumerate(live) if self._next[lane] == fewest), 0)


class RangeVisits:
    """The turns of an indexable feed: ranges of its batches. They all belong to lane 0, whichever worker makes them."""

    def __init__(self, batches: int, turn: int, begin: int = 0) -> None:
        self._batches = batches
        self._turn = turn
        self._made = begin

    @property
    def exhausted(self) -> bool:
        """Whether every batch has been given out."""
        return self._made >= self._batches

    def next(self, lane_set: int = 0) -> Turn | None:
        """Return the next range, for any set: every worker can make it."""
        return self.range(self._turn - self._made % self._turn)

    def range(self, most: int) -> Turn:
        """Return the next range, of at most `most` batches."""
        first = self._made
        count = min(most, self._batches - first)
        self._made += count
        return Turn(0, first, count)

    def on_lane_ended(self, lane: int) -> None:
        """Do nothing: ranges do not end early."""
