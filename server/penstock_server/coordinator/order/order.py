"""The order of one epoch: which turn follows which, and where merged leftovers belong.

An epoch visits its live lanes in turn and takes up to `turn` batches at each visit. A lane ends at the first visit that
finds fewer than that. Its leftover rows (fewer than a batch) join one accumulator, in the order in which lanes end *in
the stream*. As soon as the accumulator holds the rows of a batch, a merged batch follows right after the visit that
completed it. Rows that are left at the end become the epoch's last, smaller batch. So the order depends on the lanes'
lengths alone. It does not matter which worker makes the batches, or when they are ready.

Visits are planned before it is known where lanes end. A visit to a lane that turns out to have ended before is empty
and changes nothing. Leftovers are counted strictly in stream order, up to the first visit that is not complete.

This file knows nothing of slots, credit, workers and sockets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection

from penstock_proto.batches.layout import TAIL_LANE
from penstock_proto.batches.position import Position

from ..model.stripe import Stripe
from ..model.turn import Leftover, Part, Turn
from .visits import LaneVisits, RangeVisits


class EpochOrder(ABC):
    """The turns of one epoch in stream order: those in the window (made or being made), and those to come.

    Its subclasses `ExactOrder` and `FastOrder` decide which turn is delivered next.

    Args:
        visits: where new turns come from.
        batch_size: rows in a full batch; None if the feed yields whole batches, so that nothing is left over.
        drop_remainder: leave out the last, smaller batch.
        position: where the order begins; None at the start of the epoch.

    Attributes:
        window: the turns that were visited or merged, and have not left the order.
        more: whether a new visit can be made.
        ungranted: the merged batches and the turns of pools in the window that have no slot yet.
        dropped_rows: how many leftover rows of the epoch are dropped.
    """

    window: Collection[Turn]

    def __init__(
        self,
        visits: LaneVisits | RangeVisits,
        *,
        batch_size: int | None,
        drop_remainder: bool,
        position: Position | None = None,
    ) -> None:
        self._visits = visits
        self._batch_size = batch_size
        self._drop_remainder = drop_remainder
        self._ended: set[int] = set()
        self._accumulator: deque[Leftover] = deque()
        self._accumulated = 0
        self._merged = 0
        self._flushed = False
        self.more = not visits.exhausted
        self.ungranted: deque[Turn] = deque()
        self.dropped_rows = 0
        if position is not None:
            self._restore(position)
        self._flush()

    @property
    def finished(self) -> bool:
        """Whether every turn of the epoch has left the order."""
        return self._flushed and not self.window

    def visit(self, lane_set: int = 0) -> Turn | None:
        """Add the next visit of the set to the end of the window, and return it; None if its lanes have ended."""
        turn = self._visits.next(lane_set)
        self.more = not self._visits.exhausted
        if turn is not None:
            self._add(turn)
        return turn

    def visit_range(self, most: int) -> Turn:
        """Add the next range of an indexable feed, of at most `most` batches, to the end of the window. There must be
        more batches."""
        assert isinstance(self._visits, RangeVisits)
        turn = self._visits.range(most)
        self.more = not self._visits.exhausted
        self._add(turn)
        return turn

    def cut(self, turn: Turn, most: int) -> list[Turn]:
        """Let a range end after those of its batches that are made. Return the ranges of at most `most` batches that
        take the place of the rest."""
        first, stop, turn.batches = turn.index + turn.made, turn.index + turn.batches, turn.made
        rest = [Turn(turn.lane, index, min(most, stop - index)) for index in range(first, stop, most)]
        self._add_after(turn, rest)
        return rest

    @abstractmethod
    def on_ready(self, turn: Turn) -> None:
        """Note that something of `turn` can be delivered: a part, or its error."""

    @abstractmethod
    def next(self, most: int = 0) -> Turn | Stripe | None:
        """Return the next turn, if a part of it, its error or its end can be delivered; else None.

        If stripes are delivered, it may be a stripe. It then has one part, of at most `most` batches if that is not 0.
        """

    @property
    @abstractmethod
    def head(self) -> Turn | None:
        """The first turn in the order; None if the window is empty. In fast order, any turn in the window."""

    def on_delivered(self, turn: Turn | Stripe, part: Part) -> None:  # noqa: B027
        """Note that `part`, the first of `turn`, was delivered or passed over."""

    @property
    @abstractmethod
    def awaited(self) -> Turn | None:
        """The visit or merged batch that has to be made before anything else can be delivered; None if it may be any of
        several, or the window is empty."""

    @abstractmethod
    def on_completed(self, turn: Turn) -> None:
        """Note that `turn` is complete: `ended` and `leftover` are set. Add the merged batches that follow it."""

    @abstractmethod
    def take(self, turn: Turn) -> None:
        """Take `turn` out of the window. `next` has returned it, and it is complete."""

    @abstractmethod
    def drop(self) -> list[Turn]:
        """Take all turns out of the window."""

    @abstractmethod
    def _add(self, turn: Turn) -> None:
        """Add the visit to the window."""

    def _add_after(self, turn: Turn, rest: list[Turn]) -> None:
        """Add visits to the window; in exact order right after `turn`, which is not complete."""
        for one in rest:
            self._add(one)

    @abstractmethod
    def _all_counted(self) -> bool:
        """Whether the leftovers of all turns in the window are counted."""

    @abstractmethod
    def _insert(self, turn: Turn, position: int | None) -> None:
        """Put a merged batch into the window: in exact order at `position`, or at the end if that is None."""

    def _on_lane_ended(self, turn: Turn) -> None:
        """Note that the visit has ended its lane, which is not visited again."""
        self._visits.on_lane_ended(turn.lane)
        self.more = not self._visits.exhausted

    def _resolve(self, turn: Turn, position: int | None = None) -> int:
        """Count the leftover rows of the complete turn, and put the merged batches that follow into the window, from
        `position` on. Return the number of these batches."""
        if not turn.ended or turn.lane in self._ended or turn.error is not None:
            return 0
        turn.number = len(self._ended)
        self._ended.add(turn.lane)
        if not turn.leftover or self._batch_size is None:
            return 0
        self._accumulate(Leftover(turn.lane, 0, turn.leftover))
        count = 0
        while self._accumulated >= self._batch_size:
            self._merge(self._batch_size, None if position is None else position + count)
            count += 1
        return count

    def _accumulate(self, leftover: Leftover) -> None:
        self._accumulator.append(leftover)
        self._accumulated += leftover.count

    def _restore(self, position: Position) -> None:
        """Go on with the leftovers of lanes that ended before `position`, except those that are merged already."""
        self._ended = {lane.lane for lane in position.ended}
        self._merged = position.merged
        if self._batch_size is None:
            return
        merged = position.merged * self._batch_size
        for lane in position.ended:
            gone = min(merged, lane.leftover)
            merged -= gone
            if gone < lane.leftover:
                self._accumulate(Leftover(lane.lane, gone, lane.leftover - gone))
        while self._accumulated >= self._batch_size:
            self._merge(self._batch_size)

    def _flush(self) -> None:
        """At the end of the epoch, make the last batch of the rows that are left over."""
        if self._flushed or self.more or not self._all_counted():
            return
        self._flushed = True
        if self._accumulated and self._drop_remainder:
            self.dropped_rows = self._accumulated
        elif self._accumulated:
            self._merge(self._accumulated)

    def _merge(self, rows: int, position: int | None = None) -> None:
        """Make a merged batch of the first `rows` leftover rows."""
        leftovers = []
        missing = rows
        while missing:
            first = self._accumulator.popleft()
            count = min(first.count, missing)
            leftovers.append(Leftover(first.lane, first.start, count))
            if count < first.count:
                self._accumulator.appendleft(Leftover(first.lane, first.start + count, first.count - count))
            missing -= count
        self._accumulated -= rows
        turn = Turn(TAIL_LANE, self._merged, 1, leftovers=tuple(leftovers))
        self._merged += 1
        self._insert(turn, position)
        self.ungranted.append(turn)


class ExactOrder(EpochOrder):
    """Turns are delivered in the order of the visits, and leftovers are counted in that order.

    A visit that enters the window gets the number that its first batch will have in the epoch, if all visits before it
    are full. If one turns out shorter, visits that enter later get the right numbers. Those in between keep theirs.
    """

    window: list[Turn]

    def __init__(
        self,
        visits: LaneVisits | RangeVisits,
        *,
        batch_size: int | None,
        drop_remainder: bool,
        position: Position | None = None,
    ) -> None:
        self.window = []
        self._resolved = 0
        self._entered = position.batches if position is not None else 0
        """The number of the first batch after the window, as far as it is known."""
        super().__init__(visits, batch_size=batch_size, drop_remainder=drop_remainder, position=position)

    def on_ready(self, turn: Turn) -> None:
        """See EpochOrder. The turn has its place already."""

    def next(self, most: int = 0) -> Turn | None:
        """See EpochOrder."""
        turn = self.window[0] if self.window else None
        return turn if turn is not None and turn.shows else None

    @property
    def head(self) -> Turn | None:
        """See EpochOrder."""
        return self.window[0] if self.window else None

    @property
    def awaited(self) -> Turn | None:
        """See EpochOrder."""
        return self.head

    def on_completed(self, turn: Turn) -> None:
        """See EpochOrder."""
        if turn.ended:
            self._on_lane_ended(turn)
        if not turn.merged:
            self._entered -= turn.batches - turn.made
        window = self.window
        while self._resolved < len(window) and window[self._resolved].complete:
            after = self._resolved + 1
            self._resolved = after + self._resolve(window[self._resolved], after)
        if not self.more:
            self._flush()

    def take(self, turn: Turn) -> None:
        """See EpochOrder."""
        assert turn is self.window[0]
        del self.window[0]
        if self._resolved:
            self._resolved -= 1
        if not self.more:
            self._flush()

    def drop(self) -> list[Turn]:
        """See EpochOrder."""
        dropped, self.window = self.window, []
        return dropped

    def _add(self, turn: Turn) -> None:
        turn.foreseen = self._entered
        self._entered += turn.batches
        self.window.append(turn)

    def _add_after(self, turn: Turn, rest: list[Turn]) -> None:
        after = self.window.index(turn) + 1
        self.window[after:after] = rest

    def _all_counted(self) -> bool:
        return self._resolved == len(self.window)

    def _insert(self, turn: Turn, position: int | None) -> None:
        self._entered += turn.batches
        self.window.insert(len(self.window) if position is None else position, turn)


class FastOrder(EpochOrder):
    """Turns are delivered as they are ready, and leftovers are counted in the order in which lanes happen to end.

    Merged batches keep their order here too, so that a position can count them. Each comes after the ends of its lanes,
    so that a position after it knows those lanes.
    """

    window: dict[Turn, None]

    def __init__(
        self,
        visits: LaneVisits | RangeVisits,
        *,
        batch_size: int | None,
        drop_remainder: bool,
        position: Position | None = None,
    ) -> None:
        self.window = {}
        self._open = 0
        """How many visits in the window are not complete."""
        self._ready: deque[Turn] = deque()
        self._merges: deque[Turn] = deque()
        """The merged batches in the window."""
        super().__init__(visits, batch_size=batch_size, drop_remainder=drop_remainder, position=position)

    def on_ready(self, turn: Turn) -> None:
        """See EpochOrder."""
        if not turn.queued and (turn.lane != TAIL_LANE or turn is self._merges[0]):
            turn.queued = True
            self._ready.append(turn)

    def next(self, most: int = 0) -> Turn | None:
        """See EpochOrder."""
        while self._ready:
            turn = self._ready[0]
            if turn.shows:
                return turn
            self._ready.popleft().queued = False
        return None

    @property
    def head(self) -> Turn | None:
        """See EpochOrder."""
        return next(iter(self.window), None)

    @property
    def awaited(self) -> Turn | None:
        """See EpochOrder. Any turn may be next."""
        return None

    def on_completed(self, turn: Turn) -> None:
        """See EpochOrder."""
        if turn.lane != TAIL_LANE:
            self._open -= 1
        if turn.ended:
            self._on_lane_ended(turn)
        self.on_ready(turn)
        self._resolve(turn)
        self._flush()

    def take(self, turn: Turn) -> None:
        """See EpochOrder."""
        assert turn is self._ready[0]
        self._ready.popleft()
        del self.window[turn]
        if turn.lane == TAIL_LANE:
            self._merges.popleft()
            if self._merges and self._merges[0].shows:
                self.on_ready(self._merges[0])
        self._flush()

    def drop(self) -> list[Turn]:
        """See EpochOrder."""
        dropped = list(self.window)
        for queue in (self.window, self._ready, self._merges):
            queue.clear()
        return dropped

    def _add(self, turn: Turn) -> None:
        self.window[turn] = None
        self._open += 1

    def _all_counted(self) -> bool:
        return not self._open

    def _insert(self, turn: Turn, position: int | None) -> None:
        self.window[turn] = None
        self._merges.append(turn)
