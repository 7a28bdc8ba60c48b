"""One stream: the epochs of a feed as one consumer reads them, in order, within the slots that it may hold.

Here is what stands next, and when it is granted and sent; who makes it is the affair of making.py.

The rule that keeps it alive: slots are granted in stream order, at most `production` of them are being made or wait for
their place, and one of those is kept for the head. What was sent is the consumer's, bounded by credit and quota, and
comes back by itself. So whatever stands next in the order can always be made.

Events are methods; what is to be done goes to `out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from penstock_proto import (
    DaemonStopped,
    EndOfStream,
    IncompleteEpoch,
    PenstockError,
    ProtocolError,
    StateMismatch,
    WorkerDied,
)
from penstock_proto import messages as m
from penstock_proto.position import Position

from . import commands as do
from .crew import Crew
from .epoch import Epoch
from .feeds import ServedFeed, SplitsInfo
from .making import Making
from .memory import Share
from .order import EpochOrder, Part, Turn
from .reader import Reader

IDS_PER_STREAM = 1 << 32
"""Runs and tickets of stream s are numbered from s * IDS_PER_STREAM, so that an id tells its stream."""


class Stream:
    """See the file's head.

    Args:
        number: the stream's id, 1 or more.
        feed: what it reads.
        reader: the consumer, with its share of slots.
        crew: the workers.
        out: where commands go.
        position: where it begins; None for epoch 0.
    """

    def __init__(
        self,
        number: int,
        feed: ServedFeed,
        reader: Reader,
        *,
        crew: Crew,
        out: Callable[[do.Command], None],
        position: Position | None = None,
    ) -> None:
        self.number = number
        self.feed = feed
        self.reader = reader
        self.error: PenstockError | None = None
        self.wanted: int | None = None
        self.begun: int | None = None
        self._exact = feed.plan.order == "exact"
        self._indexable = feed.plan.length is not None
        self._crew = crew
        self._do = out
        self._ids = itertools.count(number * IDS_PER_STREAM)
        self._epochs: deque[Epoch] = deque()
        self._position = position
        self._next_epoch = position.epoch if position else 0
        self.making = Making(feed, self._epochs, crew=crew, ids=self._ids, out=out)
        self._closing = False
        self._stopping: DaemonStopped | None = None
        self._open_next_epoch()

    @property
    def share(self) -> Share:
        """The slots that it may hold."""
        return self.reader.share

    @property
    def done(self) -> bool:
        """Whether the stream is closed and every slot has come back."""
        return self._closing and not self.making.slots

    @property
    def reserved(self) -> int:
        """Bytes that are kept for it: its share while it lives, then what has not come back yet."""
        return self.making.nbytes if self._closing or self.error is not None else self.share.nbytes

    @property
    def delivered(self) -> bool:
        """Whether the consumer has all that was promised: no epoch is being read, and nothing is under way."""
        reader = self.reader
        return self._closing or (self.wanted is None and (reader.handed, reader.ended) == (reader.sent, reader.ends))

    @property
    def epoch_batches(self) -> int:
        """Batches sent of the epoch that is being read, from its start."""
        return self._epochs[0].batches if self.wanted is not None else 0

    # --- events from the consumer ---

    def begin(self, number: int) -> None:
        """The consumer wants this epoch from its start (or its position); earlier ones are closed.

        Raises:
            ProtocolError: an epoch is being read, this one has been begun before, or the stream is closed.
        """
        if self.error is not None:
            return  # the consumer has been told
        first = self._epochs[0].number if self._epochs else self._next_epoch
        if self._closing or self.wanted is not None or number < first:
            raise ProtocolError(f"epoch {number} cannot begin: epochs begin one after another", feed=self.feed.name)
        if self._stopping is not None:
            self.fail(self._stopping)
            return
        if self.feed.plan.epochs is not None and number >= self.feed.plan.epochs:
            self.fail(EndOfStream(f"the feed has {self.feed.plan.epochs} epochs", feed=self.feed.name))
            return
        while self._epochs and self._epochs[0].number < number:
            self._close_epoch(self._epochs.popleft())
        if not self._epochs:
            self._next_epoch = number
            self._open_next_epoch()
        self.wanted = self.begun = number
        self._tell_begun(self._epochs[0])

    def acknowledge(self, handed: int, released: tuple[int, ...], ended: int) -> None:
        """`handed` slabs in all are handed (or void), over those in `released` no tensor lives, `ended` Ends came.

        Raises:
            ProtocolError: counts that cannot be.
        """
        for turn in self.reader.acknowledge(handed, released, ended):
            self.making.came_back(turn)
        self._stop_when_delivered()

    def leave(self, number: int) -> None:
        """The consumer leaves this epoch before its end."""
        if self.wanted == number:
            self.wanted = None
            self._close_epoch(self._epochs.popleft())
            self._stop_when_delivered()

    def close(self) -> None:
        """The consumer wants nothing more; slots under its tensors come back as it releases them."""
        if not self._closing:
            self._closing = True
            self._stop_production()

    def lost(self) -> None:
        """The consumer is gone, and every tensor with it: all of its slots come back."""
        self.close()
        for turn in self.reader.lost():
            self.making.came_back(turn)

    def stop(self, reason: DaemonStopped) -> None:
        """The daemon wants to stop: the epoch that is being read goes on to its end, and none begins."""
        self._stopping = reason
        self._stop_when_delivered()

    # --- events from workers ---

    def splits_listed(self, run: int, splits: SplitsInfo) -> None:
        """The list of splits that `run` was to make is there."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[1] == run:
                epoch.listing = None
                self._plan(epoch, splits)
                return
        self._do(do.ForgetSplits(splits.number))

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run, which is closed with all of its turns."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[1] == run:
                epoch.listing, epoch.error = None, error
        self.making.run_failed(run, error)

    def worker_died(self, worker: int, how: str, blamed: tuple[int, int, str] | None) -> None:
        """The worker's process is gone; see `Making.worker_died`."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[0] == worker:
                self._list_again(epoch, how, blamed is not None and blamed[0] == epoch.listing[1])
        self.making.worker_died(worker, how, blamed)

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        listing = any(epoch.listing is not None and epoch.listing[0] == worker for epoch in self._epochs)
        return listing or self.making.uses(worker)

    def resize(self, share: Share, slot_nbytes: int) -> None:
        """From now on the stream has this share, of slots of this size. What is out stays out till it is released."""
        limits = self.share.credit, self.share.quota
        self.making.slot_nbytes = slot_nbytes
        self.reader.resize(share)
        if (share.credit, share.quota) != limits:
            self._tell(m.Opened(share.credit, share.quota))

    def _list_again(self, epoch: Epoch, how: str, blamed: bool) -> None:
        """The worker that listed the splits died, and of it if `blamed`."""
        epoch.listing_deaths += blamed
        if epoch.listing_deaths < self.feed.plan.attempts:
            self._list(epoch)
            return
        epoch.listing = None
        epoch.error = WorkerDied(
            f"the function that lists the splits ended its worker process {epoch.listing_deaths} times; the last time "
            f"it {how}",
            feed=self.feed.name,
        )

    # --- what follows ---

    def fail(self, error: PenstockError) -> None:
        """The stream fails now."""
        if self.error is None and not self._closing:
            self.error = error
            self._tell(m.Failed(m.ErrorReport.of(error)))
            self._stop_production()

    def advance(self) -> None:
        """Send what can be sent, then grant what can be granted."""
        if self._live:
            self._deliver()
        if self._live:
            self._grant()
        if self._live and self._epochs and self._epochs[0].failing:
            self._deliver()  # what could not be granted may be next

    @property
    def _live(self) -> bool:
        return self.error is None and not self._closing

    def _tell(self, message: m.Begun | m.Passed | m.LaneEnded | m.End | m.Opened | m.Failed) -> None:
        self._do(do.Tell(self.number, message))

    def _tell_begun(self, epoch: Epoch) -> None:
        if epoch.splits is not None and self.wanted == epoch.number and self.error is None:
            self._tell(m.Begun(epoch.number, epoch.splits.digest))

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
            self._list(epoch)

    def _list(self, epoch: Epoch) -> None:
        epoch.listing = self._crew.home(epoch.number + epoch.listings), next(self._ids)
        epoch.listings += 1
        self._do(do.ListSplits(*epoch.listing, self.feed.name, epoch.number))

    def _plan(self, epoch: Epoch, splits: SplitsInfo) -> None:
        try:
            epoch.plan(self.feed, splits, 1 if self._exact else max(1, len(self._crew.hands)))
        except StateMismatch as error:
            epoch.error = error
        self._tell_begun(epoch)

    # --- delivery ---

    def _deliver(self) -> None:
        if self.wanted is None:
            return
        epoch = self._epochs[0]
        if epoch.error is not None:
            self.fail(epoch.error)
        if epoch.order is None or self.error is not None:
            return
        window = epoch.order.window
        position = 0
        while position < len(window):
            turn = window[position]
            while turn.parts:
                if epoch.skip:
                    self._pass_by(epoch, turn)
                    continue
                if not self.reader.has_credit_for(self.feed.nbytes_of(turn.parts[0])):
                    return
                self._send(epoch, turn, turn.parts.popleft())
            if turn.error is not None:
                self.fail(turn.error)
                return
            if turn.closed:
                epoch.order.taken(position)
                self._tell_lane_ended(epoch, turn)
                self.making.settle(epoch, turn)
            elif self._exact:
                return
            else:
                position += 1
        if epoch.order.finished:
            self._end(epoch, epoch.order)

    def _send(self, epoch: Epoch, turn: Turn, part: Part) -> None:
        nbytes = self.feed.nbytes_of(part)
        seq = self.reader.send(turn, nbytes)
        epoch.slabs += 1
        epoch.batches += part.batches
        epoch.rows += part.rows
        self._do(
            do.Deliver(
                stream=self.number,
                ticket=turn.ticket,
                start=self.feed.start_of(part),
                nbytes=nbytes,
                seq=seq,
                epoch=epoch.number,
                lane=turn.lane,
                index=turn.index + part.first,
                batches=part.batches,
                rows=part.rows,
                shapes=part.shapes,
                record=part.record,
            )
        )

    def _pass_by(self, epoch: Epoch, turn: Turn) -> None:
        """Drop what the position's `skip` still asks for of the turn's next part."""
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
        epoch.batches += passed.batches
        epoch.rows += passed.rows
        index = turn.index + passed.first
        self._tell(m.Passed(epoch.number, turn.lane, index, passed.batches, passed.rows, passed.record))

    def _tell_lane_ended(self, epoch: Epoch, turn: Turn) -> None:
        if turn.number >= 0 and not self._indexable:
            lane = epoch.lanes[turn.lane]
            self._tell(m.LaneEnded(epoch.number, turn.number, turn.lane, lane.index, turn.leftover, lane.record))

    def _end(self, epoch: Epoch, order: EpochOrder) -> None:
        plan, wanted = self.feed.plan, self.feed.info.samples
        seen = epoch.batches if plan.batch_size is None else epoch.rows + order.dropped_rows
        if plan.length is not None and plan.drop_remainder:
            wanted = epoch.rows
        name, what = self.feed.name, "batches" if plan.batch_size is None else "samples"
        if not seen and wanted != 0:
            self.fail(IncompleteEpoch(f"epoch {epoch.number} is empty: the generator yielded nothing", feed=name))
        elif wanted is not None and seen != wanted:
            said = f"epoch {epoch.number} had {seen} {what}, but the feed says samples={wanted}"
            self.fail(IncompleteEpoch(f"{said}: correct it, or leave it out", feed=name))
        else:
            self._epochs.popleft()
            self.wanted = None
            self._tell(m.End(epoch.number, epoch.slabs, epoch.batches, epoch.rows))
            self.reader.ends += 1
            self._close_epoch(epoch)

    # --- production ---

    def _grant(self) -> None:
        # The next epoch's first batches are made while the consumer validates or saves.
        if (
            len(self._epochs) < 2
            and self._stopping is None
            and all(epoch.order is not None and not epoch.order.more for epoch in self._epochs)
        ):
            self._open_next_epoch()
        for epoch in self._epochs:
            order = epoch.order
            if order is None:
                return
            while order.ungranted or (order.more and not epoch.failing):
                if self.making.slots_used >= self.share.production - self._kept_for_head(epoch, order):
                    return
                if order.ungranted:
                    self.making.hold(epoch, order.ungranted.popleft())
                else:
                    turn = self._next_visit(epoch, order)
                    if turn is None:
                        return
                    self.making.hold(epoch, turn)

    def _kept_for_head(self, epoch: Epoch, order: EpochOrder) -> int:
        """How many slots the next grant must leave: one, unless it is for the head itself.

        In fast order whatever is ready is the head, but what is left over of an epoch comes after its last visit.
        """
        if epoch is not self._epochs[0]:
            return 1
        if not self._exact:
            return 0
        if order.ungranted:
            return int(order.window[0] is not order.ungranted[0])
        return int(bool(order.window))

    def _next_visit(self, epoch: Epoch, order: EpochOrder) -> Turn | None:
        """The next visit: in fast order in the group that has least to do, if any has little enough."""
        if self._exact:
            turn = order.visit()
            if turn is not None and self._indexable:
                turn.worker = self._crew.home(turn.index // self.feed.turn)
            return turn
        most = max(1, self.share.production // epoch.groups)
        for group in sorted(range(epoch.groups), key=epoch.filling.__getitem__):
            if epoch.filling[group] >= most:
                break
            turn = order.visit(group)
            if turn is not None:
                turn.group = group
                turn.worker = self._crew.home(group)
                return turn
        return None

    def _close_epoch(self, epoch: Epoch) -> None:
        self.making.close_epoch(epoch)
        if epoch.splits is not None and self.feed.static_splits is None:
            self._do(do.ForgetSplits(epoch.splits.number))

    def _stop_production(self) -> None:
        self.wanted = None
        while self._epochs:
            self._close_epoch(self._epochs.popleft())
