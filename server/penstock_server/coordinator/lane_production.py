"""Production of lanes: one run at a time makes a lane, and the lane moves between workers with its restart record."""

from __future__ import annotations

from . import failures
from .epoch import Epoch
from .lane import Lane
from .production import Production
from .turn import Turn


class LaneProduction(Production):
    """See the file's head. `Epoch.lanes` has the lanes by number."""

    def next_visit(self, epoch: Epoch, most: int) -> Turn | None:
        """See Production: in fast order the set of lanes that has least to do comes next."""
        order, sets = epoch.order, epoch.lane_sets
        assert order is not None
        if sets is None:
            return order.visit()
        while (number := sets.least(max(1, most // sets.count))) is not None:
            turn = order.visit(number)
            if turn is not None:
                turn.lane_set = number
                return turn
            sets.over(number)
        return None

    def _key(self, turn: Turn) -> int:
        return turn.lane

    def _lane_ended(self, epoch: Epoch, lane: Lane) -> None:
        epoch.end(lane)

    def _worker_for(self, epoch: Epoch, key: int) -> int:
        """The lane's home; or, where workers came or went, the worker that has fewest lanes."""
        if epoch.moved:
            return min(self._workers.available, key=epoch.loads.__getitem__)
        return self._workers.pick(key)

    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        if not epoch.moved or lane.run is None:
            return
        if lane.ended:
            if lane.run[0] in self._workers.leaving and not lane.busy and not self._merges_of(epoch, lane.run[1]):
                self._drop(epoch, lane)
            return
        if not lane.border:
            return
        loads = [epoch.loads[worker] for worker in self._workers.available]
        if lane.run[0] in self._workers.available and epoch.loads[lane.run[0]] - min(loads) < 2:
            if max(loads) - min(loads) < 2 and not self._workers.leaving:
                epoch.moved = False
            return
        self._let_go(epoch, lane)

    def _merges_of(self, epoch: Epoch, run: int) -> bool:
        return any(filler[1] == run for turn in self._merges(epoch) for filler in turn.fillers)

    def _let_go(self, epoch: Epoch, lane: Lane) -> None:
        if lane.ended:
            return  # its turns are all that it still does
        run = self._drop(epoch, lane)
        if lane.busy:
            lane.release(run)

    def _hand_over(self, epoch: Epoch, key: int) -> None:
        self._fill(epoch, key)

    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """See Production. What counts is how often the split ended its worker in this epoch. Outside of user code no
        split is to blame, and what counts is how often that happened in a row before the lane got any further."""
        plan, (run, split, name) = self.feed.plan, blamed
        lane.careful = failures.batches_at_stake(plan)
        lane.failures += 1
        count = lane.blame(split)
        if count < plan.attempts or plan.on_error == "retry":
            if lane.failures > 1:
                self._pause(lane, run, lane.failures - 1)
        elif plan.on_error == "skip" and split >= 0 and count < 2 * plan.attempts:
            lane.skip = tuple(sorted({*lane.skip, split}))
        else:
            lane.fail(failures.deadly(plan, epoch.number, split, count, how, worker, name))
