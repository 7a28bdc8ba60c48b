"""The delivery policy of a group: each batch goes to one member, and to another if the first does not hand it over."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from penstock_proto.messages import End, LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.group_log import GroupLog
from ..model.stripe import Stripe
from ..model.turn import Part, Turn
from ..order.epoch import Epoch
from .delivery import SingleDelivery
from .outlet import Outlet


class GroupDelivery(SingleDelivery):
    """Sends each batch to the member with credit that has the fewest slabs under way. A batch that this member does not
    hand over goes to another.

    A slab holds one batch, even if a worker reported several together, because a consumer that goes in the middle of a
    slab takes the whole slab with it. Consumers are not told of each other's batches, and have no position. The epoch
    ends once all of it was handed over.
    """

    shared = True
    whole = False

    def __init__(self, outlet: Outlet, group_log: GroupLog | None = None) -> None:
        super().__init__(outlet)
        self.group_log = group_log
        self._returned: deque[tuple[Turn, Part]] = deque()
        """Batches that a consumer did not hand over, and that another will get."""

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return bool(self._outlet.readers(epoch))

    def redeliver(self, epoch: Epoch) -> bool:
        """See Delivery."""
        if self.group_log is not None:
            if self.group_log.awaited:
                return False
            self.group_log.begin(epoch.number, epoch.splits.digest if epoch.splits else b"")
        while self._returned:
            turn, part = self._returned[0]
            consumer = self._ready_for(epoch, part)
            if consumer is None:
                return False
            self._outlet.send(epoch.number, consumer, turn, part, self._outlet.feed.nbytes_of(part))
            self._returned.popleft()
            self._outlet.slots.release(turn.slot)
        return True

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """See Delivery."""
        assert isinstance(turn, Turn), "a stripe is not delivered one by one"
        handed = self.group_log is not None and self.group_log.was_handed(turn, part)
        consumer = None if handed else self._ready_for(epoch, part)
        if consumer is None and not handed:
            return False
        if self.group_log is not None:
            self.group_log.on_delivery(epoch.number, turn, part)
        batch = part
        if part.batches > 1:  # all batches but the last are full
            rows = self._outlet.feed.plan.batch_size or 1
            batch = replace(part, batches=1, rows=rows)
            rest = replace(part, first=part.first + 1, batches=part.batches - 1, rows=part.rows - rows)
            turn.parts.insert(1, rest)
        if consumer is not None:
            batch_only = replace(batch, record=b"")
            self._outlet.send(epoch.number, consumer, turn, batch_only, self._outlet.feed.nbytes_of(batch))
        elif self.group_log is not None:
            self.group_log.pass_over(turn, batch)
        self._outlet.count(epoch, batch)
        return True

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.on_lane_ended(ended)

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.on_pool_begun(pool)

    def finish(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return not self._returned and not any(consumer.awaits(epoch.number) for consumer in self._outlet.consumers)

    def _end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """See Delivery."""
        return End(epoch.number, consumer.slabs, consumer.batches, consumer.rows)

    def on_handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.on_handed(consumer.newly_handed(handed))

    def take_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        self.on_handed(consumer, handed)
        for sent in consumer.take_unhanded(handed):
            if self._outlet.open_epoch(sent.epoch) is not None:
                assert isinstance(sent.source, Turn)
                self._outlet.slots.hold(sent.source.slot)
                self._returned.append((sent.source, sent.part))

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""
        for turn, _ in self._returned:
            self._outlet.slots.release(turn.slot)
        self._returned.clear()
        if self.group_log is not None and self._outlet.error is None and not self._outlet.closed:
            self.group_log.begin(epoch.number + 1)

    @property
    def has_returned(self) -> bool:
        """See Delivery."""
        return bool(self._returned)

    def _ready_for(self, epoch: Epoch, part: Part) -> Consumer | None:
        """Return the consumer that gets the part's first batch; None if none has credit for it."""
        outlet = self._outlet
        nbytes = outlet.feed.nbytes_of(replace(part, batches=1))
        ready = [consumer for consumer in outlet.readers(epoch) if consumer.has_credit_for(nbytes)]
        return min(ready, key=lambda consumer: (consumer.under_way, consumer.sent), default=None)
