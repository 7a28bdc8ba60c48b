"""The cursor moves a position forward. It is the only place that adds up the batches read, lane by lane.

A client moves it when it hands batches over, a daemon with a state file when a group does. Plain state, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..messages import FeedInfo, LaneEnded, PoolBegun, SentElsewhere, Slab
from .layout import POOL_LANE
from .position import EndedLane, Place, Position


class Cursor:
    """A position that moves. Its attributes are those of Position, with lanes by number.

    `ahead`: a later record of each lane that may have batches within `skip`.

    Within a pool the position is the pool's start, and batches read of the pool count as `skip`. `pools`: those that
    have begun and were not read to their ends. (Ranks may have two, as the others' batches of a round come first.)
    """

    __slots__ = ("ahead", "batches", "digest", "ended", "epoch", "merged", "places", "pools", "rows", "skip")

    def __init__(self, position: Position) -> None:
        self.epoch = position.epoch
        self.batches = position.batches
        self.rows = position.rows
        self.digest = position.digest
        self.places = {place.lane: (place.index, place.record) for place in position.places}
        self.ahead = {place.lane: place.ahead for place in position.places if place.ahead}
        self.ended = {
            lane.lane: (number, lane.index, lane.leftover, lane.record) for number, lane in enumerate(position.ended)
        }
        self.merged = position.merged
        self.skip = position.skip
        self.pools: tuple[PoolBegun, ...] = ()

    def copy(self) -> Cursor:
        """Return another cursor at the same position."""
        other = Cursor.__new__(Cursor)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, dict(value) if isinstance(value, dict) else value)
        return other

    def begin(self, epoch: int) -> None:
        """Move to the start of the epoch if it is a later one."""
        if epoch > self.epoch:
            self.epoch, self.batches, self.rows, self.digest, self.merged, self.skip = epoch, 0, 0, b"", 0, 0
            self.places, self.ended, self.ahead = {}, {}, {}
            self.pools = ()

    def read(self, some: Slab | SentElsewhere) -> None:
        """Move past batches that were read or sent elsewhere."""
        if some.lane == POOL_LANE:
            self.read_pooled(some.batches * some.stride)
            return
        self.batches += some.batches * some.stride
        self.rows += some.rows * some.stride
        self.stand(some)

    def stand(self, some: Slab | SentElsewhere) -> None:
        """Move the lane's place past these batches, without counting them."""
        if some.lanes:
            self._stand_in_stripe(some)
        elif some.lane < 0:
            self.merged = max(self.merged, some.index + some.batches)
        elif some.record and some.lane not in self.ended:  # an indexable feed has no records, and no lanes
            index, _ = self.places.get(some.lane, (0, b""))
            if some.index + some.batches > index:  # a rank's own batch comes after the others of its round
                self.places[some.lane] = (some.index + some.batches, some.record)
                self.ahead.pop(some.lane, None)

    def _stand_in_stripe(self, some: Slab | SentElsewhere) -> None:
        """Move the places of several lanes. A place keeps its record until a later one comes: a run that begins there
        passes over the batches in between. (For a rank the record may come before the last of these batches, which is
        its own of this round.)"""
        for lane, count in counts_of(some).items():
            if lane not in self.ended:
                index, record = self.places.get(lane, (0, b""))
                self.places[lane] = (index + count, record)
        for place in some.places:
            if place.lane in self.places:
                index, _ = self.places[place.lane]
                self.places[place.lane] = (index, place.record)
                self.ahead.pop(place.lane, None)

    def begin_pool(self, pool: PoolBegun) -> list[int]:
        """Note that a pool begins here. Return the lanes that have moved: those of a pool without a batch. After a lost
        connection the pool comes again, and batches read of it come as `SentElsewhere`."""
        before = tuple(other for other in self.pools if other.number < pool.number)
        begun = self.pools[len(before)] if len(before) < len(self.pools) else None
        if begun is not None and begun.more:
            pool = replace(pool, lanes=begun.lanes + pool.lanes)
        elif not before:
            self.skip = 0
        self.pools = (*before, pool)
        return self.read_pooled(0)

    def read_pooled(self, batches: int) -> list[int]:
        """Move past `batches` batches of pools. Return the lanes that have moved: those of pools that are now over."""
        self.skip += batches
        moved = []
        while self.pools and not self.pools[0].more and self.skip >= self.pools[0].batches:
            pool, *pools = self.pools
            self.pools = tuple(pools)
            self.batches += pool.batches
            self.rows += pool.rows
            self.skip -= pool.batches
            for lane in pool.lanes:
                self.ahead.pop(lane.lane, None)
                self.places.pop(lane.lane, None)
                if lane.number < 0:
                    self.places[lane.lane] = (lane.index, lane.record)
                else:
                    self.ended[lane.lane] = (lane.number, lane.index, lane.leftover, lane.record)
                moved.append(lane.lane)
        return moved

    def end(self, lane: LaneEnded) -> None:
        """Note that a lane ended here."""
        self.places.pop(lane.lane, None)
        self.ahead.pop(lane.lane, None)
        self.ended[lane.lane] = (lane.number, lane.index, lane.leftover, lane.record)

    def position(self, info: FeedInfo, more: int = 0, through: Iterable[Slab] = ()) -> Position:
        """Return the position here, or `more` batches further on. Those batches belong to the slabs `through`."""
        ahead = self.ahead | {
            lane: record for slab in through for lane, record in _records(slab) if record and lane not in self.ended
        }
        if self.skip + more:
            ahead |= {lane.lane: lane.record for pool in self.pools for lane in pool.lanes if lane.record}
        places = dict.fromkeys(ahead, (0, b"")) | self.places
        return Position(
            info,
            self.epoch,
            self.batches,
            self.rows,
            self.digest if self.batches or self.ended or self.skip or more else b"",
            tuple(Place(lane, *place, ahead.get(lane, b"")) for lane, place in sorted(places.items())),
            tuple(self._ended(info.batch_size or 0)),
            self.merged,
            self.skip + more,
        )

    def _ended(self, batch_size: int) -> list[EndedLane]:
        merged = self.merged * batch_size
        found, whole = [], True
        for expected, (lane, (number, index, leftover, record)) in enumerate(
            sorted(self.ended.items(), key=lambda item: item[1][0])
        ):
            whole = whole and number == expected and leftover <= merged
            merged -= leftover
            found.append(EndedLane(lane, index, leftover, b"" if whole else record))
        return found


def counts_of(some: Slab | SentElsewhere) -> dict[int, int]:
    """Return how many of these batches come from each lane."""
    lanes = some.lanes or (some.lane,)
    batches = some.batches * some.stride
    return {lane: (batches - place + len(lanes) - 1) // len(lanes) for place, lane in enumerate(lanes)}


def _records(slab: Slab) -> Iterable[tuple[int, bytes]]:
    return [(place.lane, place.record) for place in slab.places] if slab.lanes else [(slab.lane, slab.record)]
