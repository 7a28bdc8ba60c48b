"""One stream: the epochs of a feed, in order, for one consumer or several, within the slots that it may hold.

This file decides what the events of consumers mean for the stream. Reports about one run or ticket go to its parts
(production.py, merging.py, remaking.py), mostly without passing through here (routing.py). After either,
the stream proceeds: it offers the next turns in the order to the delivery policy (offering.py), and grants slots to the
turns after them (granting.py). delivery.py decides which consumer receives a batch, and production.py which worker
makes it.

One rule keeps the stream from stalling: it grants slots in stream order. Production holds at most `share.production`
slots, and keeps one for the head, the next turn in the order. Credit and quota bound the slots that were sent, and
these come back without any help from production. So the head can always be made.

Events are methods, and commands go to `out`. No socket, no clock and no memory here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from penstock_proto import DaemonStopped, FeedError, PenstockError
from penstock_proto import messages as m
from penstock_proto.batches.position import Position

from ..delivery.delivery import Delivery
from ..delivery.offering import Offering
from ..delivery.outlet import Outlet
from ..delivery.shared_delivery import SharedDelivery
from ..model import commands as do
from ..model.consumer import Consumer
from ..model.feeds import ServedFeed
from ..model.group_log import GroupLog
from ..model.known_lists import SplitsInfo
from ..model.leases import Leases
from ..model.memory import Share, least_slots
from ..model.workers import Workers
from ..order.epoch import Epoch
from ..production.granting import Granting
from ..production.lane_production import LaneProduction
from ..production.open_epochs import OpenEpochs
from ..production.production import Production
from ..production.range_production import RangeProduction
from ..production.rank_placing import Placing, unforeseen
from ..production.remaking import Remaking
from ..production.split_lists import SplitLists
from .stream_view import StreamView

MOST_STREAMS = 2**62 // m.IDS_PER_STREAM
"""The limit for the numbers of streams, so that their ids fit into messages. After the last number, free ones are used
again. Their ids were last used 4 million streams ago."""


class Stream:
    """The owner of all parts of one stream.

    Args:
        number: the stream's id, 1 or more.
        feed: the feed that it reads.
        delivery: makes the policy that decides which consumer receives which batch.
        share: the slots that it may hold.
        workers: the workers.
        later: `later(seconds, run)` tries the run's work again after `seconds`, and lets the stream proceed.
        clock: returns the time of the current event.
        out: where commands go.

    Attributes:
        slots: the slots that it has leased.
        production: makes its turns.
        outlet: its consumers, and the slabs and messages that they are sent.
        view: its status for users.
        planned_for: the number of workers for which its share was planned.
        half_stopped: whether a bug has kept production from stopping, so that slots would never be free.
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
        clock: Callable[[], float],
        out: Callable[[do.Command], None],
    ) -> None:
        self.number = number
        self.feed = feed
        self.share = share
        self.planned_for = len(workers.makers)
        self.half_stopped = False
        self._do = out
        self._stopping: DaemonStopped | None = None
        ids = itertools.count(number * m.IDS_PER_STREAM)
        self._epochs: deque[Epoch] = deque()
        self.slots = Leases(ids, feed.slot_nbytes, out)
        no_run = (number + 1) * m.IDS_PER_STREAM - 1
        self.outlet = Outlet(
            feed,
            self.slots,
            self._epochs,
            fail=self.fail,
            clock=clock,
            wake=lambda seconds: later(seconds, no_run),
            out=out,
        )
        self._delivery = delivery(self.outlet)
        self._lists = SplitLists(feed, self._epochs, workers=workers, ids=ids, later=later, out=out)
        self._opening = OpenEpochs(feed, self._epochs, self._lists, workers, singly=self._delivery.shared)
        self._placing = Placing(workers, unforeseen(feed))
        production = RangeProduction if feed.plan.length is not None else LaneProduction
        self.production: Production = production(
            feed,
            self._epochs,
            self.slots,
            workers=workers,
            ids=ids,
            placing=self._placing,
            may_stay=not self._delivery.shared,
            later=later,
            out=out,
        )
        turns = self.production.turns
        self.remaking = Remaking(feed, self.slots, turns, workers=workers, ids=ids, fail=self.fail, out=out)
        self._checks = 0
        self._offering = Offering(
            self._epochs, self.outlet, self._delivery, turns, self._close_first_epoch, lambda: not self._checks
        )
        self._granting = Granting(self._epochs, self.production, exact=feed.plan.order == "exact")
        self.view = StreamView(feed, self._epochs, self.outlet, self._delivery, self._placing)

    def join_group(self, consumer: Consumer, share: Share) -> None:
        """Add a consumer to a group's stream. It begins in the epoch that is being read."""
        self.share = share
        consumer.epoch = self._epochs[0].number if self._epochs else self._opening.next
        self.outlet.join(consumer)

    def join(self, consumers: list[Consumer], positions: list[Position | None], *, pad: bool = False) -> None:
        """Add a job to a stream that several jobs read. It goes on at its position, which `sharing.covers` accepts.
        (With several ranks: at the earliest of their positions.)"""
        assert self.sharing is not None
        for consumer in consumers:
            self._add(consumer)
        self.sharing.join(consumers, _set_places(consumers, positions), pad=pad)

    def join_front(self, consumer: Consumer, position: Position) -> None:
        """Add a job to a stream that several jobs read. It begins where the stream is: at `sharing.front_position`, or
        at the start of a later epoch."""
        assert self.sharing is not None
        self._add(consumer)
        consumer.epoch = position.epoch
        self.sharing.join_front(consumer)

    def _add(self, consumer: Consumer) -> None:
        credit, quota = max(self.share.credit, consumer.share.credit), max(self.share.quota, consumer.share.quota)
        self.share = replace(self.share, credit=credit, quota=quota)
        consumer.stream = self.number
        self.outlet.join(consumer)

    def remove(self, consumer: Consumer, share: Share) -> None:
        """Remove a consumer of several."""
        self.outlet.remove(consumer)
        self.share = share

    def start(self, consumers: list[Consumer], positions: list[Position | None], *, pad: bool = False) -> None:
        """Begin the stream, now that all consumers are there, at the earliest of their positions (None: epoch 0). A
        consumer that is further on receives only what comes after its own position. `pad`: see RankJob."""
        self.outlet.begin(consumers)
        if not self._delivery.shared:
            self._placing.begin(consumers)
        earliest = _set_places(consumers, positions)
        self._opening.start(earliest.epoch if earliest else 0, earliest)
        if self.sharing is not None:
            self.share = self._without_jobs(self.share)
            self.sharing.begin(consumers, earliest, pad=pad)
        self._open_next_epoch()
        self._close_passed()

    @property
    def epochs(self) -> Sequence[Epoch]:
        """The open epochs. The first is being read, or will be read next."""
        return self._epochs

    @property
    def consumers(self) -> list[Consumer]:
        """Its consumers, by rank; empty before it begins."""
        return self.outlet.consumers

    @property
    def error(self) -> PenstockError | None:
        """Why it failed, or None."""
        return self.outlet.error

    @property
    def closed(self) -> bool:
        """Whether the stream is closed, because no consumer wants anything more."""
        return self.outlet.closed

    @property
    def sharing(self) -> SharedDelivery | None:
        """What its jobs share; None if they cannot share anything."""
        return self._delivery if isinstance(self._delivery, SharedDelivery) else None

    @property
    def stopping(self) -> bool:
        """Whether no further epoch begins, because the daemon stops."""
        return self._stopping is not None

    @property
    def group_log(self) -> GroupLog | None:
        """The log that reports the stream's position to the state file; None if it is not saved there."""
        return self._delivery.group_log

    @property
    def done(self) -> bool:
        """True once the stream is closed and holds no slots."""
        return self.outlet.closed and not self.slots

    @property
    def reserved(self) -> tuple[int, int]:
        """Bytes and slots reserved for the stream: its share while it lives, and then the slots that are not free
        yet."""
        nbytes, slots = self.slots.nbytes, len(self.slots)
        if self.outlet.closed or self.error is not None:
            return nbytes, slots
        (needed_nbytes, needed_slots), (window_nbytes, window_slots) = self.needs(), self._window
        # Consumers that have left may still hold slots.
        return max(nbytes, needed_nbytes + window_nbytes), max(slots, needed_slots + window_slots)

    @property
    def _window(self) -> tuple[int, int]:
        """The bytes and the slots of its window, without those that are reserved for rounds of ranks."""
        if self.sharing is None:
            return 0, 0
        window, rounds = self.sharing.window, self.sharing.rounds
        return max(0, window.nbytes - rounds * self.slots.slot_nbytes), max(0, window.slots - rounds)

    def taken(self, *more: Share) -> tuple[int, int]:
        """Return the most bytes and slots that it takes besides its window, with `more` jobs that share it. (Rounds of
        ranks count.)"""
        share, slot = self.share, self.slots.slot_nbytes
        if self.sharing is None or not self.consumers:
            return share.nbytes, share.slots
        slots = sum(one.may_hold for one in self.consumers) + self.sharing.rounds
        slots += sum(job.consumers * (job.credit + job.quota) + job.round for job in more)
        return share.nbytes + slots * slot, share.slots + slots

    def needs(self, *more: Share) -> tuple[int, int]:
        """Return the bytes and the slots that are reserved besides its window, with `more` jobs that share it.

        For each job, except one that stays, they are enough for a stream of its own. So each of them can move to one.
        (That is not so if sizes of batches vary: then nobody knows yet what such a stream will need.)
        """
        nbytes, slots = self.taken(*more)
        feed, slot, sharing = self.feed, self.slots.slot_nbytes, self.sharing
        if sharing is None or feed.varies:
            return nbytes, slots
        jobs = [(there[0].share, len(there), job.round) for job in sharing.jobs if (there := job.there)]
        jobs += [(job, job.consumers, job.round) for job in more]
        if len(jobs) < 2:
            return nbytes, slots  # that one stays
        spare_nbytes, spare_slots = [], []
        for share, consumers, round_ in jobs:
            least = least_slots(share.quota, consumers, pool=feed.info.pool, stripe=feed.info.stripe)
            own = consumers * (share.credit + share.quota) + round_
            spare_nbytes.append(max(0, feed.blocks_nbytes + (least - own) * slot))
            spare_slots.append(max(0, least - own))
        return nbytes + sum(spare_nbytes) - min(spare_nbytes), slots + sum(spare_slots) - min(spare_slots)

    @property
    def whole_share(self) -> Share:
        """Its share with its consumers. Jobs that share it count as if all had as much as the one with the most."""
        if self.sharing is None or not self.consumers:
            return self.share
        there = [one.share for one in self.consumers if not one.gone]
        credit, quota = max((one.credit for one in there), default=1), max((one.quota for one in there), default=0)
        rounds, nbytes = self.sharing.rounds, self.taken()[0]
        return replace(self.share, credit=credit, quota=quota, nbytes=nbytes, consumers=len(there), round=rounds)

    def _without_jobs(self, share: Share) -> Share:
        """Return the part of a share that is not of the consumers: each job that shares the stream has its own."""
        left = replace(share, consumers=0, round=0)
        return replace(left, nbytes=share.nbytes - (share.slots - left.slots) * self.slots.slot_nbytes)

    @property
    def delivered(self) -> bool:
        """Whether the consumers have received everything that they were promised."""
        if self.outlet.closed:
            return True
        if not self._cut_short:
            return all(consumer.delivered for consumer in self.consumers)
        if self._delivery.has_returned and self._epochs and self.outlet.readers(self._epochs[0]):
            return False
        return all(consumer.gone or consumer.handed == consumer.sent for consumer in self.consumers)

    @property
    def _cut_short(self) -> bool:
        """Whether the daemon is stopping and the epoch has no end: then nothing more is sent."""
        return self._stopping is not None and self.feed.plan.endless

    # --- events from consumers ---

    def begin(self, consumer: Consumer, number: int) -> None:
        """Begin this epoch for the consumer, at the epoch's start or at the consumer's position. Close the epochs that
        no consumer wants now.

        Raises:
            ProtocolError: it reads an epoch already, has read this one before, or is gone.
        """
        if self.error is not None or consumer.moved:
            return  # the consumer was told
        first = self._epochs[0].number if self._epochs else self._opening.next  # none is open after the last one
        if self._delivery.shared and number < first and not consumer.reading:
            self.outlet.tell(m.End(number, 0, 0, 0), [consumer])  # it is late: the others have read the epoch
            consumer.ends += 1
            return
        if self._stopping is not None and number not in self.outlet.epochs_read:
            self._stop_when_delivered()  # no epoch begins; others may still read one
            return
        consumer.begin(number)
        if self.feed.ends_before(number):
            self.fail(self.feed.end_of_stream())
            return
        if self._epochs and self._epochs[0].number < number and self._delivery.overtakes(consumer):
            self._close_before(number)
        for epoch in self._epochs:
            if epoch.number == number:
                self.outlet.tell_begun(epoch, [consumer])
        self._delivery.tell_begun(consumer)
        self._close_passed()

    def acknowledge(self, consumer: Consumer, handed: int, released: tuple[int, ...], ended: int) -> None:
        """Process an acknowledgement of slabs and Ends; see `Consumer.acknowledge`.

        Raises:
            ProtocolError: the counts are impossible. Nothing has changed then.
        """
        consumer.check_acknowledged(handed, released, ended)
        self._delivery.on_handed(consumer, handed)
        for slot in consumer.acknowledge(handed, released, ended):
            self.slots.release(slot)
        self._stop_when_delivered()

    def leave(self, consumer: Consumer, number: int, handed: int) -> None:
        """Let the consumer leave this epoch before its end. It hands over only the first `handed` slabs.

        Raises:
            ProtocolError: fewer slabs were sent. Nothing has changed then.
        """
        consumer.check(handed)
        if consumer.reading and consumer.epoch == number:
            self._delivery.take_back(consumer, handed)
            consumer.leave()
            self._close_passed()
            self._stop_when_delivered()

    def close(self, consumer: Consumer, handed: int) -> None:
        """Close the stream for this consumer. Slots under its tensors come back as it releases them."""
        if not consumer.gone:
            self._delivery.take_back(consumer, handed)
        consumer.on_gone()
        if consumer in self.outlet.waiting:
            self.outlet.waiting.remove(consumer)
        if self.outlet.waiting:
            return
        if self._deserted:
            self.end()
        else:
            self._close_passed()
            self._stop_when_delivered()

    def on_consumer_cut(self, consumer: Consumer, handed: int) -> None:
        """Handle a consumer that is cut off, but whose tensors may still live."""
        if not consumer.gone:
            self._delivery.on_consumer_lost(consumer)
        self.close(consumer, handed)

    def on_consumer_lost(self, consumer: Consumer, handed: int) -> None:
        """Handle a consumer that is gone with all its tensors: take all of its slots back."""
        self.on_consumer_cut(consumer, handed)
        for slot in consumer.take_slots():
            self.slots.release(slot)

    def give_up_waiting(self) -> None:
        """Give up the consumers that are awaited: they will not come back."""
        assert self.group_log is not None
        self.group_log.give_up()
        self._close_passed()

    def end(self) -> None:
        """Close the stream: no consumer wants anything more."""
        if not self.outlet.closed:
            self.outlet.close()
            self._stop_production()

    def stop(self, reason: DaemonStopped) -> None:
        """Fail the stream with `reason` once everything that was promised is delivered. The current epoch goes on to
        its end, if it has one, and no other epoch begins."""
        self._stopping = reason
        self._stop_when_delivered()

    # --- events from workers ---

    def on_splits_listed(self, run: int, splits: SplitsInfo) -> None:
        """Plan an epoch whose splits a worker has listed, in `run`."""
        epoch = self._lists.on_listed(run, splits)
        if epoch is not None:
            self._opening.plan(epoch, splits)
            self.outlet.tell_begun(epoch, self.outlet.readers(epoch))

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Handle a failure of user code in the run. The worker has dropped the run and all its turns."""
        self._lists.on_run_failed(run, error)
        self.production.on_run_failed(run, error)
        self.remaking.on_run_failed(run, error)

    def on_check_began(self) -> None:
        """Let the end of an epoch wait: samples of this stream are being compared."""
        self._checks += 1

    def on_check_ended(self) -> None:
        """Note that such a comparison is over."""
        self._checks -= 1

    def retry(self, run: int) -> None:
        """Try the work of this run again: the pause after its failure is over."""
        self._lists.retry(run)
        self.production.retry(run)

    def on_workers_gone(self, workers: Collection[int], how: str, blamed: tuple[int, int, str] | None) -> None:
        """Reassign the work of workers whose processes are gone; see `Production.on_workers_gone`."""
        self._lists.on_workers_gone(workers, how, blamed)
        self.production.on_workers_gone(workers, how, blamed)
        self.remaking.on_workers_gone(workers, how, lost=blamed is None)

    def on_worker_stands(self, worker: int, seconds: float) -> None:
        """Hand over work that the worker has not begun; see `Production.on_worker_stands`."""
        self._lists.on_worker_stands(worker)
        self.production.on_worker_stands(worker, seconds)

    def place_of(self, run: int) -> tuple[int | None, int | None]:
        """Return the epoch and the lane that a run works on, as far as they are known."""
        for epoch in self._epochs:
            for number, lane in epoch.lanes.items():
                if run in [one[1] for one in (lane.run, lane.dropped) if one is not None]:
                    return epoch.number, number if self.feed.plan.length is None else None
        return None, None

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        return self._lists.uses(worker) or self.production.uses(worker) or self.remaking.uses(worker)

    def resize(self, share: Share, slot_nbytes: int) -> None:
        """Give the stream this share, of slots of `slot_nbytes` bytes. Its old slots keep their size until they are
        free."""
        limits = self.share.credit, self.share.quota
        self.slots.resize(slot_nbytes)
        waits = not self.consumers  # for ranks, whose memory is part of this share until the stream begins
        self.share = share if self.sharing is None or waits else self._without_jobs(share)
        for consumer in self.consumers:
            consumer.resize(share)
            if (share.credit, share.quota) != limits:
                self.outlet.tell(m.Opened(consumer.share.credit, consumer.share.quota), [consumer])

    # --- proceeding, failing, opening and closing epochs ---

    def fail(self, error: PenstockError) -> None:
        """Fail the stream, unless it has failed or is closed."""
        if self.error is None and not self.outlet.closed:
            if isinstance(error, FeedError):
                self._delivery.on_failed(self._epochs[0] if self._epochs else None)
            self.outlet.set_error(error)
            self._stop_production()
            if self._delivery.shared and self._deserted:
                self.end()

    def abandon(self, error: PenstockError) -> None:
        """Leave at once, because a bug keeps the stream from failing: tell the consumers, drop the runs that are known,
        and free the slots. Consumers keep those that they hold. A slot that somebody may still write or copy is never
        used again, because nobody waits for that any longer."""
        if self.error is None:
            self.outlet.set_error(error)
        self.outlet.close()
        turns = list(self.production.turns.by_ticket.values())
        fillers = {filler for _, turn in turns for filler in turn.fillers} | set(self.remaking.fillers)
        for epoch in {*self._epochs, *(epoch for epoch, _ in turns)}:
            fillers.update(lane.run for lane in epoch.lanes.values() if lane.run is not None)
        for filler in sorted(fillers):
            self._do(do.DropRun(*filler))
        self._epochs.clear()
        written = {turn.slot.ticket for _, turn in turns if turn.fillers} | self.remaking.tickets
        for consumer in self.consumers:
            consumer.stop_reading()
        self._delivery.abandon()
        self.slots.leave_to([lease for consumer in self.consumers for lease in consumer.out.values()], written)
        self.half_stopped = False

    def proceed(self) -> None:
        """Send what can be sent, then grant what can be granted. Tell the state file if the stream has ended."""
        outlet, epochs = self.outlet, self._epochs
        if outlet.live and self.sharing is not None and not self.sharing.jobs:
            self.end()  # all have gone on elsewhere
        if outlet.live:
            self._offering.offer(cut_short=self._stopping is not None and self._cut_short)
        if outlet.live:
            if len(epochs) < 2 and not (epochs and epochs[0].granting) and self._may_open_next:
                self._open_next_epoch()
            self.remaking.proceed()
            self._granting.grant(self.share.production - self.remaking.unwanted)
            if epochs and epochs[0].failing:
                self._offering.offer(cut_short=self._cut_short)  # the next turn may have failed instead of being made
        log = self._delivery.group_log
        if log is not None and (self.outlet.closed or self.error is not None):
            log.end(forget=not isinstance(self.error, DaemonStopped))

    @property
    def _deserted(self) -> bool:
        """Whether all consumers are gone, and no other can join."""
        return all(consumer.gone for consumer in self.consumers) and (
            not self._delivery.shared or self.error is not None
        )

    def _close_passed(self) -> None:
        """Close the epochs that no consumer wants now."""
        there = [consumer.epoch for consumer in self.consumers if not consumer.gone]
        if not there or (self.group_log is not None and self.group_log.awaited):
            return
        self._close_before(min(there))

    def _close_before(self, wanted: int) -> None:
        """Close the epochs before this one."""
        while self._epochs and self._epochs[0].number < wanted:
            self._close_first_epoch()
        if not self._epochs and self.error is None:
            self._opening.at_least(wanted)
            self._open_next_epoch()

    def _stop_when_delivered(self) -> None:
        if self._stopping is not None and self.delivered:
            self.fail(self._stopping)

    @property
    def _may_open_next(self) -> bool:
        """Whether the next epoch may be opened early, so that its first batches are made while the consumer validates
        or saves."""
        return self._stopping is None or self._opening.next in self.outlet.epochs_read

    def _open_next_epoch(self) -> None:
        epoch = self._opening.open_next()
        if epoch is not None:
            self.outlet.tell_begun(epoch, self.outlet.readers(epoch))

    def _close_first_epoch(self) -> None:
        epoch = self._opening.close_first()
        self._delivery.forget(epoch)
        self.production.close_epoch(epoch)
        if epoch.splits is not None:
            self.outlet.release_list(epoch.splits)

    def _stop_production(self) -> None:
        self.half_stopped = True
        for consumer in self.consumers:
            consumer.stop_reading()
        self.remaking.stop()
        while self._epochs:
            self._close_first_epoch()
        self._delivery.stop()
        self.half_stopped = False


def _set_places(consumers: Sequence[Consumer], positions: Sequence[Position | None]) -> Position | None:
    """Tell the consumers of a job where they begin (None: epoch 0), and return the earliest of their positions."""
    places = [(place.epoch, place.batches + place.skip) if place else (0, 0) for place in positions]
    # Of two consumers at the same batch, one may already know of lanes that end right after it. It is told of them
    # again.
    known = [(place.batches, len(place.ended)) if place else (0, 0) for place in positions]
    for consumer, position, (epoch, batches) in zip(consumers, positions, places, strict=True):
        consumer.epoch = max(consumer.epoch, epoch)  # it may have left epochs while it waited for the others
        consumer.first = epoch, -(-batches // len(consumers))  # a round that was filled up counts as whole
        consumer.told = epoch, position.batches if position else 0
    return positions[min(range(len(places)), key=lambda rank: (places[rank], known[rank]))]
