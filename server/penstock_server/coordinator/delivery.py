"""Who gets which batch: one consumer all of them, ranks one of each round, or a group's consumers whoever has room.

A stream calls these with each part of a turn that stands next; they send it, or say that it has to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from penstock_proto import ConnectionLost, StateMismatch, StreamClosed
from penstock_proto.messages import End, LaneEnded
from penstock_proto.position import Position

from .consumer import Consumer
from .epoch import Epoch
from .group_log import GroupLog
from .order import Part, Turn

if TYPE_CHECKING:
    from .stream import Stream


class Delivery(Protocol):
    """What a stream asks.

    Attributes:
        singly: whether batches are dealt one by one, so that workers have to report each by itself.
        shared: whether consumers come and go, and the stream lives on for a while when none is there.
        group_log: where a state file learns of it, if one does.
    """

    singly: bool
    shared: bool
    group_log: GroupLog | None

    def wanted(self, epoch: Epoch) -> bool:
        """Whether the epoch can be dealt now."""

    def goes_on(self, epoch: Epoch) -> bool:
        """Whether what came back is dealt again, so that what stands next can be."""

    def deal(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """Deal the turn's next part; False if that has to wait."""

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """A lane ends where the stream stands now."""

    def ends(self, epoch: Epoch) -> bool:
        """The epoch has no further part. Whether it can end now."""

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """What the consumer is told at its end."""

    def handed(self, consumer: Consumer, handed: int) -> None:
        """The consumer is about to say that the first `handed` slabs are done with."""

    def given_back(self, consumer: Consumer, handed: int) -> None:
        """Of what was sent to the consumer, the first `handed` slabs were handed over; the others will not be."""

    def lost(self, consumer: Consumer) -> None:
        """The consumer has gone without a word."""

    def forget(self, epoch: Epoch) -> None:
        """The epoch is closed."""


