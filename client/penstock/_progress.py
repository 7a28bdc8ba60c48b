"""Where a reader stands: the position behind any batch that it was handed, added up from the messages that came.

Plain state, no I/O: _consumer_state.py calls it. What is done for each slab is to append one tuple; positions are
made when somebody asks. A count of *consumed* batches says which: it runs from the stream's very beginning, over all
epochs and over earlier runs. Handed slabs are remembered, since a training loop behind a prefetch asks for less than
was handed; a position within a slab is the one before it, with the rest as `skip`. What was asked for is the oldest
that can be asked for again. Many slabs that nobody asks for are thinned out: two become one, with a longer `skip`.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from penstock_proto.messages import End, FeedInfo, LaneEnded, Passed, Slab
from penstock_proto.position import MAX_SKIP, Position
from penstock_proto.standing import Standing

KEEP = 4096
"""Most steps that are remembered."""
SPAN = MAX_SKIP
"""Most batches of one step that was thinned out, and so of `skip` because of that."""

Before = tuple[LaneEnded | Passed, ...]
"""What came between a slab and the one before it."""


@dataclass(frozen=True, slots=True)
class _Thinned:
    """Consecutive slabs of one epoch between which nothing came: how many batches and rows, the last slab of each
    lane."""

    batches: int
    rows: int
    slabs: dict[int, Slab]


@dataclass(frozen=True, slots=True)
class _Next:
    """An epoch of which nothing was read. `ended`: the one before was read to its end."""

    epoch: int
    ended: bool


_Step = tuple[int, "Slab | _Thinned | _Next", Before]
"""How many batches were consumed behind it; a slab, or some, or an epoch's start; what came before the slab."""


class Progress:
    """What a stream hands over, and the positions behind it.

    Attributes:
        consumed: batches that were handed over, since the stream's very beginning.
    """

    def __init__(self, info: FeedInfo, position: Position | None = None, consumed: int = 0) -> None:
        """Begin at `position` (None: at the start of epoch 0), behind `consumed` batches."""
        self.info = info
        self.consumed = consumed
        self._oldest = consumed
        self._at = consumed
        self._place = Standing(position or Position(info, 0))
        self._steps: collections.deque[_Step] = collections.deque()
        self._digests: dict[int, bytes] = {}

    def ended(self, epoch: int) -> None:
        """An epoch was read to its end."""
        self._steps.append((self.consumed, _Next(epoch + 1, ended=True), ()))

    def begin(self, epoch: int, unread: int = 0) -> None:
        """An epoch begins: the one before was read or left, its last `unread` batches not consumed."""
        if unread and self._steps:
            _, what, before = self._steps.pop()
            self.consumed -= unread
            self._steps.append((self.consumed, what, before))
        self._steps.append((self.consumed, _Next(epoch, ended=False), ()))

    def listed(self, epoch: int, digest: bytes) -> None:
        """The splits of the epoch have this digest."""
        self._digests[epoch] = digest
        for old in [old for old in self._digests if old < self._place.epoch]:
            del self._digests[old]

    def handed(self, slab: Slab, before: Before) -> None:
        """A slab was handed over; `before` came between the slab before it and this one."""
        self.consumed += slab.batches
        self._steps.append((self.consumed, slab, before))
        if len(self._steps) > KEEP:
            self._thin()

    def position(self, consumed: int) -> Position:
        """The position behind `consumed` batches. Nothing older can be asked for from then on.

        Behind the last batch of an epoch it is the epoch's end, and not the next one's start, also when that has begun:
        of ranks behind the same batch some may not have heard yet that it was the last.

        Raises:
            ValueError: more than were handed over, or less than the oldest that is remembered.
        """
        if consumed > self.consumed:
            raise ValueError(
                f"consumed={consumed}, but only {self.consumed} batches were handed over: count the batches that the "
                "training loop consumed since the stream's very beginning, with those of earlier runs"
            )
        if consumed < self._oldest:
            raise ValueError(
                f"consumed={consumed}, but the oldest state that is kept is behind {self._oldest} batches: counts of "
                "one connection only go up, and go on from the count that its loaded state holds (its `consumed`)"
            )
        while self._steps and _is_behind(self._steps[0], consumed):
            self._forget()
        self._oldest = consumed
        if consumed > self._at:  # within the first slab of an epoch the place has not moved yet
            self._place.digest = self._digests.get(self._place.epoch, self._place.digest)
        if consumed == self._at:
            return self._place.position(self.info)
        return self._place.position(self.info, consumed - self._at, _slabs(self._steps[0][1]).values())

    def ends_epoch(self, consumed: int) -> bool:
        """Whether an epoch was read to its end behind so many batches. For counts whose position can be asked for."""
        return any(count == consumed and isinstance(what, _Next) and what.ended for count, what, _ in self._steps)

    def newest(self) -> Position:
        """The position behind all that was handed over."""
        place = self._place.copy()
        for step in self._steps:
            self._move(place, step)
        return place.position(self.info)

    def _forget(self) -> None:
        step = self._steps.popleft()
        self._move(self._place, step)
        self._oldest = self._at = step[0]

    def _move(self, place: Standing, step: _Step) -> None:
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
        self._steps.extendleft(reversed(thin))
        while len(self._steps) > KEEP - KEEP // 8:
            self._forget()


