"""Offers the next turns in the order to the delivery policy, as far as they are made and the policy takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock_proto import messages as m

from ..model.turn import Turn, VisitPool
from ..order.epoch import Epoch
from ..order.open_turns import OpenTurns
from .delivery import Delivery
from .outlet import Outlet

_MOST_RECORDS = 64 << 10
"""The most bytes of restart records in one message."""


class Offering:
    """Goes along the order of one stream, and ends each epoch whose turns are all delivered.

    Args:
        epochs: the stream's open epochs.
        outlet: where the policy sends batches.
        delivery: the policy.
        turns: the turns in production.
        ended: called when an epoch has ended for all of its readers, to close it.
        checked: returns whether the epoch may end: no comparison of its samples is under way.
    """

    def __init__(
        self,
        epochs: Sequence[Epoch],
        outlet: Outlet,
        delivery: Delivery,
        turns: OpenTurns,
        ended: Callable[[], None],
        checked: Callable[[], bool],
    ) -> None:
        self._epochs = epochs
        self._outlet = outlet
        self._delivery = delivery
        self._turns = turns
        self._ended = ended
        self._checked = checked
        self._indexable = outlet.feed.plan.length is not None

    def offer(self, *, cut_short: bool) -> None:
        """Offer everything that can be delivered now. With `cut_short`, only redeliver batches that a lost consumer
        returned, because the daemon stops within an epoch that has no end."""
        if not cut_short:
            self._delivery.catch_up()
        offered = None
        while self._epochs and self._epochs[0] is not offered:  # a member of a group may read the next epoch already
            offered = self._epochs[0]
            self._offer(offered, cut_short)

    def _offer(self, epoch: Epoch, cut_short: bool) -> None:
        """Offer the parts of the first epoch that can be delivered now. This may close the epoch."""
        outlet, delivery = self._outlet, self._delivery
        if not delivery.wanted(epoch):
            return
        if epoch.error is not None:
            outlet.fail(epoch.error)
        if epoch.order is None or outlet.error is not None:
            return
        if not delivery.redeliver(epoch) or cut_short:
            return
        order = epoch.order
        while (turn := order.next(epoch.skip)) is not None:
            if turn.pool is not None and turn.pool.formed and not turn.pool.told:
                self._tell_pool(epoch, turn.pool)
            if turn.parts and turn.deliverable:
                part = turn.parts[0]
                if epoch.skip:
                    part = outlet.pass_over(epoch, turn)
                    delivery.on_passed_over(epoch, turn, part)
                elif delivery.deliver(epoch, turn, part):
                    turn.parts.popleft()
                else:
                    return
                order.on_delivered(turn, part)
                continue
            if turn.error is not None:
                outlet.fail(turn.error)
                return
            if isinstance(turn, Turn) and turn.complete:
                order.take(turn)
                self._tell_lane_ended(epoch, turn)
                self._turns.on_left_order(epoch, turn)
        if order.finished and delivery.finish(epoch) and self._checked():
            self._end(epoch)

    def _tell_lane_ended(self, epoch: Epoch, turn: Turn) -> None:
        """If the turn has ended its lane, tell the consumers at this point of the stream."""
        if turn.number < 0 or self._indexable or turn.pool is not None:
            return
        lane = epoch.lanes[turn.lane]
        ended = m.LaneEnded(epoch.number, turn.number, turn.lane, lane.index, turn.leftover, lane.record)
        self._delivery.on_lane_ended(epoch, ended)

    def _tell_pool(self, epoch: Epoch, pool: VisitPool) -> None:
        """Tell the consumers that a pool begins here, and at which batch each of its lanes goes on after it."""
        pool.told = True
        lanes = []
        for visit in pool.visits:
            lane = epoch.lanes[visit.lane]
            if visit.number >= 0:
                lanes.append(m.LaneInPool(visit.lane, lane.index, lane.record, visit.number, visit.leftover))
            elif visit.made:
                lanes.append(m.LaneInPool(visit.lane, visit.index + visit.made, visit.parts[-1].record))
        rows = pool.batches * (self._outlet.feed.plan.batch_size or 1)
        parts = list(_in_messages(lanes))
        for part in parts:
            begun = m.PoolBegun(epoch.number, pool.serial, pool.batches, rows, part, more=part is not parts[-1])
            self._delivery.on_pool_begun(epoch, begun)

    def _end(self, epoch: Epoch) -> None:
        """End the epoch, which was delivered in full, or fail the stream if the epoch has a fault."""
        outlet = self._outlet
        if (error := epoch.fault_at_end(outlet.feed)) is not None:
            outlet.fail(error)
            return
        self._delivery.end(epoch)
        self._ended()


def _in_messages(lanes: list[m.LaneInPool]) -> Iterator[tuple[m.LaneInPool, ...]]:
    """Cut the lanes of a pool into parts that fit into messages."""
    part: list[m.LaneInPool] = []
    for lane in lanes:
        if part and sum(len(other.record) for other in part) + len(lane.record) > _MOST_RECORDS:
            yield tuple(part)
            part = []
        part.append(lane)
    yield tuple(part)
