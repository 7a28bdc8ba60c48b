"""Delivery policies: decide which consumer receives each batch.

One consumer receives everything (here). So does each of several jobs, and the ranks of a job receive one batch each per
round (shared_delivery.py). A group gives each batch to whichever member has credit (group_delivery.py). The stream
offers the next part in the order. The policy sends it, or says that it has to wait.
"""

from __future__ import annotations

from typing import Protocol

from penstock_proto.messages import End, LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.group_log import GroupLog
from ..model.stripe import Stripe
from ..model.turn import Part, Turn
from ..order.epoch import Epoch
from .outlet import Outlet

_MOMENT = 0.01
"""Seconds that a short slab waits for more batches. Each slab costs a trainer 0.6 ms."""


class Delivery(Protocol):
    """The interface of a delivery policy to its stream.

    Attributes:
        shared: whether consumers come and go, and the stream lives on for a while without any.
        group_log: reports a group's position to the state file; None if it is not saved there.
        has_returned: whether batches that a consumer returned wait for another consumer.
        whole: whether each consumer gets the whole stream.
    """

    whole: bool
    shared: bool
    group_log: GroupLog | None

    @property
    def has_returned(self) -> bool: ...

    def catch_up(self) -> None:
        """Send what was delivered already to consumers that are behind."""

    def wanted(self, epoch: Epoch) -> bool:
        """Whether the epoch can be delivered now."""

    def redeliver(self, epoch: Epoch) -> bool:
        """Redeliver the batches that a lost consumer returned. Return False while some of them wait for credit."""

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """Deliver the turn's next part. Return False if it has to wait."""

    def on_passed_over(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> None:
        """Note that the part was passed over: it lies within the `skip` of the position where the stream began."""

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """Note that a lane ends at this point of the stream."""

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """Note that a pool begins at this point of the stream."""

    def finish(self, epoch: Epoch) -> bool:
        """Return whether the epoch, which has no further part, can end now."""

    def end(self, epoch: Epoch) -> None:
        """End the epoch for its readers: all of it was delivered."""

    def tell_begun(self, consumer: Consumer) -> None:
        """Tell a consumer that has begun an epoch what it needs to know before its first batch. (The splits of an open
        epoch were told already.)"""

    def overtakes(self, consumer: Consumer) -> bool:
        """Whether the stream goes on to the epoch that this consumer begins, although others read an earlier one."""

    def on_handed(self, consumer: Consumer, handed: int) -> None:
        """Note that the consumer is about to acknowledge that the first `handed` slabs were handed over."""

    def take_back(self, consumer: Consumer, handed: int) -> None:
        """Take back the slabs after the first `handed`: the consumer will not hand them over."""

    def on_consumer_lost(self, consumer: Consumer) -> None:
        """Note that the consumer has gone without Close."""

    def forget(self, epoch: Epoch) -> None:
        """Forget an epoch that is closed."""

    def on_failed(self, epoch: Epoch | None) -> None:
        """Note that the stream is about to fail, in this epoch, with an error of its feed."""

    def stop(self) -> None:
        """Release everything: nothing more is delivered."""

    def abandon(self) -> None:
        """Forget everything. The slots are released by somebody else."""

    def holding_up(self, consumer: Consumer) -> list[Consumer]:
        """Return the ranks for which the others of the consumer's job wait now: batches are ready, and these cannot
        take theirs."""


class SingleDelivery:
    """Sends everything to one consumer."""

    shared = False
    whole = True
    group_log: GroupLog | None = None

    @property
    def has_returned(self) -> bool:
        """See Delivery."""
        return False

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._short: tuple[int, int] | None = None
        """The stripe and the place of a short slab that waits."""
        self._since = 0.0
        """When it began to wait."""

    def catch_up(self) -> None:
        """See Delivery. Nobody is behind."""

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        consumer = self._outlet.consumers[0]
        return consumer.epoch == epoch.number and consumer.reading

    def redeliver(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """See Delivery."""
        outlet = self._outlet
        consumer = outlet.consumers[0]
        if isinstance(turn, Stripe) and not self._may_send(turn, part, [consumer]):
            return False
        nbytes = outlet.feed.nbytes_of(part)
        if not consumer.has_credit_for(nbytes):
            return False
        outlet.send(epoch.number, consumer, turn, part, nbytes)
        outlet.count(epoch, part)
        return True

    def _may_send(self, stripe: Stripe, part: Part, consumers: list[Consumer]) -> bool:
        """Whether the next slab of the stripe is sent. One that may still grow is sent only if one of the consumers has
        none under way, and it has waited for a moment. (Quick workers finish their lanes one after another.)"""
        if not stripe.grows or part.batches >= stripe.most:
            return True
        if all(consumer.under_way for consumer in consumers):
            return False
        now, short = self._outlet.clock(), (stripe.number, stripe.at)
        if self._short != short:
            self._short, self._since = short, now
            self._outlet.wake(_MOMENT)
        return now >= self._since + _MOMENT

    def on_passed_over(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> None:
        """See Delivery."""

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._outlet.tell(ended, self._outlet.listeners(epoch))

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        self._outlet.tell(pool, self._outlet.listeners(epoch))

    def finish(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def end(self, epoch: Epoch) -> None:
        """See Delivery."""
        for consumer in self._outlet.readers(epoch):
            self._outlet.tell(self._end_of(epoch, consumer), [consumer])
            consumer.ends += 1
            consumer.leave()

    def _end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """Return the End message for this consumer."""
        return End(epoch.number, consumer.slabs, epoch.batches, epoch.rows)

    def tell_begun(self, consumer: Consumer) -> None:
        """See Delivery. An epoch that somebody reads is open, and the consumer knows the rest."""

    def overtakes(self, consumer: Consumer) -> bool:
        """See Delivery."""
        return False

    def on_handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""

    def take_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery. Nobody else gets the other slabs."""

    def on_consumer_lost(self, consumer: Consumer) -> None:
        """See Delivery."""

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""

    def on_failed(self, epoch: Epoch | None) -> None:
        """See Delivery. All are told."""

    def stop(self) -> None:
        """See Delivery."""

    def abandon(self) -> None:
        """See Delivery."""

    def holding_up(self, consumer: Consumer) -> list[Consumer]:
        """See Delivery."""
        return []