class SingleDelivery:
    """All to one consumer."""

    singly = False
    shared = False
    group_log: GroupLog | None = None

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return bool(self._stream.reading(epoch))

    def goes_on(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def deal(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """See Delivery."""
        stream = self._stream
        consumer = stream.consumers[0]
        if not consumer.has_credit_for(stream.feed.nbytes_of(part)):
            return False
        stream.send(epoch, consumer, turn, part)
        stream.count(epoch, part)
        return True

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        self._stream.tell(ended, self._stream.listening(epoch))

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return True

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """See Delivery."""
        return End(epoch.number, consumer.slabs, epoch.batches, epoch.rows)

    def handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""

    def given_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery. It is void."""

    def lost(self, consumer: Consumer) -> None:
        """See Delivery."""

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""


class RankDelivery(SingleDelivery):
    """To ranks: batch j to rank j mod n, when all of a round are there, so that every rank gets as many as the others.

    Each hears of the others' batches before it gets its own, so that its position behind that is the one behind the
    round. What does not make a round is left out; or, with `pad`, the round of k batches is filled up, rank r getting a
    repeat of the batch of rank r mod k. A repeat has a slot of its own, and is copied before anything of the round is
    sent, as nobody may read what has been handed.
    """

    singly = True

    def __init__(self, stream: Stream, pad: bool) -> None:
        super().__init__(stream)
        self._pad = pad

    def wanted(self, epoch: Epoch) -> bool:
        """See Delivery: every rank that has not done with the epoch must have begun it."""
        return super().wanted(epoch) and all(
            consumer.gone or consumer.reading or consumer.epoch > epoch.number for consumer in self._stream.consumers
        )

    def deal(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """See Delivery."""
        if (error := off_border(epoch.position, len(self._stream.consumers), self._stream.feed.name)) is not None:
            self._stream.fail(error)  # it was no filled up round that the epoch ended with
            return False
        if epoch.in_round == len(self._stream.consumers) and not self._deal_round(epoch):
            return False
        turn.out += 1  # which keeps the slot
        epoch.round.append((turn, part))
        if epoch.in_round == len(self._stream.consumers):
            self._deal_round(epoch)
        return self._stream.error is None

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        epoch.round.append(ended)

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        if self._pad:
            self._fill_up(epoch)
        if epoch.in_round == len(self._stream.consumers) and not self._deal_round(epoch):
            return False
        self._tell_round(epoch, [])
        self.forget(epoch)
        return True

    def lost(self, consumer: Consumer) -> None:
        """See Delivery: the others cannot go on alone."""
        stream = self._stream
        if stream.consumers:
            said = f"rank {consumer.rank} of {len(stream.consumers)} is gone: all ranks go on when it is back"
            stream.fail(ConnectionLost(said, feed=stream.feed.name))

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""
        for item in epoch.round:
            if isinstance(item, tuple):
                self._stream.let_go(item[0])
        epoch.round.clear()

    def _fill_up(self, epoch: Epoch) -> None:
        """Have what is missing in the round copied from what is there, if anything is."""
        batches = epoch.dealt_next
        for rank in range(len(batches), len(self._stream.consumers) if batches else 0):
            repeat, part = self._stream.production.repeat(epoch, *batches[rank % len(batches)])
            repeat.out += 1  # which keeps the slot
            epoch.round.append((repeat, part))

    def _deal_round(self, epoch: Epoch) -> bool:
        """Send the round, if all have credit and what is repeated has been copied. The stream fails where a rank has
        closed and not read the epoch: the others would wait for it in their collectives, and not know why."""
        stream = self._stream
        for consumer in stream.consumers:
            if consumer.gone and (consumer.begun is None or consumer.begun <= epoch.number):
                when = "within" if consumer.begun == epoch.number else "before"
                said = (
                    f"rank {consumer.rank} of {len(stream.consumers)} has closed its connection {when} epoch "
                    f"{epoch.number}, and the others cannot go on in step without it: end all ranks, and start the job "
                    "again"
                )
                stream.fail(StreamClosed(said, feed=stream.feed.name))
                return False
        batches = epoch.dealt_next
        if any(turn.original is not None and not turn.made for turn, _ in batches):
            return False
        dealt = []
        for consumer in stream.reading(epoch):
            _, part = batches[consumer.rank]
            if (epoch.number, epoch.rounds) >= consumer.first:
                if not consumer.has_credit_for(stream.feed.nbytes_of(part)):
                    return False
                dealt.append(consumer)
        self._tell_round(epoch, dealt)
        for consumer in dealt:
            stream.send(epoch, consumer, *batches[consumer.rank])
        self.forget(epoch)
        epoch.rounds += 1
        return True

    def _tell_round(self, epoch: Epoch, own: list[Consumer]) -> None:
        """Tell all who read the epoch of what is in the round, but not those in `own` of the batch of their rank."""
        stream = self._stream
        rank = 0
        for item in epoch.round:
            if isinstance(item, LaneEnded):
                stream.tell(item, stream.listening(epoch))
                continue
            turn, part = item
            if turn.original is not None:
                continue
            others = [consumer for consumer in stream.listening(epoch) if consumer not in own or consumer.rank != rank]
            stream.pass_by(epoch, turn, part, others)
            stream.count(epoch, part)
            rank += 1


def off_border(position: Position | None, world_size: int, feed: str) -> StateMismatch | None:
    """The error for a position that stands within a round of so many ranks, or None."""
    if position is None or (position.batches + position.skip) % world_size == 0:
        return None
    return StateMismatch(
        f"the state stands behind batch {position.batches + position.skip} of epoch {position.epoch}, which is no "
        f"border between rounds of {world_size} ranks: it was made with another world_size, or at the end of an epoch "
        'with last_round="pad"',
        feed=feed,
    )


class GroupDelivery(SingleDelivery):
    """To the consumers of a group: whoever has credit and least under way. What one does not hand over another gets.

    A slab is one batch, also of what a worker reported together: a consumer that goes within a slab takes all of that
    with it. Consumers hear nothing of each other's batches, and have no position. The epoch ends when all of it was
    handed over.
    """

    shared = True

    def __init__(self, stream: Stream, group_log: GroupLog | None = None) -> None:
        super().__init__(stream)
        self.group_log = group_log

    def goes_on(self, epoch: Epoch) -> bool:
        """See Delivery."""
        if self.group_log is not None:
            if self.group_log.awaited:
                return False
            self.group_log.begin(epoch.number, epoch.splits.digest if epoch.splits else b"")
        while epoch.again:
            turn, part = epoch.again[0]
            consumer = self._ready_for(epoch, part)
            if consumer is None:
                return False
            self._stream.send(epoch, consumer, turn, part)
            epoch.again.popleft()
            self._stream.let_go(turn)
        return True

    def deal(self, epoch: Epoch, turn: Turn, part: Part) -> bool:
        """See Delivery."""
        handed = self.group_log is not None and self.group_log.was_handed(turn, part)
        consumer = None if handed else self._ready_for(epoch, part)
        if consumer is None and not handed:
            return False
        if self.group_log is not None:
            self.group_log.deals(epoch.number, turn, part)
        batch = part
        if part.batches > 1:  # all but the last full
            rows = self._stream.feed.plan.batch_size or 1
            batch = replace(part, batches=1, rows=rows)
            rest = replace(part, first=part.first + 1, batches=part.batches - 1, rows=part.rows - rows)
            turn.parts.insert(1, rest)
        if consumer is not None:
            self._stream.send(epoch, consumer, turn, replace(batch, record=b""))
        elif self.group_log is not None:
            self.group_log.passed(turn, batch)
        self._stream.count(epoch, batch)
        return True

    def lane_ended(self, epoch: Epoch, ended: LaneEnded) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.lane_ended(ended)

    def ends(self, epoch: Epoch) -> bool:
        """See Delivery."""
        return not epoch.again and not any(consumer.awaits(epoch.number) for consumer in self._stream.consumers)

    def end_of(self, epoch: Epoch, consumer: Consumer) -> End:
        """See Delivery."""
        return End(epoch.number, consumer.slabs, consumer.batches, consumer.rows)

    def handed(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        if self.group_log is not None:
            self.group_log.handed(consumer.handing(handed))

    def given_back(self, consumer: Consumer, handed: int) -> None:
        """See Delivery."""
        self.handed(consumer, handed)
        for sent in consumer.give_back(handed):
            epoch = self._stream.open_epoch(sent.epoch)
            if epoch is not None:
                sent.turn.out += 1  # which keeps the slot
                epoch.again.append((sent.turn, sent.part))

    def forget(self, epoch: Epoch) -> None:
        """See Delivery."""
        for turn, _ in epoch.again:
            self._stream.let_go(turn)
        epoch.again.clear()
        if self.group_log is not None and self._stream.error is None and not self._stream.closing:
            self.group_log.begin(epoch.number + 1)

    def _ready_for(self, epoch: Epoch, part: Part) -> Consumer | None:
        """Who gets the part's first batch, if anybody has credit for it."""
        stream = self._stream
        nbytes = stream.feed.nbytes_of(replace(part, batches=1))
        ready = [consumer for consumer in stream.reading(epoch) if consumer.has_credit_for(nbytes)]
        return min(ready, key=lambda consumer: (consumer.under_way, consumer.sent), default=None)
