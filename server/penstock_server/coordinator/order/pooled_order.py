"""The order of an epoch whose lanes mix their rows: visits form pools, and the rows of a pool are dealt to new batches.

A pool is one visit to each lane of a part of the lanes. It is *formed* when all of its visits are made, because only
then is the number of its full batches known. Turns with that many batches take its place in the order, and each batch
has rows of all of its lanes. After them come the merged batches that the leftovers of these lanes complete. So the
order depends on the lanes' lengths alone, as without pools.
"""

from __future__ import annotations

from collections import deque

from penstock_proto.batches.layout import POOL_LANE
from penstock_proto.batches.position import Position

from ..model.turn import Turn, VisitPool
from .order import ExactOrder
from .visits import LaneVisits


class PooledOrder(ExactOrder):
    """Forms the pools of one epoch. In the window, a formed pool's turns come before its visits, which stay there until
    all of the pool was delivered.

    Args:
        turn: the most batches in a turn.
    """

    def __init__(
        self,
        visits: LaneVisits,
        turn: int,
        *,
        batch_size: int | None,
        drop_remainder: bool,
        position: Position | None = None,
    ) -> None:
        self._lane_visits = visits
        self._turn = turn
        self._pooled = position.batches - position.merged if position else 0
        self._pools: deque[VisitPool] = deque()
        """The pools that are not formed."""
        super().__init__(visits, batch_size=batch_size, drop_remainder=drop_remainder, position=position)

    def next(self, most: int = 0) -> Turn | None:
        """See EpochOrder. A visit of a pool is never delivered. But if the pool's first unfinished visit has failed,
        return it, so that the stream fails with its error."""
        turn = self.window[0] if self.window else None
        if turn is None or turn.pool is None or turn.pool.formed:
            return turn if turn is not None and turn.shows else None
        visit = next((visit for visit in turn.pool.visits if visit.error is not None or not visit.complete), None)
        return visit if visit is not None and visit.error is not None else None

    @property
    def awaited(self) -> Turn | None:
        """See EpochOrder."""
        turn = super().awaited
        if turn is None or turn.pool is None or turn.pool.formed:
            return turn
        return next((visit for visit in turn.pool.visits if not visit.complete), None)

    def on_completed(self, turn: Turn) -> None:
        """See EpochOrder."""
        if turn.ended:
            self._on_lane_ended(turn)
        while self._pools and self._can_be_formed(self._pools[0]):
            self._form(self._pools.popleft())
        self._flush()

    def take(self, turn: Turn) -> None:
        """See EpochOrder."""
        super().take(turn)
        if turn.pool is not None and turn is turn.pool.visits[-1]:  # it comes after all of the pool's turns
            turn.pool.let_go()

    def drop(self) -> list[Turn]:
        """See EpochOrder."""
        self._pools.clear()
        dropped = super().drop()
        for turn in dropped:
            if turn.pool is not None:
                turn.pool.let_go()
        return dropped

    def _add(self, turn: Turn) -> None:
        super()._add(turn)
        number, part = self._lane_visits.pool_of(turn.lane, turn.index)
        if not self._pools or (self._pools[-1].number, self._pools[-1].part) != (number, part):
            self._pools.append(VisitPool(number, part, number * self._lane_visits.parts + part))
        turn.pool = self._pools[-1]
        turn.pool.visits.append(turn)

    def _all_counted(self) -> bool:
        return not self._pools

    def _can_be_formed(self, pool: VisitPool) -> bool:
        """Whether all visits of the pool were planned, and are made."""
        if self._lane_visits.upcoming() == (pool.number, pool.part):
            return False
        return all(visit.complete and visit.error is None for visit in pool.visits)

    def _form(self, pool: VisitPool) -> None:
        """Put the pool's turns into the window, and the merged batches that follow."""
        pool.formed, pool.index = True, self._pooled
        for visit in pool.visits:
            pool.batches += visit.made
        for first in range(0, pool.batches, self._turn):
            batches = min(self._turn, pool.batches - first)
            pool.turns.append(Turn(POOL_LANE, self._pooled + first, batches, pool=pool))
        self._pooled += pool.batches
        self.ungranted.extend(pool.turns)
        at = self.window.index(pool.visits[0])
        self.window[at:at] = pool.turns
        after = at + len(pool.turns) + len(pool.visits)
        for visit in pool.visits:
            after += self._resolve(visit, after)
