"""Production of the ranges of an indexable feed. Any worker can make any range. Each worker counts as a lane here."""

from __future__ import annotations

from penstock_proto import PenstockError

from ..model import failures
from ..model.turn import COMPLETE, Turn
from ..order.epoch import Epoch
from ..order.lane import Lane
from .production import Production


class RangeProduction(Production):
    """Makes ranges of an index. `Epoch.lanes` has the turns that each worker makes, by the worker's number."""

    def next_visit(self, epoch: Epoch, most: int) -> Turn | None:
        """See Production."""
        order, sets = epoch.order, epoch.lane_sets
        assert order is not None
        if sets is None:
            turn = order.visit()
            if turn is not None:
                turn.key = self._placing.pick(turn.index // self.feed.turn)
            return turn
        sets.grow(len(self._workers.available))
        number = sets.least(max(1, most // sets.count))
        turn = None if number is None else order.visit(number)
        if turn is not None and number is not None:
            turn.lane_set, turn.key = number, self._workers.pick(number)
        return turn

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
            turn.key = self._placing.pick(turn.index // self.feed.turn)
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
