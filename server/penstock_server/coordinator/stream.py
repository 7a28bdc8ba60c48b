"""One stream: the epochs of a feed as one consumer reads them, in order, within the slots that it may hold.

The rule that keeps it alive: slots are granted in stream order, at most `production` of them are being made or wait for
their place, and one of those is kept for the head. What was sent is the consumer's, bounded by credit and quota, and
comes back by itself. So whatever stands next in the order can always be made.

Events are methods; what is to be done goes to `out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from penstock_proto import EndOfStream, IncompleteEpoch, PenstockError, ProtocolError

from . import commands as do
from .feeds import ServedFeed, SplitsInfo
from .memory import Share
from .order import EpochOrder, LaneVisits, Part, RangeVisits, Turn

Filler: TypeAlias = tuple[int, int]
"""(worker, run)."""

IDS_PER_STREAM = 1 << 32
"""Runs and tickets of stream s are numbered from s * IDS_PER_STREAM, so that an id tells its stream."""


@dataclass(slots=True, eq=False)
class Epoch:
    """One epoch of a stream: its order once its splits are known, its runs, and what was sent of it."""

    number: int
    listing: Filler | None = None
    """Set while the splits are being listed."""
    splits: SplitsInfo | None = None
    order: EpochOrder | None = None
    runs: dict[int, Filler] = field(default_factory=dict)
    """By lane, or by worker for an indexable feed."""
    lost: dict[int, PenstockError] = field(default_factory=dict)
    """Why a lane cannot be gone on with, by lane."""
    error: PenstockError | None = None
    """Why there are no splits."""
    failing: bool = False
    """Whether a turn in the order has an error: nothing behind it needs to be made."""
    slabs: int = 0
    batches: int = 0
    rows: int = 0


class Stream:
    """See the file's head.

    Args:
        number: the stream's id, 1 or more.
        feed: what it reads.
        share: the slots it may hold.
        credit_bytes: most bytes under way to the consumer; one slab is always allowed.
        holds_handed: whether a handed slab stays in its slot until released (shared memory) or is free when handed.
        workers: how many workers there are.
        out: where commands go.
    """

    def __init__(
        self,
        number: int,
        feed: ServedFeed,
        share: Share,
        *,
        credit_bytes: int,
        holds_handed: bool,
        workers: int,
        out: Callable[[do.Command], None],
    ) -> None:
        self.number = number
        self.feed = feed
        self.share = share
        self.error: PenstockError | None = None
        self.wanted: int | None = None
        self.begun: int | None = None
        self.sent = 0
        self.handed = 0
        self.slot_nbytes = feed.slot_nbytes
        self._exact = feed.plan.order == "exact"
        self._credit_bytes = credit_bytes
        self._holds_handed = holds_handed
        self._workers = workers
        self._do = out
        self._ids = itertools.count(number * IDS_PER_STREAM)
        self._epochs: deque[Epoch] = deque()
        self._next_epoch = 0
        self._tickets: dict[int, tuple[Epoch, Turn]] = {}
        self._production = 0
        self._filling = [0] * workers
        self._unhanded: deque[tuple[int, int]] = deque()
        self._unhanded_bytes = 0
        self._out: dict[int, Turn] = {}
        self._resized_at = 0
        self._out_before = 0
        self._closing = False
        self._open_next_epoch()

    @property
    def done(self) -> bool:
        """Whether the stream is closed and every slot has come back."""
        return self._closing and not self._tickets

    @property
    def slots(self) -> int:
        """How many slots it holds now."""
        return len(self._tickets)

    @property
    def reserved(self) -> int:
        """Bytes that are kept for it: its share while it lives, then what has not come back yet."""
        return self.held if self._closing or self.error is not None else self.share.nbytes

    @property
    def held(self) -> int:
        """Bytes of the slots that it holds now."""
        return sum(turn.nbytes for _, turn in self._tickets.values())

    # --- events from the consumer ---

    def begin(self, number: int) -> None:
        """The consumer wants this epoch from its start; earlier ones are closed.

        Raises:
            ProtocolError: an epoch is being read, this one has been begun before, or the stream is closed.
        """
        if self.error is not None:
            return  # the consumer has been told
        first = self._epochs[0].number if self._epochs else self._next_epoch
        if self._closing or self.wanted is not None or number < first:
            raise ProtocolError(f"epoch {number} cannot begin: epochs begin one after another", feed=self.feed.name)
        if self.feed.plan.epochs is not None and number >= self.feed.plan.epochs:
            self.fail(EndOfStream(f"the feed has {self.feed.plan.epochs} epochs", feed=self.feed.name))
            return
        while self._epochs and self._epochs[0].number < number:
            self._close_epoch(self._epochs.popleft())
        if not self._epochs:
            self._next_epoch = number
            self._open_next_epoch()
        self.wanted = self.begun = number
        self.advance()

    def acknowledge(self, handed: int, released: tuple[int, ...]) -> None:
        """`handed` slabs in all are handed (or void), and over those in `released` no tensor lives.

        Raises:
            ProtocolError: counts that cannot be.
        """
        if not self.handed <= handed <= self.sent:
            raise ProtocolError(f"{handed} slabs handed of {self.sent} sent, after {self.handed}", feed=self.feed.name)
        self.handed = handed
        while self._unhanded and self._unhanded[0][0] < handed:
            seq, nbytes = self._unhanded.popleft()
            self._unhanded_bytes -= nbytes
            if not self._holds_handed:
                self._release(seq)
        for seq in released:
            if seq >= handed or not self._holds_handed:
                raise ProtocolError(f"slab {seq} is released before it is handed", feed=self.feed.name)
            self._release(seq)
        self.advance()

    def leave(self, number: int) -> None:
        """The consumer leaves this epoch before its end."""
        if self.wanted == number:
            self.wanted = None
            self._close_epoch(self._epochs.popleft())
            self.advance()

    def close(self) -> None:
        """The consumer wants nothing more; slots under its tensors come back as it releases them."""
        if not self._closing:
            self._closing = True
            self._stop_production()

    def lost(self) -> None:
        """The consumer is gone, and every tensor with it: all of its slots come back."""
        self.close()
        for seq in list(self._out):
            self._release(seq)

    # --- events from workers ---

    def splits_listed(self, run: int, splits: SplitsInfo) -> None:
        """The list of splits that `run` was to make is there."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[1] == run:
                epoch.listing = None
                self._plan(epoch, splits)
                self.advance()
                return
        self._do(do.ForgetSplits(splits.number))

    def made(self, ticket: int, part: Part | None, *, last: bool, ended: bool, leftover: int) -> None:
        """A part of a turn is in its slot; `last` closes the turn."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or turn.closed:
            return
        if part is not None and not turn.settled:
            turn.parts.append(part)
            turn.made += part.batches
        if last:
            if not (turn.settled or ended or turn.made == turn.batches):
                said = f"a worker made {turn.made} of {turn.batches} batches and did not say that the lane has ended"
                self._fail_turn(epoch, turn, ProtocolError(said, feed=self.feed.name))
            turn.ended, turn.leftover = ended, leftover
            self._filled(epoch, turn, turn.fillers)
        self.advance()

    def rows_written(self, ticket: int, run: int) -> None:
        """One of the parts of a merged batch is in the slot."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or turn.closed:
            return
        self._filled(epoch, turn, [filler for filler in turn.fillers if filler[1] == run])
        if turn.closed and not turn.settled and turn.error is None:
            turn.parts.append(Part(0, 1, sum(part.count for part in turn.leftovers), ()))
        self.advance()

    def needs(self, ticket: int) -> bool:
        """Whether the ticket's turn is wanted still, and not complete."""
        _, turn = self._tickets.get(ticket, (None, None))
        return turn is not None and not turn.settled and not turn.closed

    def resize(self, share: Share, slot_nbytes: int) -> None:
        """From now on the stream has this share, of slots of this size. What is out stays out till it is released."""
        limits = self.share.credit, self.share.quota
        self.share, self.slot_nbytes = share, slot_nbytes
        self._resized_at, self._out_before = self.sent, len(self._out)
        if (share.credit, share.quota) != limits:
            self._do(do.Limit(self.number, share.credit, share.quota))

    def need_room(self, ticket: int) -> None:
        """The next batch of the ticket's turn did not fit; slots are large enough for it now."""
        _, turn = self._tickets[ticket]
        turn.nbytes = self.slot_nbytes
        ((worker, run),) = turn.fillers
        self._do(do.Grant(worker, run, ticket, turn.index, turn.batches, self.slot_nbytes))

    def no_slot(self, ticket: int, error: PenstockError) -> None:
        """There is no memory for the ticket's slot: the stream fails now, as the run cannot go past this turn."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or turn.closed:
            return
        if not turn.settled:
            self.fail(error)
        self._filled(epoch, turn, turn.fillers)

    def run_failed(self, run: int, error: PenstockError) -> None:
        """The run failed and is closed: the stream fails where it would have had its data."""
        self._lose(lambda filler: filler[1] == run, error)

    def worker_died(self, worker: int, error: PenstockError) -> None:
        """The worker is gone with all of its runs: the stream fails where it would have had their data."""
        self._lose(lambda filler: filler[0] == worker, error)

    def _lose(self, lost: Callable[[Filler], bool], error: PenstockError) -> None:
        for epoch in self._epochs:
            if epoch.listing is not None and lost(epoch.listing):
                epoch.listing, epoch.error = None, error
            for key in [key for key, filler in epoch.runs.items() if lost(filler)]:
                self._do(do.DropRun(*epoch.runs.pop(key)))
                if self.feed.plan.length is None:  # else nothing is lost: another run can make any range
                    epoch.lost[key] = error
        for epoch, turn in list(self._tickets.values()):
            fillers = [filler for filler in turn.fillers if lost(filler)]
            if fillers:
                self._fail_turn(epoch, turn, error)
                self._filled(epoch, turn, fillers)
        self.advance()

    # --- what follows ---

    def fail(self, error: PenstockError) -> None:
        """The stream fails now."""
        if self.error is None and not self._closing:
            self.error = error
            self._do(do.FailStream(self.number, error))
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

    def _open_next_epoch(self) -> None:
        number = self._next_epoch
        if self.feed.plan.epochs is not None and number >= self.feed.plan.epochs:
            return
        self._next_epoch = number + 1
        epoch = Epoch(number)
        self._epochs.append(epoch)
        if self.feed.static_splits is not None:
            self._plan(epoch, self.feed.static_splits)
        else:
            worker, run = number % self._workers, next(self._ids)
            epoch.listing = (worker, run)
            self._do(do.ListSplits(worker, run, self.feed.name, number))

    def _plan(self, epoch: Epoch, splits: SplitsInfo) -> None:
        plan = self.feed.plan
        epoch.splits = splits
        visits: LaneVisits | RangeVisits
        if plan.length is not None:
            assert self.feed.info.batches is not None
            visits = RangeVisits(self.feed.info.batches, self.feed.turn)
        else:
            groups = 1 if self._exact else self._workers
            visits = LaneVisits(min(plan.lanes, splits.count), self.feed.turn, groups)
        epoch.order = EpochOrder(
            visits, batch_size=plan.batch_size, drop_remainder=plan.drop_remainder, exact=self._exact
        )

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
                if not self._credit_for(turn.parts[0]):
                    return
                self._send(epoch, turn, turn.parts.popleft())
            if turn.error is not None:
                self.fail(turn.error)
                return
            if turn.closed:
                epoch.order.taken(position)
                self._settle(turn)
            elif self._exact:
                return
            else:
                position += 1
        if epoch.order.finished:
            self._end(epoch, epoch.order)

    def _credit_for(self, part: Part) -> bool:
        if len(self._out) - self._out_before >= self.share.credit + self.share.quota:
            return False  # only of a consumer that aliases more than it may: its memory stays bounded too
        under_way = len(self._unhanded)
        return not under_way or (
            under_way < self.share.credit and self._unhanded_bytes + self.feed.nbytes_of(part) <= self._credit_bytes
        )

    def _send(self, epoch: Epoch, turn: Turn, part: Part) -> None:
        seq, nbytes = self.sent, self.feed.nbytes_of(part)
        self.sent += 1
        self._unhanded.append((seq, nbytes))
        self._unhanded_bytes += nbytes
        self._out[seq] = turn
        turn.out += 1
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
            )
        )

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
            self._do(do.EndEpoch(self.number, epoch.number, epoch.slabs, epoch.batches, epoch.rows))
            self._close_epoch(epoch)

    # --- production ---

    def _grant(self) -> None:
        # The next epoch's first batches are made while the consumer validates or saves.
        if len(self._epochs) < 2 and all(epoch.order is not None and not epoch.order.more for epoch in self._epochs):
            self._open_next_epoch()
        for epoch in self._epochs:
            order = epoch.order
            if order is None:
                return
            while order.ungranted or (order.more and not epoch.failing):
                if self._production >= self.share.production - self._kept_for_head(epoch, order):
                    return
                if order.ungranted:
                    self._grant_merge(epoch, order.ungranted.popleft())
                elif not self._grant_visit(epoch, order):
                    return

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

    def _next_visit(self, order: EpochOrder) -> tuple[Turn, int] | None:
        """The next visit and who makes it: in fast order the worker that has least to do, if any has little enough."""
        if self._exact:
            turn = order.visit()
            if turn is None:
                return None
            number = turn.lane if self.feed.plan.length is None else turn.index // self.feed.turn
            return turn, number % self._workers
        most = max(1, self.share.production // self._workers)
        for worker in sorted(range(self._workers), key=self._filling.__getitem__):
            if self._filling[worker] >= most:
                break
            turn = order.visit(worker)
            if turn is not None:
                return turn, worker
        return None

    def _grant_visit(self, epoch: Epoch, order: EpochOrder) -> bool:
        found = self._next_visit(order)
        if found is None:
            return False
        turn, worker = found
        key = turn.lane if self.feed.plan.length is None else worker
        if key in epoch.lost:
            self._fail_turn(epoch, turn, epoch.lost[key])
            turn.closed = True
            return False
        if key not in epoch.runs:
            run = next(self._ids)
            epoch.runs[key] = (worker, run)
            splits = epoch.splits.number if epoch.splits else 0
            self._do(do.StartRun(worker, run, self.feed.name, epoch.number, turn.lane, splits))
        worker, run = epoch.runs[key]
        self._hold(epoch, turn, [(worker, run)])
        self._do(do.Grant(worker, run, turn.ticket, turn.index, turn.batches, self.slot_nbytes))
        return True

    def _grant_merge(self, epoch: Epoch, turn: Turn) -> None:
        parts, row = [], 0
        for part in turn.leftovers:
            if part.lane in epoch.lost:
                self._fail_turn(epoch, turn, epoch.lost[part.lane])
                turn.closed = True
                return
            worker, run = epoch.runs[part.lane]
            parts.append(do.Rows(worker, run, part.start, part.count, row))
            row += part.count
        self._hold(epoch, turn, [(part.worker, part.run) for part in parts])
        self._do(do.Merge(turn.ticket, self.slot_nbytes, tuple(parts), row, turn.index))

    def _hold(self, epoch: Epoch, turn: Turn, fillers: list[Filler]) -> None:
        turn.ticket = next(self._ids)
        turn.fillers = fillers
        turn.nbytes = self.slot_nbytes
        self._tickets[turn.ticket] = epoch, turn
        self._production += 1
        for worker, _ in fillers:
            self._filling[worker] += 1

    def _filled(self, epoch: Epoch, turn: Turn, by: list[Filler]) -> None:
        """These are done with the turn's slot. When all are, the turn is closed."""
        for worker, _ in by:
            self._filling[worker] -= 1
        turn.fillers = [filler for filler in turn.fillers if filler not in by]
        if turn.fillers:
            return
        turn.closed = True
        if turn.settled:
            self._give_back(turn)
        elif epoch.order is not None:
            epoch.order.closed(turn)

    def _fail_turn(self, epoch: Epoch, turn: Turn, error: PenstockError) -> None:
        """The stream fails when this turn is next."""
        turn.error = error
        epoch.failing = True

    def _settle(self, turn: Turn) -> None:
        """The order is done with the turn: all of it was sent, or its epoch is closed."""
        turn.settled = True
        if turn.closed:
            self._give_back(turn)

    def _give_back(self, turn: Turn) -> None:
        """The turn leaves production; its slot is free unless the consumer still has slabs of it."""
        self._production -= 1
        self._free_unless_out(turn)

    def _free_unless_out(self, turn: Turn) -> None:
        if not turn.out:
            del self._tickets[turn.ticket]
            self._do(do.Free(turn.ticket))

    def _release(self, seq: int) -> None:
        turn = self._out.pop(seq, None)
        if turn is None:
            raise ProtocolError(f"slab {seq} is released twice, or was never sent", feed=self.feed.name)
        turn.out -= 1
        self._out_before -= seq < self._resized_at
        if turn.closed and turn.settled:
            self._free_unless_out(turn)

    def _close_epoch(self, epoch: Epoch) -> None:
        for worker, run in epoch.runs.values():
            self._do(do.DropRun(worker, run))
        if epoch.order is not None:
            for turn in epoch.order.window:
                turn.parts.clear()
                if turn.ticket != -1:
                    self._settle(turn)
            epoch.order.window.clear()
        if epoch.splits is not None and self.feed.static_splits is None:
            self._do(do.ForgetSplits(epoch.splits.number))

    def _stop_production(self) -> None:
        self.wanted = None
        while self._epochs:
            self._close_epoch(self._epochs.popleft())
