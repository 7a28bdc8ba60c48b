"""Offers what stands next in the order to the delivery policy, as far as it is made and the policy takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock_proto import messages as m

from .delivery import Delivery
from .epoch import Epoch
from .open_turns import OpenTurns
from .outlet import Outlet
from .turn import Turn


class Offering:
    """See the file's head.

    Args:
        epochs: the stream's open epochs.
        outlet: where the policy sends batches.
        delivery: the policy.
        turns: the turns in production.
        ended: called when an epoch has ended for all of its readers, to close it.
    """

    def __init__(
        self,
        epochs: Sequence[Epoch],
        outlet: Outlet,
        delivery: Delivery,
        turns: OpenTurns,
        ended: Callable[[], None],
    ) -> None:
        self._epochs = epochs
        self._outlet = outlet
        self._delivery = delivery
        self._turns = turns
        self._ended = ended
        self._indexable = outlet.feed.plan.length is not None

    def offer(self, *, cut_short: bool) -> None:
        """Offer all that can be delivered now. `cut_short`: only what a lost consumer returned, as the daemon stops
        within an epoch that has no end."""
        offered = None
        while self._epochs and self._epochs[0] is not offered:  # a member of a group may read the next epoch already
            offered = self._epochs[0]
            self._offer(offered, cut_short)

    def _offer(self, epoch: Epoch, cut_short: bool) -> None:
        """Offer what can be delivered of the first epoch. It may be closed then."""
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
        while (turn := order.next()) is not None:
            while turn.parts:
                if epoch.skip:
                    outlet.pass_over(epoch, turn)
                elif delivery.deliver(epoch, turn, turn.parts[0]):
                    turn.parts.popleft()
                else:
                    return
            if turn.error is not None:
                outlet.fail(turn.error)
                return
            if turn.complete:
                order.taken(turn)
                self._tell_lane_ended(epoch, turn)
                self._turns.left_order(epoch, turn)
        if order.finished and delivery.ends(epoch):
            self._end(epoch)

    def _tell_lane_ended(self, epoch: Epoch, turn: Turn) -> None:
        """If the turn has ended its lane, tell the consumers at this point of the stream."""
        if turn.number < 0 or self._indexable:
            return
        lane = epoch.lanes[turn.lane]
        ended = m.LaneEnded(epoch.number, turn.number, turn.lane, lane.index, turn.leftover, lane.record)
        self._delivery.lane_ended(epoch, ended)

    def _end(self, epoch: Epoch) -> None:
        """All of the epoch was delivered: end it, or fail if it is not what it should be."""
        outlet = self._outlet
        if (error := epoch.fault_at_end(outlet.feed)) is not None:
            outlet.fail(error)
            return
        for consumer in outlet.reading(epoch):
            outlet.tell(self._delivery.end_of(epoch, consumer), [consumer])
            consumer.ends += 1
            consumer.leave()
        self._ended()
