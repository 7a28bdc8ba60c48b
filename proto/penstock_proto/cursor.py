"""The cursor moves a position forward: the one place that adds up what was read, batch by batch and lane by lane.

A client moves it by what it handed over, a daemon with a state file by what a group did. Plain state, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from .messages import FeedInfo, LaneEnded, SentElsewhere, Slab
from .position import EndedLane, Place, Position


class Cursor:
    """A position that moves. Its attributes are those of Position, with lanes by number.

    `ahead`: a later record of each lane that may have batches within `skip`.
    """

    __slots__ = ("ahead", "batches", "digest", "ended", "epoch", "merged", "places", "rows", "skip")

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

    def copy(self) -> Cursor:
        """Return another cursor at the same position."""
        other = Cursor.__new__(Cursor)
        for name in self.__slots__:
            value = getattr(self, name)
            setattr(other, name, dict(value) if isinstance(value, dict) else value)
        return other

    def begin(self, epoch: int) -> None:
        """Move to the start of an epoch, if it is a later one."""
        if epoch > self.epoch:
            self.epoch, self.batches, self.rows, self.digest, self.merged, self.skip = epoch, 0, 0, b"", 0, 0
            self.places, self.ended, self.ahead = {}, {}, {}

    def read(self, some: Slab | SentElsewhere) -> None:
        """Move behind batches that were read, or sent elsewhere."""
        self.batches += some.batches
        self.rows += some.rows
        self.stand(some)

    def stand(self, some: Slab | SentElsewhere) -> None:
        """Move their lane's place behind these batches, without counting them."""
        if some.lane < 0:
            self.merged = max(self.merged, some.index + some.batches)
        elif some.record and some.lane not in self.ended:  # an indexable feed has no records, and no lanes
            index, _ = self.places.get(some.lane, (0, b""))
            if some.index + some.batches > index:  # a rank's own batch comes behind those of its round
                self.places[some.lane] = (some.index + some.batches, some.record)
                self.ahead.pop(some.lane, None)

    def end(self, lane: LaneEnded) -> None:
        """Note that a lane ended here."""
        self.places.pop(lane.lane, None)
        self.ahead.pop(lane.lane, None)
        self.ended[lane.lane] = (lane.number, lane.index, lane.leftover, lane.record)

    def position(self, info: FeedInfo, more: int = 0, through: Iterable[Slab] = ()) -> Position:
        """Return the position here, or `more` batches further on, which belong to the slabs `through`."""
        ahead = self.ahead | {slab.lane: slab.record for slab in through if slab.record and slab.lane not in self.ended}
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
