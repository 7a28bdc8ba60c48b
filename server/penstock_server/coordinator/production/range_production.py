"""Production of the ranges of an indexable feed. Any worker can make any range. Each worker counts as a lane here."""

from __future__ import annotations

from functools import cached_property

from penstock_proto import PenstockError
from penstock_proto.messages import Made

from ..model import failures
from ..model.stripe import Stripe
from ..model.turn import COMPLETE, IDLE, Turn
from ..model.workers import REMOTE
from ..order.epoch import Epoch
from ..order.lane import Lane
from .production import Production
from .range_length import MOST_MS, RangeLength

_QUEUED = 2
"""Most ranges that a worker has at a time, if their lengths vary: one that it makes, and the next one."""


class RangeProduction(Production):
    """Makes ranges of an index. `Epoch.lanes` has the turns that each worker makes, by the worker's number.

    If the lengths of ranges vary, a slot holds as many ranges as fit into it, whichever workers make them. So slow
    samples, whose ranges are short, do not need more memory than others. But batches that may stay at their hosts have
    slots of their own.
    """

    _next_worker = 0
    """The place of the worker that may get the next range; see `Workers.pick`."""

    @cached_property
    def _length(self) -> RangeLength:
        return RangeLength(self.feed.turn)

    @property
    def has_place(self) -> bool:
        """See Production."""
        return self.turns.room_left > 0 and self._shares_slots

    @property
    def _shares_slots(self) -> bool:
        return self.feed.ranges_vary and not (self._may_stay and self._workers.available[-1] >= REMOTE)

    def begin(self, epoch: Epoch, visit: Turn | Stripe) -> None:
        """See Production. If there is a slot already, have the range filled."""
        assert isinstance(visit, Turn)
        if not self._shares_slots:
            self.turns.begin(epoch, visit)
        elif self.turns.begin_range(epoch, visit, self.feed.turn):
            visit.become(IDLE)
            self._fill(epoch, visit.key)

    def next_visit(self, epoch: Epoch, most: int) -> Turn | None:
        """See Production."""
        if self.feed.ranges_vary:
            return self._next_range(epoch)
        assert epoch.order is not None
        turn = epoch.order.visit()
        if turn is not None:
            turn.key = self._placing.pick(turn.index // self.feed.turn)
        return turn

    def _next_range(self, epoch: Epoch) -> Turn | None:
        """Return the next range, for the next worker that has too few; None if all have enough."""
        assert epoch.order is not None
        if len(self.turns.by_ticket) >= _QUEUED * max(1, len(self._workers.makers)):
            return None
        for _ in self._workers.prompt_ones:
            worker = self._pick()
            if self._load(worker) < _QUEUED:
                room = self.turns.room_left if self.has_place else self.feed.turn
                turn = epoch.order.visit_range(min(self._length.batches, room))
                turn.key = worker
                return turn
        return None

    def _pick(self) -> int:
        """Return one worker after another."""
        self._next_worker += 1
        return self._workers.pick(self._next_worker - 1)

    def _cut(self, epoch: Epoch, turn: Turn) -> bool:
        """See Production. All workers get ranges of the rest, in the stream's order: its batches are needed first."""
        if not turn.shares or turn.made == turn.base or epoch.order is None:
            return False
        rest = epoch.order.cut(turn, self._length.batches)
        self.turns.complete(epoch, turn, COMPLETE)
        for one in rest:
            one.key = self._pick()
            self.turns.begin_rest(epoch, one, turn)
        for key in dict.fromkeys(one.key for one in rest):
            self._fill(epoch, key)
        return True

    @property
    def _most_ms(self) -> int:
        return MOST_MS if self.feed.ranges_vary else 0

    def _load(self, worker: int) -> int:
        """Return how many ranges the worker has."""
        return sum(len(lane.turns) for epoch in self._epochs if (lane := epoch.lanes.get(worker)) is not None)

    def _on_batches(self, turn: Turn, made: Made) -> None:
        if self.feed.ranges_vary:
            self._length.on_made(turn.made - turn.base, made.work_ms, last=made.last)

    def _on_lane_ended(self, epoch: Epoch, lane: Lane) -> None:
        """Do nothing: a range may end at the end of the index, but that does not end the worker's work."""

    def _worker_for(self, epoch: Epoch, key: int) -> int:
        return key if key in self._workers.prompt_ones else self._workers.pick(key)

    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        if not epoch.moved or lane.run is None:
            return
        if lane.run[0] in self._workers.leaving and not lane.busy:
            self._drop(epoch, lane)

    def _move(self, epoch: Epoch, lane: Lane) -> None:
        """Do nothing: the run only finishes its turns."""

    def _reassign(self, epoch: Epoch, *keys: int) -> None:
        moved: list[Turn] = []
        failed: list[tuple[Turn, PenstockError]] = []
        for lane in map(epoch.lane, keys):  # empty all of them before one gets another's turns
            error = lane.take_error()
            if error is not None:  # it concerns the turn that was being made
                failed.append((lane.turns[0], error))
            moved.extend(lane.turns)
            lane.turns.clear()
        for turn in moved:
            turn.key = self._placing.pick(turn.index // turn.batches)
            epoch.lane(turn.key).turns.append(turn)
        for turn, error in failed:
            self.turns.fail(epoch, turn, error)
            self.turns.complete(epoch, turn, COMPLETE)
        for key in sorted({turn.key for turn in moved}):
            self._fill(epoch, key)

    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """See Production. Each turn goes to another worker on its own, so the count is how often this turn ended its
        worker."""
        plan, (_, split, name) = self.feed.plan, blamed
        turn = next((turn.index for turn in lane.turns if turn.fillers), None)
        if turn is None:  # it had reported the turn that it worked on
            return
        epoch.deaths[turn] += 1
        if epoch.deaths[turn] >= plan.attempts and plan.on_error != "retry":
            lane.fail(failures.deadly(plan, epoch.number, split, epoch.deaths[turn], how, worker, name))
