"""The delivery policy of ranks: rounds of one batch for each rank."""

from __future__ import annotations

from penstock_proto import ConnectionLost, StateMismatch, StreamClosed
from penstock_proto.batches.position import Position
from penstock_proto.messages import LaneEnded, PoolBegun

from ..model.consumer import Consumer
from ..model.stripe import Source, Stripe
from ..model.turn import Part, Repeat, Turn
from ..order.epoch import Epoch
from .delivery import SingleDelivery
from .outlet import Outlet


class RankDelivery(SingleDelivery):
    """Sends batch j to rank j mod n. Waits until a round is whole, so that all ranks get the same number of batches.

    Each rank is told of the others' batches before it is sent its own. So its position after that batch is the position
    after the round. A last round of only k batches is left out. With `pad` it is filled up: rank r gets a copy of the
    batch of rank r mod k. A copy has its own slot. It is made before anything of the round is sent, because nobody may
    read a batch that was handed over.
    """

    singly = True
    whole = False

    def __init__(self, outlet: Outlet, pad: bool) -> None:
        super().__init__(outlet)
        self._pad = pad
        self._round: list[tuple[Source, Part] | LaneEnded | PoolBegun] = []
        """The batches of the next round, the lanes that ended between them, and the pools that began there."""

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery: every rank that has not finished the epoch must have begun it."""
        return bool(self._outlet.readers(epoch)) and all(
            consumer.gone or consumer.reading or consumer.epoch > epoch.number for consumer in self._outlet.consumers
        )

    def deliver(self, epoch: Epoch, turn: Turn | Stripe, part: Part) -> bool:
        """See Delivery."""
        if (error := off_border(epoch.position, self._ranks, self._outlet.feed.name)) is not None:
            self._outlet.fail(error)  # the epoch did not end with a padded round
            return False
        if self._whole and not self._deliver_round(epoch):
            return False
        self._outlet.slots.hold(turn.slot)
        self._round.append((turn, part))
        if self._whole:
            self._deliver_round(epoch)
        return self._outlet.error is None

    def on_lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._round.append(ended)

    def on_pool_begun(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery. If no round has begun, tell the consumers about the pool at once: they are told at once about
        its batches that are passed over, too."""
        if self._round:
            self._round.append(pool)
        else:
            super().on_pool_begun(epoch, pool)

    def finish(self, epoch: Epoch) -> bool:
        """See Delivery."""
        if self._pad:
            self._fill_up()
        if self._whole and not self._deliver_round(epoch):
            return False
        self._tell_round(epoch, [])
        self.forget(epoch)
        return True

    def on_consumer_lost(self, consumer: Consumer) -> None:
        """See Delivery: the others cannot go on alone."""
        if self._ranks:
            said = f"rank {consumer.rank} of {self._ranks} is gone: all ranks go on when it is back"
            self._outlet.fail(ConnectionLost(said, feed=self._outlet.feed.name))

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""
        for source, _ in self._batches:
            self._outlet.release(source)
        self._round.clear()

    def holding_up(self, epoch: Epoch) -> list[Consumer]:
        """See Delivery."""
        consumers = self._outlet.consumers
        if self._outlet.readers(epoch) and not self.wanted(epoch):
            return [one for one in consumers if not (one.gone or one.reading or one.epoch > epoch.number)]
        if not self._whole:
            return []
        batches, nbytes_of = self._batches, self._outlet.feed.nbytes_of
        return [one for one in self._outlet.readers(epoch) if not one.has_credit_for(nbytes_of(batches[one.rank][1]))]

    @property
    def _ranks(self) -> int:
        return len(self._outlet.consumers)

    @property
    def _batches(self) -> list[tuple[Source, Part]]:
        """The batches of the round, by rank."""
        return [item for item in self._round if isinstance(item, tuple)]

    @property
    def _whole(self) -> bool:
        return len(self._batches) == self._ranks

    def _fill_up(self) -> None:
        """Fill the round up with copies of its batches, if it has any."""
        batches = self._batches
        for rank in range(len(batches), self._ranks if batches else 0):
            source, part = batches[rank % len(batches)]
            assert isinstance(source, Turn)
            repeat = self._outlet.repeat(source, part)
            self._round.append((repeat, repeat.part))

    def _deliver_round(self, epoch: Epoch) -> bool:
        """Send the round, if all ranks have credit and the copies are made. Return whether it was sent.

        The stream fails if a rank has closed before or within the epoch. Otherwise the other ranks would wait for it in
        their collectives, and not know why.
        """
        outlet = self._outlet
        for consumer in outlet.consumers:
            if consumer.gone and (consumer.begun is None or consumer.begun <= epoch.number):
                when = "within" if consumer.begun == epoch.number else "before"
                said = (
                    f"rank {consumer.rank} of {self._ranks} has closed its connection {when} epoch {epoch.number}, and "
                    "the others cannot go on in step without it: end all ranks, and start the job again"
                )
                outlet.fail(StreamClosed(said, feed=outlet.feed.name))
                return False
        batches = self._batches
        if any(isinstance(source, Repeat) and not source.made for source, _ in batches):
            return False
        receivers = []
        for consumer in outlet.readers(epoch):
            _, part = batches[consumer.rank]
            if (epoch.number, epoch.rounds) >= consumer.first:
                if not consumer.has_credit_for(outlet.feed.nbytes_of(part)):
                    return False
                receivers.append(consumer)
        self._tell_round(epoch, receivers)
        for consumer in receivers:
            source, part = batches[consumer.rank]
            outlet.send(epoch.number, consumer, source, part, outlet.feed.nbytes_of(part))
        self.forget(epoch)
        epoch.rounds += 1
        return True

    def _tell_round(self, epoch: Epoch, receivers: list[Consumer]) -> None:
        """Tell all readers of the epoch about the round, except that `receivers` are not told of their own batch."""
        outlet = self._outlet
        rank = 0
        for item in self._round:
            if isinstance(item, LaneEnded | PoolBegun):
                outlet.tell(item, outlet.listeners(epoch))
                continue
            source, part = item
            if isinstance(source, Repeat):
                continue
            listening = outlet.listeners(epoch)
            others = [consumer for consumer in listening if consumer not in receivers or consumer.rank != rank]
            outlet.tell_elsewhere(epoch.number, source, part, others)
            outlet.count(epoch, part)
            rank += 1


def off_border(position: Position | None, world_size: int, feed: str) -> StateMismatch | None:
    """Return the error if a position is not between two rounds of `world_size` ranks, else None."""
    if position is None or (position.batches + position.skip) % world_size == 0:
        return None
    return StateMismatch(
        f"the state was taken after batch {position.batches + position.skip} of epoch {position.epoch}, which is not a "
        f"border between rounds of {world_size} ranks: it was made with another world_size, or at the end of an epoch "
        'with last_round="pad"',
        feed=feed,
    )
