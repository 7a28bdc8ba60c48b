"""The progress of a consumer: the position after any batch that was handed over, computed from the messages that came.

Plain state without I/O; consumer_state.py calls it. For each slab it only appends a tuple; positions are made when
somebody asks for one. A count of *consumed* batches selects the position. It starts at the very beginning of the stream
and covers all epochs and all earlier runs.

Slabs that were handed over are remembered, because a training loop that reads through a prefetch asks for an earlier
position. A position within a slab is the position before the slab, and a `skip`. Once a position was asked for, older
ones are forgotten. If nobody asks for a long time, slabs are joined: two become one step, with a longer `skip`.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from penstock_proto.batches.cursor import Cursor, counts_of
from penstock_proto.batches.layout import POOL_LANE
from penstock_proto.batches.position import MAX_SKIP, Position
from penstock_proto.messages import End, FeedInfo, LaneEnded, PoolBegun, SentElsewhere, Slab

from .epoch_bounds import nbytes_of

KEEP = 4096
"""Most steps to remember."""
KEEP_BYTES = 64 << 20
"""Most bytes of the messages in them."""
SPAN = MAX_SKIP
"""Most batches in one step of several slabs, which bounds `skip`."""

Before = tuple[LaneEnded | PoolBegun | SentElsewhere, ...]
"""The messages that came between a slab and the one before it."""


@dataclass(frozen=True, slots=True)
class _Thinned:
    """Consecutive slabs of one epoch, with nothing between them: their batches and rows, and the last slab of each
    lane."""

    batches: int
    rows: int
    slabs: dict[int, Slab]


@dataclass(frozen=True, slots=True)
class _Next:
    """The start of an epoch. `ended`: the epoch before was read to its end."""

    epoch: int
    ended: bool


_Step = tuple[int, "Slab | _Thinned | _Next", Before]
"""The number of batches consumed up to its end; its slab, its joined slabs, or an epoch's start; and the messages
before the slab."""


class Progress:
    """The progress of one stream.

    It counts the batches that this consumer gets. Its positions count those of the other ranks, too.

    Attributes:
        consumed: batches that were handed over since the very beginning of the stream.
        oldest: the fewest consumed batches for which `position` can still return a position.
    """

    def __init__(self, info: FeedInfo, position: Position | None = None, consumed: int = 0) -> None:
        """Begin at `position` (None: at the start of epoch 0), after `consumed` batches."""
        self.info = info
        self.consumed = consumed
        self.oldest = consumed
        self._at = consumed
        self._place = Cursor(position or Position(info, 0))
        self._steps: collections.deque[_Step] = collections.deque()
        self._nbytes = 0
        self._digests: dict[int, bytes] = {}

    def on_epoch_ended(self, epoch: int) -> None:
        """Note that an epoch was read to its end."""
        self._steps.append((self.consumed, _Next(epoch + 1, ended=True), ()))

    def begin(self, epoch: int, unread: int = 0) -> None:
        """Begin an epoch. The one before was read or left, and its last `unread` batches were not consumed."""
        if unread and self._steps:
            _, what, before = self._steps.pop()
            self.consumed -= unread
            self._steps.append((self.consumed, what, before))
        self._steps.append((self.consumed, _Next(epoch, ended=False), ()))

    def on_listed(self, epoch: int, digest: bytes) -> None:
        """Note the digest of the epoch's splits."""
        self._digests[epoch] = digest
        for old in [old for old in self._digests if old < self._place.epoch]:
            del self._digests[old]

    def on_handed(self, slab: Slab, before: Before) -> None:
        """Note that a slab was handed over; the messages `before` came between it and the slab before."""
        self.consumed += slab.batches
        step = (self.consumed, slab, before)
        self._steps.append(step)
        self._nbytes += _nbytes(step)
        if len(self._steps) > KEEP:
            self._thin()
        while self._nbytes > KEEP_BYTES:
            self._forget()

    def position(self, consumed: int) -> Position:
        """Return the position after `consumed` batches. From then on no older position can be asked for.

        After the last batch of an epoch this is the end of that epoch, not the start of the next one, even if the next
        one has begun: other ranks at the same position may not know yet that this batch was the last.

        Raises:
            ValueError: `consumed` is more than was handed over, or less than the oldest count that is remembered.
        """
        if consumed > self.consumed:
            raise ValueError(
                f"consumed={consumed}, but only {self.consumed} batches were handed over: give the number of batches "
                "that the training loop has consumed since the very beginning of the stream, including earlier runs"
            )
        if consumed < self.oldest:
            raise ValueError(
                f"consumed={consumed}, but the oldest state that is kept is after {self.oldest} batches: the count of "
                "a connection must not decrease, and continues from `consumed` in the state that was loaded"
            )
        while self._steps and _is_behind(self._steps[0], consumed):
            self._forget()
        self.oldest = consumed
        if consumed > self._at:  # within the first slab of an epoch the place has not moved yet
            self._place.digest = self._digests.get(self._place.epoch, self._place.digest)
        if consumed == self._at:
            return self._place.position(self.info)
        _, what, before = self._steps[0]
        place = self._place
        if before:  # the position must include the ends of lanes that come before the slab, and the pool's records
            place = place.copy()
            _passed(place, before)
        stride = what.stride if isinstance(what, Slab) else 1
        return place.position(self.info, (consumed - self._at) * stride, _slabs(what).values())

    def ends_epoch(self, consumed: int) -> bool:
        """Return whether an epoch was read to its end after `consumed` batches, a count that `position` accepts."""
        return any(count == consumed and isinstance(what, _Next) and what.ended for count, what, _ in self._steps)

    def newest(self) -> Position:
        """Return the position after all batches that were handed over."""
        place = self._place.copy()
        for step in self._steps:
            self._move(place, step)
        return place.position(self.info)

    def _forget(self) -> None:
        step = self._steps.popleft()
        self._nbytes -= _nbytes(step)
        self._move(self._place, step)
        self.oldest = self._at = step[0]

    def _move(self, place: Cursor, step: _Step) -> None:
        _, what, before = step
        if isinstance(what, _Next):
            place.begin(what.epoch)
        else:
            place.digest = self._digests.get(place.epoch, place.digest)
            _moved(place, what, before)

    def _thin(self) -> None:
        old = [self._steps.popleft() for _ in range(KEEP // 2)]
        thin: list[_Step] = []
        for step in old:
            joined = _joined(thin[-1], step) if thin else None
            if joined is None:
                thin.append(step)
            else:
                thin[-1] = joined
        self._nbytes -= sum(map(_nbytes, old)) - sum(map(_nbytes, thin))
        self._steps.extendleft(reversed(thin))
        while len(self._steps) > KEEP - KEEP // 8:
            self._forget()


def _is_behind(step: _Step, consumed: int) -> bool:
    """Return whether the position after `consumed` batches includes this step."""
    count, what, _ = step
    return count < consumed or (count == consumed and not (isinstance(what, _Next) and what.ended))


def _passed(place: Cursor, before: Before) -> None:
    """Move `place` past the messages that came before a slab."""
    for message in before:
        if isinstance(message, SentElsewhere):
            if not place.pools:
                place.skip -= min(place.skip, message.batches)
            place.read(message)
        elif isinstance(message, PoolBegun):
            place.begin_pool(message)
        else:
            place.end(message)


def _moved(place: Cursor, what: Slab | _Thinned, before: Before) -> None:
    """Move `place` past the messages that came before a slab (or slabs), and past the slab."""
    _passed(place, before)
    if isinstance(what, Slab):
        if not what.repeat:
            place.read(what)
        return
    if POOL_LANE in what.slabs:
        place.read_pooled(what.batches)
        return
    place.batches += what.batches
    place.rows += what.rows
    for slab in what.slabs.values():
        place.stand(slab)


def _joined(first: _Step, second: _Step) -> _Step | None:
    """Join two steps, or return None if that is impossible or would be too long.

    A step does not join one before it if messages came between them. So a stream that resumes within a step finds the
    same batches there. Nor do slabs of stripes, since which lanes they move depends on where they begin, or slabs with
    batches of several rounds.
    """
    (_, a, before), (consumed, b, between) = first, second
    if isinstance(a, _Next) or isinstance(b, _Next) or before or between or a.batches + b.batches > SPAN:
        return None
    if any(slab.lanes or slab.stride > 1 for slab in (*_slabs(a).values(), *_slabs(b).values())):
        return None
    if (POOL_LANE in _slabs(a)) != (POOL_LANE in _slabs(b)):
        return None
    return consumed, _Thinned(a.batches + b.batches, a.rows + b.rows, _slabs(a) | _slabs(b)), ()


def _nbytes(step: _Step) -> int:
    """Return how many bytes the messages of a step take, roughly."""
    _, what, before = step
    if isinstance(what, Slab) and not before:
        return nbytes_of(what)
    return sum(map(nbytes_of, _slabs(what).values())) + sum(map(nbytes_of, before))


def _slabs(what: Slab | _Thinned | _Next) -> dict[int, Slab]:
    """Return the last slab of each lane."""
    if isinstance(what, Slab):
        return {what.lane: what}
    return what.slabs if isinstance(what, _Thinned) else {}


class EpochCheck:
    """Counts what arrived of one epoch, to check it against the epoch's End.

    Attributes:
        batches: the batches of the whole epoch, including those before the position at which the session began.
        rows: likewise.
        slabs: the slabs of this session.
    """

    def __init__(self, position: Position | None = None) -> None:
        """Begin at `position`, or at the epoch's start."""
        self.slabs = 0
        self.batches = position.batches if position else 0
        self.rows = position.rows if position else 0
        self._read: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        if position:
            self._ended = {lane.lane: lane.index for lane in position.ended}
            self._read = {place.lane: place.index for place in position.places} | self._ended

    def on_batches(self, some: Slab | SentElsewhere) -> None:
        """Count batches that arrived, or that other consumers got."""
        self.slabs += isinstance(some, Slab)
        if isinstance(some, Slab) and some.repeat:
            return
        self.batches += some.batches * some.stride
        self.rows += some.rows * some.stride
        if some.lanes or (some.lane >= 0 and some.record):
            for lane, count in counts_of(some).items():
                self._read[lane] = self._read.get(lane, 0) + count

    def on_lane_ended(self, lane: LaneEnded) -> None:
        """Note the end of a lane."""
        self._ended[lane.lane] = lane.index

    def on_pool(self, pool: PoolBegun) -> None:
        """Note how far a pool takes its lanes."""
        for lane in pool.lanes:
            self._read[lane.lane] = lane.index
            if lane.number >= 0:
                self._ended[lane.lane] = lane.index

    def fault(self, end: End) -> str | None:
        """Return how the epoch that arrived differs from the one that `end` describes, or None."""
        if (self.slabs, self.batches, self.rows) != (end.slabs, end.batches, end.rows):
            return (
                f"arrived as {self.slabs} slabs, {self.batches} batches and {self.rows} rows, but the daemon counted "
                f"{end.slabs}, {end.batches} and {end.rows}"
            )
        for lane, read in self._read.items():
            if lane not in self._ended:
                return f"is over, but its lane {lane}, with {read} batches so far, has not ended"
        for lane, index in self._ended.items():
            if self._read.get(lane, 0) != index:
                return f"had {self._read.get(lane, 0)} batches of lane {lane}, but that lane ended with {index}"
        return None
