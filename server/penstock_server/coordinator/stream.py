"""One stream: the epochs of a feed as its consumer reads them, in order, within the slots that it may hold.

A stream has one consumer or several; who of them gets which batch says delivery.py.

Here is what stands next, and when it is granted and sent; who makes it is the affair of production.py.

The rule that keeps it alive: slots are granted in stream order, at most `production` of them are being made or wait for
their place, and one of those is kept for the head. What was sent is the consumer's, bounded by credit and quota, and
comes back by itself. So whatever stands next in the order can always be made.

Events are methods; what is to be done goes to `out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from penstock_proto import (
    DaemonStopped,
    EndOfStream,
    PenstockError,
    StateMismatch,
)
from penstock_proto import messages as m
from penstock_proto.position import Position

from . import commands as do
from .consumer import Consumer
from .delivery import Delivery, Outlet
from .epoch import Epoch
from .feeds import ServedFeed, SplitsInfo
from .group_log import GroupLog
from .lane_production import LaneProduction
from .listing import SplitLists
from .memory import Share
from .order import EpochOrder
from .production import Production
from .range_production import RangeProduction
from .slots import Slots
from .turn import Part, Repeat, Source, Turn
from .workers import Workers

MOST_STREAMS = 2**62 // m.IDS_PER_STREAM
"""Numbers of streams: the ids of all of them fit messages. Behind the last the daemon goes on with those that are free,
whose ids were used 4 million streams ago."""


class Stream:
    """See the file's head.

    Args:
        number: the stream's id, 1 or more.
        feed: what it reads.
        delivery: makes the policy that decides which consumer receives which batch.
        share: the slots that it may hold.
        workers: the workers.
        later: called to try a run's work again in so many seconds.
        out: where commands go.

    Attributes:
        consumers: its consumers, by rank.
        waiting: before it begins: the ranks that are there, which are its consumers when all are.
        slots: the slots that it has leased.
        production: the turns that are being made.
        error: why it failed, or None.
    """

    def __init__(
        self,
        number: int,
        feed: ServedFeed,
        share: Share,
        *,
        delivery: Callable[[Outlet], Delivery],
        workers: Workers,
        later: Callable[[float, int], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self.number = number
        self.feed = feed
        self.share = share
        self.consumers: list[Consumer] = []
        self.waiting: list[Consumer] = []
        self.error: PenstockError | None = None
        self._exact = feed.plan.order == "exact"
        self._indexable = feed.plan.length is not None
        self._workers = workers
        self._do = out
        ids = itertools.count(number * m.IDS_PER_STREAM)
        self.slots = Slots(ids, out)
        self._epochs: deque[Epoch] = deque()
        self._position: Position | None = None
        self._next_epoch = 0
        self._delivery = delivery(self)
        self._lists = SplitLists(feed, self._epochs, workers=workers, ids=ids, later=later, out=out)
        production = RangeProduction if self._indexable else LaneProduction
        self.production: Production = production(
            feed,
            self._epochs,
            self.slots,
            workers=workers,
            ids=ids,
            singly=self._delivery.singly,
            later=later,
            out=out,
        )
        self._closing = False
        self._stopping: DaemonStopped | None = None

    def join(self, consumer: Consumer, share: Share) -> None:
        """One more consumer of a shared stream, from the epoch on that is being read."""
        self.share = share
        consumer.epoch = self._epochs[0].number if self._epochs else self._next_epoch
        self.consumers.append(consumer)

    def part(self, consumer: Consumer, share: Share) -> None:
        """A consumer of a shared stream has left it."""
        self.consumers.remove(consumer)
        self.share = share

    def start(self, consumers: list[Consumer], positions: list[Position | None]) -> None:
        """All consumers are there: begin at the earliest of their positions (None: epoch 0). A consumer that is further
        on receives only what comes behind its own."""
        self.consumers, self.waiting = consumers, []
        places = [(place.epoch, place.batches + place.skip) if place else (0, 0) for place in positions]
        earliest = min(range(len(places)), key=places.__getitem__)
        self._position = positions[earliest]
        self._next_epoch = places[earliest][0]
        for consumer, position, (epoch, batches) in zip(consumers, positions, places, strict=True):
            consumer.epoch = max(consumer.epoch, epoch)  # who waited for the others may have left epochs meanwhile
            consumer.first = epoch, -(-batches // len(consumers))  # a round that was filled up is a whole one
            consumer.told = epoch, position.batches if position else 0
        self._open_next_epoch()
        self._close_passed()

    @property
    def epochs(self) -> Sequence[Epoch]:
        """The open epochs; the first is the one that is being read, or will be next."""
        return self._epochs

    @property
    def closing(self) -> bool:
        """Whether no consumer wants anything any more."""
        return self._closing

    @property
    def group_log(self) -> GroupLog | None:
        """Where a state file learns of it, if one does."""
        return self._delivery.group_log

    @property
    def done(self) -> bool:
        """Whether the stream is closed and every slot has come back."""
        return self._closing and not self.slots

    @property
    def reserved(self) -> int:
        """Bytes that are kept for it: its share while it lives, then what has not come back yet."""
        if self._closing or self.error is not None:
            return self.slots.nbytes
        return max(self.slots.nbytes, self.share.nbytes)  # what consumers that left a group still hold counts too

    @property
    def slots_reserved(self) -> int:
        """Slots that are kept for it, likewise."""
        if self._closing or self.error is not None:
            return len(self.slots)
        return max(len(self.slots), self.share.slots)

    @property
    def delivered(self) -> bool:
        """Whether the consumers have all that was promised."""
        if self._closing:
            return True
        if not self._cut_short:
            return all(consumer.delivered for consumer in self.consumers)
        if self._delivery.has_returned and self._epochs and self.reading(self._epochs[0]):
            return False
        return all(consumer.gone or consumer.handed == consumer.sent for consumer in self.consumers)

    @property
    def _cut_short(self) -> bool:
        """Whether the daemon wants to stop within an epoch that has no end: then what was sent is all."""
        return self._stopping is not None and self.feed.plan.endless

    @property
    def epoch_batches(self) -> int:
        """Batches sent of the epoch that is being read, from its start."""
        return self._epochs[0].batches if self._epochs and self.reading(self._epochs[0]) else 0

    # --- events from consumers ---

    def begin(self, consumer: Consumer, number: int) -> None:
        """The consumer wants this epoch from its start (or its position). Close epochs that no consumer wants any
        longer.

        Raises:
            ProtocolError: it reads an epoch, has read this one before, or is gone.
        """
        if self.error is not None:
            return  # the consumer has been told
        if self._delivery.shared and self._epochs and number < self._epochs[0].number and not consumer.reading:
            self.tell(m.End(number, 0, 0, 0), [consumer])  # it comes late: the others have read it
            consumer.ends += 1
            return
        if self._stopping is not None and number not in self._begun:  # no epoch begins; others may still read one
            self._stop_when_delivered()
            return
        consumer.begin(number)
        if self.ends_before(number):
            self.fail(self.end_of_stream())
            return
        for epoch in self._epochs:
            if epoch.number == number:
                self._tell_begun(epoch, [consumer])
        self._close_passed()

    def ends_before(self, epoch: int) -> bool:
        """Whether the feed has no such epoch."""
        return self.feed.plan.epochs is not None and epoch >= self.feed.plan.epochs

    def end_of_stream(self) -> EndOfStream:
        """The error for who wants such an epoch."""
        return EndOfStream(f"the feed has {self.feed.plan.epochs} epochs", feed=self.feed.name)

    def acknowledge(self, consumer: Consumer, handed: int, released: tuple[int, ...], ended: int) -> None:
        """`handed` slabs in all are handed (or void), over those in `released` no tensor lives, `ended` Ends came.

        Raises:
            ProtocolError: counts that cannot be. Nothing has changed then.
        """
        consumer.check_acknowledged(handed, released, ended)
        self._delivery.handed(consumer, handed)
        for slot in consumer.acknowledge(handed, released, ended):
            self.slots.release(slot)
        self._stop_when_delivered()

    def leave(self, consumer: Consumer, number: int, handed: int) -> None:
        """The consumer leaves this epoch before its end. What was sent behind the first `handed` slabs it does not hand
        over.

        Raises:
            ProtocolError: so many were not sent. Nothing has changed then.
        """
        consumer.check(handed)
        if consumer.reading and consumer.epoch == number:
            self._delivery.returned(consumer, handed)
            consumer.leave()
            self._close_passed()
            self._stop_when_delivered()

    def close(self, consumer: Consumer, handed: int) -> None:
        """The consumer wants nothing more; slots under its tensors come back as it releases them."""
        if not consumer.gone:
            self._delivery.returned(consumer, handed)
        consumer.go()
        if consumer in self.waiting:
            self.waiting.remove(consumer)
        if self.waiting:
            return
        if self._deserted:
            self.end()
        else:
            self._close_passed()
            self._stop_when_delivered()

    def cut(self, consumer: Consumer, handed: int) -> None:
        """The consumer is cut off, but its tensors may live."""
        if not consumer.gone:
            self._delivery.lost(consumer)
        self.close(consumer, handed)

    def lost(self, consumer: Consumer, handed: int) -> None:
        """The consumer is gone, and every tensor with it: all of its slots come back."""
        self.cut(consumer, handed)
        for slot in consumer.lost():
            self.slots.release(slot)

    def give_up_waiting(self) -> None:
        """Consumers that were awaited will not come back."""
        assert self.group_log is not None
        self.group_log.give_up()
        self._close_passed()

    def end(self) -> None:
        """Nobody wants anything more."""
        if not self._closing:
            self._closing = True
            self._stop_production()

    def stop(self, reason: DaemonStopped) -> None:
        """The daemon wants to stop: the epoch that is being read goes on to its end, if it has one, and none begins."""
        self._stopping = reason
        self._stop_when_delivered()

    # --- events from workers ---

    def splits_listed(self, run: int, splits: SplitsInfo) -> None:
        """The list of splits that `run` was to make is there."""
        epoch = self._lists.listed(run, splits)
        if epoch is not None:
            self._plan(epoch, splits)

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run, which is closed with all of its turns."""
        self._lists.run_failed(run, error)
        self.production.run_failed(run, error)

    def retry(self, run: int) -> None:
        """The pause after this run's failure is over."""
        self._lists.retry(run)
        self.production.retry(run)

    def worker_died(self, worker: int, how: str, blamed: tuple[int, int, str] | None) -> None:
        """The worker's process is gone; see `Production.worker_died`."""
        self._lists.worker_died(worker, how, blamed)
        self.production.worker_died(worker, how, blamed)

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        return self._lists.uses(worker) or self.production.uses(worker)

    def resize(self, share: Share, slot_nbytes: int) -> None:
        """From now on the stream has this share, of slots of this size. What is out stays out till it is released."""
        limits = self.share.credit, self.share.quota
        self.share = share
        self.production.slot_nbytes = slot_nbytes
        for consumer in self.consumers:
            consumer.resize(share)
            if (share.credit, share.quota) != limits:
                self.tell(m.Opened(share.credit, share.quota), [consumer])

    # --- what follows ---

    def fail(self, error: PenstockError) -> None:
        """The stream fails now."""
        if self.error is None and not self._closing:
            self.error = error
            self.tell(m.Failed(m.ErrorReport.of(error)), self.consumers or self.waiting)
            self._stop_production()
            if self._delivery.shared and self._deserted:
                self.end()

    def settle(self) -> None:
        """Send what can be sent, then grant what can be granted; tell the state file if the stream has ended."""
        if self._live:
            self._deliver()
        if self._live:
            self._grant()
            if self._epochs and self._epochs[0].failing:
                self._deliver()  # what could not be granted may be next
        log = self._delivery.group_log
        if log is not None and (self._closing or self.error is not None):
            log.end(forget=not isinstance(self.error, DaemonStopped))

    @property
    def _deserted(self) -> bool:
        """Whether all consumers are gone, and none can come to it any more."""
        return all(consumer.gone for consumer in self.consumers) and (
            not self._delivery.shared or self.error is not None
        )

    @property
    def _live(self) -> bool:
        return self.error is None and not self._closing and bool(self.consumers)

    def tell(self, message: do.Said, consumers: list[Consumer]) -> None:
        """Send a message to those consumers."""
        for consumer in consumers:
            if not consumer.gone:
                self._do(do.Tell(consumer.number, message))

    def _tell_begun(self, epoch: Epoch, consumers: list[Consumer]) -> None:
        if epoch.splits is not None and self.error is None:
            self.tell(m.Begun(epoch.number, epoch.splits.digest), consumers)

    @property
    def _begun(self) -> set[int]:
        """The epochs that consumers have begun, and are reading."""
        return {consumer.epoch for consumer in self.consumers if consumer.reading}

    def reading(self, epoch: Epoch) -> list[Consumer]:
        """Who reads the epoch."""
        return [consumer for consumer in self.consumers if consumer.reading and consumer.epoch == epoch.number]

    def listening(self, epoch: Epoch) -> list[Consumer]:
        """Who reads the epoch, and has not heard before of what comes next in it."""
        return [consumer for consumer in self.reading(epoch) if (epoch.number, epoch.batches) >= consumer.told]

    def open_epoch(self, number: int) -> Epoch | None:
        """The epoch with this number, if it is open."""
        return next((epoch for epoch in self._epochs if epoch.number == number), None)

    def repeat(self, turn: Turn, part: Part) -> Repeat:
        """See Outlet."""
        return self.production.repeat(turn, part)

    def let_go(self, source: Source) -> None:
        """See Outlet."""
        if isinstance(source, Repeat):
            self.production.let_go(source)
        else:
            self.slots.release(source.slot)

    def _close_passed(self) -> None:
        """Close the epochs that no consumer wants any more."""
        there = [consumer.epoch for consumer in self.consumers if not consumer.gone]
        if not there or (self.group_log is not None and self.group_log.awaited):
            return
        wanted = min(there)
        while self._epochs and self._epochs[0].number < wanted:
            self._close_epoch(self._epochs.popleft())
        if not self._epochs and self.error is None:
            self._next_epoch = max(self._next_epoch, wanted)
            self._open_next_epoch()

    def _stop_when_delivered(self) -> None:
        if self._stopping is not None and self.delivered:
            self.fail(self._stopping)

    def _open_next_epoch(self) -> None:
        number = self._next_epoch
        if self.feed.plan.epochs is not None and number >= self.feed.plan.epochs:
            return
        self._next_epoch = number + 1
        position, self._position = self._position, None
        epoch = Epoch(number, position)
        self._epochs.append(epoch)
        if self.feed.static_splits is not None:
            self._plan(epoch, self.feed.static_splits)
        else:
            self._lists.ask(epoch)

    def _plan(self, epoch: Epoch, splits: SplitsInfo) -> None:
        try:
            epoch.plan(
                self.feed, splits, 1 if self._exact else max(1, len(self._workers.available)), len(self.consumers)
            )
        except StateMismatch as error:
            epoch.error = error
        self._tell_begun(epoch, self.reading(epoch))

    # --- delivery ---

    def _deliver(self) -> None:
        """Send what stands next, as far as it is there and the consumers have credit."""
        epoch = self._epochs[0] if self._epochs else None
        if epoch is None or not self._delivery.wanted(epoch):
            return
        if epoch.error is not None:
            self.fail(epoch.error)
        if epoch.order is None or self.error is not None:
            return
        if not self._delivery.redeliver(epoch) or self._cut_short:
            return
        order = epoch.order
        while (turn := order.next()) is not None:
            while turn.parts:
                if epoch.skip:
                    self._skip(epoch, turn)
                elif self._delivery.deliver(epoch, turn, turn.parts[0]):
                    turn.parts.popleft()
                else:
                    return
            if turn.error is not None:
                self.fail(turn.error)
                return
            if turn.complete:
                order.taken(turn)
                self._lane_ended(epoch, turn)
                self.production.settle(epoch, turn)
        if order.finished and self._delivery.ends(epoch):
            self._end(epoch)

    def send(self, epoch: Epoch, consumer: Consumer, source: Source, part: Part, nbytes: int) -> None:
        """See Outlet."""
        self.slots.hold(source.slot)
        self._do(
            do.SendSlab(
                consumer=consumer.number,
                ticket=source.slot.ticket,
                first=part.first,
                nbytes=nbytes,
                seq=consumer.send(epoch.number, source, part, nbytes),
                epoch=epoch.number,
                lane=source.lane,
                index=source.index + part.first,
                batches=part.batches,
                rows=part.rows,
                shapes=part.shapes,
                record=part.record,
                repeat=isinstance(source, Repeat),
            )
        )

    def count(self, epoch: Epoch, part: Part) -> None:
        """The part is dealt, or passed over."""
        epoch.batches += part.batches
        epoch.rows += part.rows

    def _skip(self, epoch: Epoch, turn: Turn) -> None:
        """Pass over what the position's `skip` still asks for of the turn's next part."""
        part = turn.parts.popleft()
        count = min(epoch.skip, part.batches)
        passed = part
        if count < part.batches:
            rows = count * (self.feed.plan.batch_size or 1)
            passed = replace(part, batches=count, rows=rows)
            turn.parts.appendleft(
                replace(part, first=part.first + count, batches=part.batches - count, rows=part.rows - rows)
            )
        epoch.skip -= count
        self.tell_elsewhere(epoch, turn, passed, self.listening(epoch))
        self.count(epoch, passed)

    def tell_elsewhere(self, epoch: Epoch, turn: Turn, part: Part, consumers: list[Consumer]) -> None:
        """See Outlet."""
        index = turn.index + part.first
        self.tell(m.SentElsewhere(epoch.number, turn.lane, index, part.batches, part.rows, part.record), consumers)

    def _lane_ended(self, epoch: Epoch, turn: Turn) -> None:
        """If the turn has ended its lane, tell the consumers, where that stands in the stream."""
        if turn.number < 0 or self._indexable:
            return
        lane = epoch.lanes[turn.lane]
        ended = m.LaneEnded(epoch.number, turn.number, turn.lane, lane.index, turn.leftover, lane.record)
        self._delivery.lane_ended(epoch, ended)

    def _end(self, epoch: Epoch) -> None:
        """All of the epoch was delivered: end it, or fail if it is not what it should be."""
        if (error := epoch.fault_at_end(self.feed)) is not None:
            self.fail(error)
            return
        for consumer in self.reading(epoch):
            self.tell(self._delivery.end_of(epoch, consumer), [consumer])
            consumer.ends += 1
            consumer.leave()
        self._epochs.popleft()
        self._close_epoch(epoch)

    # --- production ---

    def _grant(self) -> None:
        if len(self._epochs) < 2 and not (self._epochs and self._epochs[0].granting) and self._may_open_next:
            self._open_next_epoch()
        for epoch in self._epochs:
            order = epoch.order
            if order is None:
                return
            while order.ungranted or (order.more and not epoch.failing):
                spare = self.share.production - self.production.turns
                if spare <= 0 or spare <= self._kept_for_head(epoch, order):
                    return
                if order.ungranted:
                    self.production.begin(epoch, order.ungranted.popleft())
                else:
                    turn = self.production.next_visit(epoch, self.share.production)
                    if turn is None:
                        return
                    self.production.begin(epoch, turn)

    @property
    def _may_open_next(self) -> bool:
        """Whether the next epoch's first batches are to be made while the consumer validates or saves."""
        return self._stopping is None or self._next_epoch in self._begun

    def _kept_for_head(self, epoch: Epoch, order: EpochOrder) -> int:
        """How many slots the next grant must leave: one, unless it is for the head itself.

        In fast order whatever is ready is the head, but what is left over of an epoch comes after its last visit.
        """
        if epoch is not self._epochs[0]:
            return 1
        if not self._exact:
            return 0
        if order.ungranted:
            return int(next(iter(order.window)) is not order.ungranted[0])
        return int(bool(order.window))

    def _close_epoch(self, epoch: Epoch) -> None:
        self._delivery.forget(epoch)
        self.production.close_epoch(epoch)
        if epoch.splits is not None and self.feed.static_splits is None:
            self._do(do.ForgetSplits(epoch.splits.number))

    def _stop_production(self) -> None:
        for consumer in self.consumers:
            consumer.stop_reading()
        while self._epochs:
            self._close_epoch(self._epochs.popleft())
