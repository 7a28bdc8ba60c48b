"""Delivery policies: decide which consumer receives each batch.

One consumer receives everything. Ranks receive one batch each per round. A group gives each batch to whichever member
has credit. The stream offers the next part in the order. The policy sends it, or says that it has to wait.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from msgspec.structs import replace

from penstock_proto import ConnectionLost, StateMismatch, StreamClosed
from penstock_proto.messages import End, LaneEnded, PoolBegun
from penstock_proto.position import Position

from .consumer import Consumer
from .epoch import Epoch
from .group_log import GroupLog
from .outlet import Outlet
from .turn import Part, Repeat, Source, Turn


class Delivery(Protocol):
    """The interface of a delivery policy to its stream.

    Attributes:
        singly: whether batches are delivered one by one, so that workers have to report each by itself.
        shared: whether consumers come and go, and the stream lives on for a while without any.
        group_log: tells a state file of it, if one is to know.
        has_returned: whether batches that a consumer returned wait for another one.
    """

    singly: bool
    shared: bool
    group_log: GroupLog | None

    @property
    def has_returned(self) -> bool: ...

    def wanted(self, epoch: Epoch) -> bool:
        """Whether the epoch can be delivered now."""

    def redeliver(self, epoch: Epoch) -> bool:
        """Redeliver the batches that a lost consumer returned. Return False while some of them wait for credit."""

    def deliver(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """Deliver the turn's next part. Return False if it has to wait."""

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """A lane ends at this point of the stream."""

    def pool_begins(self, epoch: Epoch, pool: PoolBegun) -> None:
        """A pool begins at this point of the stream."""

    def ends(self, epoch: Epoch) -> bool:
        """The epoch has no further part. Return whether it can end now."""

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """Return the End for this consumer."""

    def handed(self, consumer: Consumer, handed: int) -> None:
        """The consumer is about to acknowledge that the first `handed` slabs were handed over."""

    def returned(self, consumer: Consumer, handed: int) -> None:
        """Of the slabs that the consumer was sent, only the first `handed` are handed over."""

    def lost(self, consumer: Consumer) -> None:
        """The consumer has gone without Close."""

    def forget(self, epoch: Epoch) -> None:
        """The epoch is closed."""

    def holding_up(self, epoch: Epoch) -> list[Consumer]:
        """The consumers for which the others wait now: batches of the epoch lie ready, and these cannot take theirs."""


