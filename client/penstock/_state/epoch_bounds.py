"""Bounds what the daemon may say about one epoch, so that the client's memory is bounded whatever the daemon sends.

Credit bounds the slabs (credit.py). The messages between two slabs wait until the second one is handed over, and the
position keeps the latest record of each lane. progress.py checks whether the epoch is complete.
"""

from __future__ import annotations

import collections

from penstock_proto import ProtocolError
from penstock_proto.batches.layout import POOL_LANE
from penstock_proto.batches.position import Position
from penstock_proto.messages import FeedInfo, LaneEnded, PoolBegun, SentElsewhere, Slab

MAX_BETWEEN = 64 << 20
"""Most bytes of messages between two slabs, and of the pools that have begun and were not read to their ends."""
MAX_RECORDS = 64 << 20
"""Most bytes of restart records: the latest record of each lane. A position that can be sent has an eighth of that."""
_OBJECT = 256
"""Bytes that a message takes here besides its records, rounded up."""


def nbytes_of(message: Slab | LaneEnded | PoolBegun | SentElsewhere) -> int:
    """Return how many bytes a message takes here, roughly."""
    if isinstance(message, LaneEnded):
        return _OBJECT + len(message.record)
    if not isinstance(message, PoolBegun):
        places = sum(_OBJECT + len(place.record) for place in message.places)
        return _OBJECT + len(message.record) + 8 * len(message.lanes) + places
    return _OBJECT + sum(_OBJECT + len(lane.record) for lane in message.lanes)


class EpochBounds:
    """The bounds of one epoch, as it comes over one connection.

    Args:
        info: the feed.
        place: the position at which the session begins in this epoch; None: the epoch's start.
        ranks: how many ranks read the stream; 1 without ranks.
        shares: whether it is a group's stream. A group gets only slabs.
    """

    def __init__(self, info: FeedInfo, place: Position | None = None, *, ranks: int = 1, shares: bool = False) -> None:
        self._info = info
        self._ranks = ranks
        self._shares = shares
        self._passes = place.skip if place else 0
        """Batches that may still come as SentElsewhere because they lie within the position's skip."""
        self._others = ranks - 1
        """Batches that the other ranks may still get before this one gets one."""
        self._ended: set[int] = set()
        """Lanes whose end came. (That of a lane in the position's `ended` may come again, once.)"""
        self._records: dict[int, int] = {}
        self._nbytes = 0
        self._between = 0
        self._pools: collections.deque[tuple[int, int]] = collections.deque()
        """The batches that are still to come of each pool that has begun, and the bytes of its messages."""
        self._pooled = 0
        self._pool = (-1, 0)
        """The number of the latest pool, and how many of its lanes are known; 0: all."""
        if place:
            for standing in place.places:
                self._keep(standing.lane, standing.record)
            for ended in place.ended:
                self._keep(ended.lane, ended.record)

    def on_slab(self, slab: Slab) -> None:
        """Note a slab. Raises ProtocolError, as `on_message`."""
        if slab.stride > 1 and (slab.stride != self._ranks or self._others < self._ranks - 1):
            raise ProtocolError(
                f"the daemon sent batches of several rounds of {slab.stride} ranks within a round, or to one of "
                f"{self._ranks} ranks"
            )
        self._read(slab)
        self._others = self._ranks - 1
        self._between = 0

    def on_message(self, message: LaneEnded | PoolBegun | SentElsewhere) -> None:
        """Note another message.

        Raises:
            ProtocolError: the daemon must not send it, or has sent too much; says what.
        """
        if self._shares:
            raise ProtocolError(f"the daemon sent {type(message).__name__}, which is not for a group's stream")
        self._between += nbytes_of(message)
        if self._between > MAX_BETWEEN:
            raise ProtocolError(f"the daemon sent more than {MAX_BETWEEN} bytes of messages between two slabs")
        if isinstance(message, LaneEnded):
            self._end(message.lane, message.number)
            self._keep(message.lane, message.record)
        elif isinstance(message, PoolBegun):
            self._begin_pool(message)
        else:
            more = message.batches - self._passes
            self._passes = max(0, -more)
            self._others -= max(0, more)
            if self._others < 0:
                raise ProtocolError(
                    f"the daemon sent {message.batches} batches of lane {message.lane} elsewhere, which are neither "
                    "within the position's skip nor another rank's"
                )
            self._read(message)

    def _read(self, some: Slab | SentElsewhere) -> None:
        for lane in some.lanes:
            self._keep(lane, b"")
        for place in some.places:
            self._keep(place.lane, place.record)
        if some.lane >= 0:
            self._keep(some.lane, some.record)
        elif isinstance(some, Slab) and some.repeat:  # its batch was read in its own place
            return
        elif some.lane == POOL_LANE and not self._shares:
            number, known = self._pool
            if known:
                raise ProtocolError(f"the daemon sent a batch before the other lanes of pool {number}")
            left = some.batches * some.stride
            while left and self._pools:
                batches, nbytes = self._pools.popleft()
                part = min(left, batches)
                left -= part
                self._pools.appendleft((batches - part, nbytes))
                self._drop_read_pools()
            if left:
                raise ProtocolError(f"the daemon sent {some.batches} batches of a pool, which has fewer")

    def _begin_pool(self, pool: PoolBegun) -> None:
        last, known = self._pool
        continues = bool(known) and pool.number == last
        if not continues and (pool.number <= last or known):
            raise ProtocolError(f"the daemon began pool {pool.number} after pool {last}")
        known += len(pool.lanes)
        if known > self._info.pool or self._info.pool == 1:
            raise ProtocolError(f"the daemon began a pool of {known} lanes, but {self._info.pool} mix their rows")
        self._pool = (pool.number, known if pool.more else 0)
        for lane in pool.lanes:
            if lane.number >= 0:
                self._end(lane.lane, lane.number)
            self._keep(lane.lane, lane.record)
        nbytes = nbytes_of(pool)
        self._pooled += nbytes
        if self._pooled > MAX_BETWEEN:
            raise ProtocolError(f"the daemon began pools of more than {MAX_BETWEEN} bytes that are not read")
        if continues:
            nbytes += self._pools.pop()[1]
        self._pools.append((pool.batches, nbytes))
        if not pool.more:
            self._drop_read_pools()

    def _drop_read_pools(self) -> None:
        while self._pools and not self._pools[0][0]:
            self._pooled -= self._pools.popleft()[1]

    def _end(self, lane: int, number: int) -> None:
        if lane in self._ended or number >= self._info.lanes:
            raise ProtocolError(f"the daemon ended lane {lane} again, or as number {number} of {self._info.lanes}")
        self._ended.add(lane)

    def _keep(self, lane: int, record: bytes) -> None:
        if lane >= self._info.lanes:
            raise ProtocolError(f"the daemon sent something of lane {lane}, but the feed has {self._info.lanes} lanes")
        if not record:
            return
        self._nbytes += len(record) - self._records.get(lane, 0)
        self._records[lane] = len(record)
        if self._nbytes > MAX_RECORDS:
            raise ProtocolError(f"the daemon sent restart records of more than {MAX_RECORDS} bytes together")
