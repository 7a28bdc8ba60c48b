"""Production of lanes. One run at a time makes a lane. A lane moves between workers with its restart record."""

from __future__ import annotations

from ..model import failures
from ..model.stripe import Stripe
from ..model.turn import Turn
from ..order.epoch import Epoch
from ..order.lane import Lane
from ..order.striped_order import StripedOrder
from .production import Production


class LaneProduction(Production):
    """Makes visits to lanes. `Epoch.lanes` has the lanes by number."""

    def next_visit(self, epoch: Epoch, most: int) -> Turn | Stripe | None:
        """See Production. In fast order the set of lanes with the fewest turns in production comes next."""
        order, sets = epoch.order, epoch.lane_sets
        assert order is not None
        if isinstance(order, StripedOrder):
            return order.plan()
        if sets is None:
            return order.visit()
        while (number := sets.least(max(1, most // sets.count))) is not None:
            turn = order.visit(number)
            if turn is not None:
                turn.lane_set = number
                return turn
            sets.leave_out(number)
        return None

    def _on_lane_ended(self, epoch: Epoch, lane: Lane) -> None:
        epoch.on_lane_ended(lane)

    def _worker_for(self, epoch: Epoch, key: int) -> int:
        """See Production: the lane's home, or, if workers came or went, the worker with the fewest lanes. A lane that
        has ended a worker goes to the worker that is set apart for such lanes."""
        apart = self._workers.apart
        if apart is not None and epoch.lane(key).deaths and apart not in self._workers.away:
            return apart
        if epoch.moved:
            workers = self._workers.prompt(self._placing.workers(key, epoch.lane_count))
            return min(workers, key=epoch.loads.__getitem__)
        return self._placing.pick(key, epoch.lane_count)

    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        if not epoch.moved or lane.run is None:
            return
        if lane.ended:
            if lane.run[0] in self._workers.leaving and not lane.busy and not self._merges_of(epoch, lane.run[1]):
                self._drop(epoch, lane)
            return
        if lane.deaths and lane.run[0] == self._workers.apart:
            return
        if not lane.border:
            return
        available, workers = self._workers.available, self._placing.workers(lane.number, epoch.lane_count)
        if self._workers.standing and lane.run[0] in workers:
            if workers is not available or lane.run[0] not in self._workers.prompt_ones:
                return  # lanes spread when it goes on
            available = workers = self._workers.prompt_ones
        loads = epoch.loads_of(workers, len(available))
        more = epoch.loads[lane.run[0]] - loads.least
        if lane.run[0] in workers and (more < 2 or loads.free >= loads.lacking > 0):
            if loads.even and workers is self._workers.available and not self._workers.leaving:
                epoch.moved = False
            return
        self._move(epoch, lane)

    def _merges_of(self, epoch: Epoch, run: int) -> bool:
        return any(filler[1] == run for turn in self.turns.merged(epoch) for filler in turn.fillers)

    def _move(self, epoch: Epoch, lane: Lane) -> None:
        if lane.ended:
            return  # its run only finishes its turns
        run = self._drop(epoch, lane)
        if lane.busy:
            lane.drop(run)

    def _reassign(self, epoch: Epoch, *keys: int) -> None:
        for key in keys:
            self._fill(epoch, key)

    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """See Production. The count is how often this split ended its worker in this epoch. If the worker died outside
        of user code, no split is to blame. Then the count is how often that happened since the lane last got
        further."""
        plan, (run, split, name) = self.feed.plan, blamed
        lane.careful = failures.batches_at_stake(plan)
        lane.failures += 1
        count = lane.blame(split)
        if count < plan.attempts or plan.on_error == "retry":
            if lane.failures > 1 or self._workers.apart in self._workers.away:
                self._pause(lane, run, max(1, lane.failures - 1))
        elif plan.on_error == "skip" and split >= 0 and count < 2 * plan.attempts:
            lane.skip = tuple(sorted({*lane.skip, split}))
        else:
            lane.fail(failures.deadly(plan, epoch.number, split, count, how, worker, name))