class SingleDelivery:
    """Sends everything to one consumer."""

    singly = False
    shared = False
    group_log: GroupLog | None = None

    @property
    def has_returned(self) -> bool:
        """See Delivery."""
        return False

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        consumer = self._outlet.consumers[0]
        return consumer.reading and consumer.epoch == epoch.number

    def redeliver(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def deliver(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """See Delivery."""
        outlet = self._outlet
        consumer = outlet.consumers[0]
        nbytes = outlet.feed.nbytes_of(part)
        if not consumer.has_credit_for(nbytes):
            return False
        outlet.send(epoch, consumer, turn, part, nbytes)
        outlet.count(epoch, part)
        return True

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._outlet.tell(ended, self._outlet.listening(epoch))

    def pool_begins(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        self._outlet.tell(pool, self._outlet.listening(epoch))

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """See Delivery."""
        return End(epoch.number, consumer.slabs, epoch.batches, epoch.rows)

    def handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""

    def returned(self, consumer: Consumer, handed: int) -> None:
        """See Delivery. The other slabs are void."""

    def lost(self, consumer: Consumer) -> None:
        """See Delivery."""

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""

    def holding_up(self, epoch: Epoch) -> list[Consumer]:
        """See Delivery."""
        return []


class RankDelivery(SingleDelivery):
    """Sends batch j to rank j mod n. Waits until a round is whole, so that all ranks get equally many batches.

    Each rank is told of the others' batches before it is sent its own. So its position after that batch is the position
    after the round. A last round of only k batches is left out. With `pad` it is filled up: rank r gets a copy of the
    batch of rank r mod k. A copy has its own slot. It is made before anything of the round is sent, because nobody may
    read a batch that was handed over.
    """

    singly = True

    def __init__(self, outlet: Outlet, pad: bool) -> None:
        super().__init__(outlet)
        self._pad = pad
        self._round: list[tuple[Source, Part] | LaneEnded | PoolBegun] = []
        """The batches of the next round, the lanes that ended between them, and the pools that began there."""

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery: every rank that has not finished the epoch must have begun it."""
        return bool(self._outlet.reading(epoch)) and all(
            consumer.gone or consumer.reading or consumer.epoch > epoch.number for consumer in self._outlet.consumers
        )

    def deliver(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
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

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._round.append(ended)

    def pool_begins(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery. What is passed over of the pool is told at once, and so is the pool then."""
        if self._round:
            self._round.append(pool)
        else:
            super().pool_begins(epoch, pool)

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        if self._pad:
            self._fill_up()
        if self._whole and not self._deliver_round(epoch):
            return False
        self._tell_round(epoch, [])
        self.forget(epoch)
        return True

    def lost(self, consumer: Consumer) -> None:
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
        if self._outlet.reading(epoch) and not self.wanted(epoch):
            return [one for one in consumers if not (one.gone or one.reading or one.epoch > epoch.number)]
        if not self._whole:
            return []
        batches, nbytes_of = self._batches, self._outlet.feed.nbytes_of
        return [one for one in self._outlet.reading(epoch) if not one.has_credit_for(nbytes_of(batches[one.rank][1]))]

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

        The stream fails if a rank has closed before it read the epoch. Otherwise the other ranks would wait for it in
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
        for consumer in outlet.reading(epoch):
            _, part = batches[consumer.rank]
            if (epoch.number, epoch.rounds) >= consumer.first:
                if not consumer.has_credit_for(outlet.feed.nbytes_of(part)):
                    return False
                receivers.append(consumer)
        self._tell_round(epoch, receivers)
        for consumer in receivers:
            source, part = batches[consumer.rank]
            outlet.send(epoch, consumer, source, part, outlet.feed.nbytes_of(part))
        self.forget(epoch)
        epoch.rounds += 1
        return True

    def _tell_round(self, epoch: Epoch, receivers: list[Consumer]) -> None:
        """Tell all readers of the epoch about the round, except that `receivers` are not told of their own batch."""
        outlet = self._outlet
        rank = 0
        for item in self._round:
            if isinstance(item, LaneEnded | PoolBegun):
                outlet.tell(item, outlet.listening(epoch))
                continue
            source, part = item
            if isinstance(source, Repeat):
                continue
            listening = outlet.listening(epoch)
            others = [consumer for consumer in listening if consumer not in receivers or consumer.rank != rank]
            outlet.tell_elsewhere(epoch, source, part, others)
            outlet.count(epoch, part)
            rank += 1


def off_border(position: Position | None, world_size: int, feed: str) -> StateMismatch | None:
    """Return the error if a position is not between two rounds of `world_size` ranks, else None."""
    if position is None or (position.batches + position.skip) % world_size == 0:
        return None
    return StateMismatch(
        f"the state stands after batch {position.batches + position.skip} of epoch {position.epoch}, which is not a "
        f"border between rounds of {world_size} ranks: it was made with another world_size, or at the end of an epoch "
        'with last_round="pad"',
        feed=feed,
    )


class GroupDelivery(SingleDelivery):
    """Sends each batch to the member of a group that has credit and least under way. A batch that this member does not
    hand over goes to another.

    A slab holds one batch, even if a worker reported several together: a consumer that goes in the middle of a slab
    takes all of the slab with it. Consumers are not told of each other's batches, and have no position. The epoch ends
    when all of it was handed over.
    """

    shared = True

    def __init__(self, outlet: Outlet, group_log: GroupLog | None = None) -> None:
        super().__init__(outlet)
        self.group_log = group_log
        self._returned: deque[tuple[Turn, Part]] = deque()
        """Batches that a consumer did not hand over, and that another will get."""

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return bool(self._outlet.reading(epoch))

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
            self._outlet.send(epoch, consumer, turn, part, self._outlet.feed.nbytes_of(part))
            self._returned.popleft()
            self._outlet.release(turn)
        return True

    def deliver(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """See Delivery."""
        handed = self.group_log is not None and self.group_log.was_handed(turn, part)
        consumer = None if handed else self._ready_for(epoch, part)
        if consumer is None and not handed:
            return False
        if self.group_log is not None:
            self.group_log.delivers(epoch.number, turn, part)
        batch = part
        if part.batches > 1:  # all but the last full
            rows = self._outlet.feed.plan.batch_size or 1
            batch = replace(part, batches=1, rows=rows)
            rest = replace(part, first=part.first + 1, batches=part.batches - 1, rows=part.rows - rows)
            turn.parts.insert(1, rest)
        if consumer is not None:
            batch_only = replace(batch, record=b"")
            self._outlet.send(epoch, consumer, turn, batch_only, self._outlet.feed.nbytes_of(batch))
        elif self.group_log is not None:
            self.group_log.passed(turn, batch)
        self._outlet.count(epoch, batch)
        return True

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.lane_ended(ended)

    def pool_begins(self, epoch: Epoch, pool: PoolBegun) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.pool_begins(pool)

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return not self._returned and not any(consumer.awaits(epoch.number) for consumer in self._outlet.consumers)

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """See Delivery."""
        return End(epoch.number, consumer.slabs, consumer.batches, consumer.rows)

    def handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.handed(consumer.handing(handed))

    def returned(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        self.handed(consumer, handed)
        for sent in consumer.give_back(handed):
            if self._outlet.open_epoch(sent.epoch) is not None:
                assert isinstance(sent.source, Turn)
                self._outlet.slots.hold(sent.source.slot)
                self._returned.append((sent.source, sent.part))

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""
        for turn, _ in self._returned:
            self._outlet.release(turn)
        self._returned.clear()
        if self.group_log is not None and self._outlet.error is None and not self._outlet.closing:
            self.group_log.begin(epoch.number + 1)

    @property
    def has_returned(self) -> bool:
        """See Delivery."""
        return bool(self._returned)

    def _ready_for(self, epoch: Epoch, part: Part) -> Consumer | None:
        """Return the consumer that gets the part's first batch; None if none has credit for it."""
        outlet = self._outlet
        nbytes = outlet.feed.nbytes_of(replace(part, batches=1))
        ready = [consumer for consumer in outlet.reading(epoch) if consumer.has_credit_for(nbytes)]
        return min(ready, key=lambda consumer: (consumer.under_way, consumer.sent), default=None)