def _is_behind(step: _Step, consumed: int) -> bool:
    """Whether the position behind so many batches is not before that step."""
    count, what, _ = step
    return count < consumed or (count == consumed and not (isinstance(what, _Next) and what.ended))


def _moved(place: Standing, what: Slab | _Thinned, before: Before) -> None:
    """Move behind the slab (or slabs), and behind what came before it."""
    for message in before:
        if isinstance(message, Passed):
            place.skip -= min(place.skip, message.batches)
            place.read(message)
        else:
            place.end(message)
    if isinstance(what, Slab):
        if not what.repeat:
            place.read(what)
        return
    place.batches += what.batches
    place.rows += what.rows
    for slab in what.slabs.values():
        place.stand(slab)


def _joined(first: _Step, second: _Step) -> _Step | None:
    """Two steps as one, or None where that cannot be or would be too long. What came before a slab stays apart: whoever
    goes on within a step must find the same batches there."""
    (_, a, before), (consumed, b, between) = first, second
    if isinstance(a, _Next) or isinstance(b, _Next) or before or between or a.batches + b.batches > SPAN:
        return None
    return consumed, _Thinned(a.batches + b.batches, a.rows + b.rows, _slabs(a) | _slabs(b)), ()


def _slabs(what: Slab | _Thinned | _Next) -> dict[int, Slab]:
    """The last slab of each lane."""
    if isinstance(what, Slab):
        return {what.lane: what}
    return what.slabs if isinstance(what, _Thinned) else {}


class EpochCheck:
    """What of one epoch has come, for the check at its End.

    Attributes:
        batches: of the whole epoch, with what came before the position from which the session began.
        rows: likewise.
        slabs: of this session.
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

    def came(self, some: Slab | Passed) -> None:
        """Batches came, or were passed over."""
        self.slabs += isinstance(some, Slab)
        if isinstance(some, Slab) and some.repeat:
            return
        self.batches += some.batches
        self.rows += some.rows
        if some.lane >= 0 and some.record:
            self._read[some.lane] = self._read.get(some.lane, 0) + some.batches

    def ended(self, lane: LaneEnded) -> None:
        """A lane ended."""
        self._ended[lane.lane] = lane.index

    def fault(self, end: End) -> str | None:
        """In what the epoch that came is not the one that `end` closes, or None."""
        if (self.slabs, self.batches, self.rows) != (end.slabs, end.batches, end.rows):
            return (
                f"came as {self.slabs} slabs, {self.batches} batches and {self.rows} rows, but the daemon counted "
                f"{end.slabs}, {end.batches} and {end.rows}"
            )
        for lane, read in self._read.items():
            if lane not in self._ended:
                return f"is over, but its lane {lane}, of which {read} batches came, has not ended"
        for lane, index in self._ended.items():
            if self._read.get(lane, 0) != index:
                return f"had {self._read.get(lane, 0)} batches of lane {lane}, but that lane ended with {index}"
        return None
