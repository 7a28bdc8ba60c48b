"""One stream: the epochs of a feed as one consumer reads them, in order, within the slots that it may hold.

The rule that keeps it alive: slots are granted in stream order, at most `production` of them are being made or wait for
their place, and one of those is kept for the head. What was sent is the consumer's, bounded by credit and quota, and
comes back by itself. So whatever stands next in the order can always be made.

The rule that keeps it the same: what a worker has reported is in its slot and counts; whatever else it was to make is
made again, from the lane's last restart record on, by whoever is there. So a worker's end changes nothing that is sent.

Events are methods; what is to be done goes to `out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
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
from penstock_proto.layout import TAIL_LANE
from penstock_proto.position import Position

from . import commands as do
from .crew import Crew
from .epoch import Epoch, Filler, Lane
from .feeds import ServedFeed, Skipped, SplitsInfo
from .memory import Share
from .order import EpochOrder, Leftover, Part, Turn
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
        self.slot_nbytes = feed.slot_nbytes
        self._exact = feed.plan.order == "exact"
        self._indexable = feed.plan.length is not None
        self._crew = crew
        self._do = out
        self._ids = itertools.count(number * IDS_PER_STREAM)
        self._epochs: deque[Epoch] = deque()
        self._position = position
        self._next_epoch = position.epoch if position else 0
        self._tickets: dict[int, tuple[Epoch, Turn]] = {}
        self._production = 0
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
        self.advance()

    def acknowledge(self, handed: int, released: tuple[int, ...], ended: int) -> None:
        """`handed` slabs in all are handed (or void), over those in `released` no tensor lives, `ended` Ends came.

        Raises:
            ProtocolError: counts that cannot be.
        """
        for turn in self.reader.acknowledge(handed, released, ended):
            self._came_back(turn)
        self._stop_when_delivered()
        self.advance()

    def leave(self, number: int) -> None:
        """The consumer leaves this epoch before its end."""
        if self.wanted == number:
            self.wanted = None
            self._close_epoch(self._epochs.popleft())
            self._stop_when_delivered()
            self.advance()

    def close(self) -> None:
        """The consumer wants nothing more; slots under its tensors come back as it releases them."""
        if not self._closing:
            self._closing = True
            self._stop_production()

    def lost(self) -> None:
        """The consumer is gone, and every tensor with it: all of its slots come back."""
        self.close()
        for turn in self.reader.lost():
            self._came_back(turn)

    def stop(self, reason: DaemonStopped) -> None:
        """The daemon wants to stop: the epoch that is being read goes on to its end, and none begins."""
        self._stopping = reason
        self._stop_when_delivered()

    # --- events from the host ---

    def slot_found(self, ticket: int) -> None:
        """The ticket has its slot."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or turn.closed:
            return
        turn.slot = True
        if turn.lane == TAIL_LANE:
            self._write_leftovers(epoch, turn, set(turn.leftovers))
        else:
            self._fill(epoch, self._key(turn))
        self.advance()

    def no_slot(self, ticket: int, error: PenstockError) -> None:
        """There is no memory for the ticket's slot: the stream fails, as its run cannot go past this turn."""
        if ticket in self._tickets:
            self.fail(error)

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

    def made(
        self,
        ticket: int,
        run: int,
        part: Part | None,
        *,
        last: bool,
        ended: bool,
        leftover: int,
        record: bytes,
        border: bool,
    ) -> None:
        """A part of a turn is in its slot; `last` ends the run's work on it. `record` is the restart record by now."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or not any(filler[1] == run for filler in turn.fillers):
            return
        lane = epoch.lane(self._key(turn))
        if part is not None:
            part = replace(part, first=turn.base + part.first) if turn.base else part
            turn.made += part.batches
            lane.index, lane.failures = turn.index + turn.made, 0
            if not turn.settled:
                turn.parts.append(part)
        if part is not None or ended:
            lane.record, lane.border, lane.skip = record, border, ()
        if last:
            turn.fillers = []
            complete = ended or turn.made == turn.batches
            if turn.settled or complete:
                turn.ended, turn.leftover = ended, leftover
                lane.ended = ended and not self._indexable
                self._close_turn(epoch, turn)
            elif lane.letting_go is None:
                said = f"a worker made {turn.made} of {turn.batches} batches and did not say that the lane has ended"
                self._fail_turn(epoch, turn, ProtocolError(said, feed=self.feed.name))
                self._close_turn(epoch, turn)
            self._went_by(epoch, lane)
        self.advance()

    def rows_written(self, ticket: int, run: int) -> None:
        """One of the parts of a merged batch is in the slot."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None or turn.closed:
            return
        turn.fillers = [filler for filler in turn.fillers if filler[1] != run]
        if turn.fillers:
            return
        if not turn.settled and turn.error is None:
            turn.parts.append(Part(0, 1, sum(part.count for part in turn.leftovers), ()))
        self._close_turn(epoch, turn)
        for leftover in turn.leftovers:
            self._consider_moving(epoch, epoch.lane(leftover.lane))
        self.advance()

    def needs(self, ticket: int, run: int) -> bool:
        """Whether the ticket's turn is wanted still, and this run is to make it."""
        _, turn = self._tickets.get(ticket, (None, None))
        return turn is not None and not turn.settled and any(filler[1] == run for filler in turn.fillers)

    def resize(self, share: Share, slot_nbytes: int) -> None:
        """From now on the stream has this share, of slots of this size. What is out stays out till it is released."""
        limits = self.share.credit, self.share.quota
        self.slot_nbytes = slot_nbytes
        self.reader.resize(share)
        if (share.credit, share.quota) != limits:
            self._tell(m.Opened(share.credit, share.quota))

    def need_room(self, ticket: int) -> None:
        """The next batch of the ticket's turn did not fit; slots are large enough for it now."""
        epoch, turn = self._tickets[ticket]
        turn.nbytes = self.slot_nbytes
        turn.slot, turn.fillers = False, []
        self._do(do.FindSlot(ticket, self.slot_nbytes))
        self._went_by(epoch, epoch.lane(self._key(turn)))

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run, which is closed with all of its turns."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[1] == run:
                epoch.listing, epoch.error = None, error
            for key, lane in epoch.lanes.items():
                if lane.run is not None and lane.run[1] == run:
                    self._lane_failed(epoch, key, lane, lane.run, error)
                elif lane.letting_go is not None and lane.letting_go[1] == run:
                    self._unassign(lane, run)
                    self._went_by(epoch, lane)
        self._close_unwanted(lambda filler: filler[1] == run)
        self.advance()

    def split_skipped(self, run: int, number: int, skipped: Skipped) -> bool:
        """The run leaves out the rest of a split; one that replays says so again. Returns whether it is new."""
        for epoch in self._epochs:
            for key, lane in epoch.lanes.items():
                if lane.run is not None and lane.run[1] == run and (key, number) not in epoch.skipped:
                    epoch.skipped.add((key, number))
                    self.feed.skip(replace(skipped, epoch=epoch.number))
                    return True
        return False

    def retry(self, run: int) -> None:
        """The pause after this run's failure is over."""
        for epoch in self._epochs:
            for key, lane in epoch.lanes.items():
                if lane.pause == run:
                    lane.pause = None
                    self._fill(epoch, key)
        self.advance()

    def worker_died(self, worker: int, how: str, blamed: tuple[int, int, str] | None) -> None:
        """The worker's process is gone, with all of its runs; `blamed` are the run, the split's number within the lane
        and its name, if it died in user code. Others go on from the last restart records."""
        for epoch in self._epochs:
            epoch.moved = True
            if epoch.listing is not None and epoch.listing[0] == worker:
                self._list_again(epoch, how, blamed is not None and blamed[0] == epoch.listing[1])
            lost: set[int] = set()
            for key, lane in epoch.lanes.items():
                if lane.run is not None and lane.run[0] == worker:
                    run, lane.run = lane.run[1], None
                    if blamed is not None and blamed[0] == run:
                        self._blame(epoch, lane, blamed, f"worker {worker} {how}")
                    self._unassign(lane, run)
                    lost.add(key)
                elif lane.letting_go is not None and lane.letting_go[0] == worker:
                    self._unassign(lane, lane.letting_go[1])
                    lane.letting_go = None
                    lost.add(key)
            for key in sorted(lost):
                self._hand_over(epoch, key)
            for turn in self._merges(epoch):
                if any(filler[0] == worker for filler in turn.fillers):
                    turn.fillers = [filler for filler in turn.fillers if filler[0] != worker]
                    self._write_leftovers(epoch, turn, {part for part in turn.leftovers if part.lane in lost})
        self._close_unwanted(lambda filler: filler[0] == worker)
        self.advance()

    # --- workers come and go ---

    def crew_changed(self) -> None:
        """Workers came, or are to leave: lanes move when they come to a border."""
        for epoch in self._epochs:
            epoch.moved = True
            for lane in epoch.lanes.values():
                self._consider_moving(epoch, lane)
        self.advance()

    def move_all(self, worker: int) -> None:
        """The lanes of this worker move now, whatever is to be made again for it."""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                if lane.run is not None and lane.run[0] == worker:
                    self._let_go(epoch, lane)
        self.advance()

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        for epoch in self._epochs:
            if epoch.listing is not None and epoch.listing[0] == worker:
                return True
            for lane in epoch.lanes.values():
                if worker in [filler[0] for filler in (lane.run, lane.letting_go) if filler is not None]:
                    return True
        return any(filler[0] == worker for _, turn in self._tickets.values() for filler in turn.fillers)

    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        """Let the lane go where its worker is to leave, or has two lanes more than another one."""
        if not epoch.moved or lane.run is None:
            return
        if self._indexable or lane.ended:
            if lane.run[0] in self._crew.leaving and not lane.busy and not self._merges_of(epoch, lane.run[1]):
                self._drop(lane)
            return
        if not lane.border:
            return
        loads = epoch.loads(self._crew.hands)
        if lane.run[0] in loads and loads[lane.run[0]] - min(loads.values()) < 2:
            if max(loads.values()) - min(loads.values()) < 2 and not self._crew.leaving:
                epoch.moved = False
            return
        self._let_go(epoch, lane)

    def _let_go(self, epoch: Epoch, lane: Lane) -> None:
        """Have the lane's run dropped; another goes on when it has answered."""
        if self._indexable or lane.ended:
            return  # its turns are all that it still does
        run = lane.run
        assert run is not None
        self._drop(lane)
        if lane.busy:
            lane.letting_go = run

    def _drop(self, lane: Lane) -> None:
        assert lane.run is not None
        self._do(do.DropRun(*lane.run))
        lane.run = None

    def _went_by(self, epoch: Epoch, lane: Lane) -> None:
        """The lane's run has ended its work on a turn."""
        if lane.letting_go is not None and not lane.busy:
            lane.letting_go = None
            for key, other in epoch.lanes.items():
                if other is lane:
                    self._fill(epoch, key)
                    break
        else:
            self._consider_moving(epoch, lane)

    # --- failures ---

    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], how: str) -> None:
        """A worker died while it read a split of the lane. Once too often, and the feed says what becomes of it."""
        plan, (run, split, name) = self.feed.plan, blamed
        lane.careful = True
        if self._indexable:  # the work that goes elsewhere is a turn
            deaths, split = epoch.deaths, next((turn.index for turn in lane.turns if turn.fillers), 0)
        else:
            deaths = lane.deaths
        deaths[split] += 1
        count = deaths[split]
        if count < plan.attempts or plan.on_error == "retry":
            if count > 1 and not self._indexable:
                self._pause(lane, run, count)
        elif plan.on_error == "skip" and not self._indexable and count < 2 * plan.attempts:
            lane.skip = tuple(sorted({*lane.skip, split}))
        else:
            lane.error = WorkerDied(
                f"a split ended its worker process {count} times in epoch {epoch.number}; the last time {how}. If "
                'memory ran out, fewer workers or a smaller shuffle need less. Feed(on_error="skip") leaves such '
                "splits out",
                feed=self.feed.name,
                split=name or None,
            )

    def _pause(self, lane: Lane, run: int, times: int) -> None:
        lane.pause = run
        self._do(do.Retry(min(30.0, 0.1 * 2 ** min(times, 10)), run))

    def _lane_failed(self, epoch: Epoch, key: int, lane: Lane, run: Filler, error: PenstockError) -> None:
        self._drop(lane)
        self._unassign(lane, run[1])
        if self._indexable:
            lane.error = error
            self._hand_over(epoch, key)
        elif self.feed.plan.on_error == "retry" and not lane.ended:
            lane.failures += 1
            self._pause(lane, run[1], lane.failures)
        else:
            lane.error = error
            self._hand_over(epoch, key)
        for turn in self._merges(epoch):
            if run in turn.fillers:
                turn.fillers.remove(run)
                self._fail_turn(epoch, turn, error)
                if not turn.fillers:
                    self._close_turn(epoch, turn)

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

    def _unassign(self, lane: Lane, run: int) -> None:
        """The run does nothing more for the lane's turns."""
        for turn in lane.turns:
            turn.fillers = [filler for filler in turn.fillers if filler[1] != run]

    def _hand_over(self, epoch: Epoch, key: int) -> None:
        """The lane's run is gone: others make its turns, or they fail."""
        lane = epoch.lane(key)
        if self._indexable:
            turns, lane.turns = lane.turns, deque()
            error, lane.error = lane.error, None
            for turn in turns:
                turn.worker = self._crew.home(turn.index // self.feed.turn)
                epoch.lane(turn.worker).turns.append(turn)
            if error is not None:  # of the turn that was being made
                self._fail_turn(epoch, turns[0], error)
                self._close_turn(epoch, turns[0])
            for other in sorted({turn.worker for turn in turns}):
                self._fill(epoch, other)
            return
        self._fill(epoch, key)

    def _close_unwanted(self, lost: Callable[[Filler], bool]) -> None:
        """Turns that nobody wants are closed when their fillers are lost."""
        for epoch, turn in list(self._tickets.values()):
            if turn.settled and not turn.closed and any(map(lost, turn.fillers)):
                turn.fillers = [filler for filler in turn.fillers if not lost(filler)]
                if not turn.fillers:
                    self._close_turn(epoch, turn)

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
                self._settle(epoch, turn)
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
                if self._production >= self.share.production - self._kept_for_head(epoch, order):
                    return
                if order.ungranted:
                    self._hold(epoch, order.ungranted.popleft())
                else:
                    turn = self._next_visit(epoch, order)
                    if turn is None:
                        return
                    self._hold(epoch, turn)

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

    def _hold(self, epoch: Epoch, turn: Turn) -> None:
        turn.ticket = next(self._ids)
        turn.nbytes = self.slot_nbytes
        self._tickets[turn.ticket] = epoch, turn
        self._production += 1
        if turn.lane != TAIL_LANE:
            epoch.filling[turn.group] += 1
            epoch.lane(self._key(turn)).turns.append(turn)
        self._do(do.FindSlot(turn.ticket, self.slot_nbytes))

    def _key(self, turn: Turn) -> int:
        return turn.worker if self._indexable else turn.lane

    def _fill(self, epoch: Epoch, key: int) -> None:
        """Have the lane's turns filled that have a slot, in order."""
        lane = epoch.lane(key)
        if lane.waits:
            return
        for turn in list(lane.turns):
            if turn.fillers:
                continue
            if lane.error is not None:
                self._fail_turn(epoch, turn, lane.error)
                self._close_turn(epoch, turn)
                continue
            if not turn.slot:
                break
            if lane.ended and not self._indexable:  # the visit finds nothing
                turn.ended = True
                self._close_turn(epoch, turn)
                continue
            worker, run = lane.run or self._start(epoch, key, lane)
            turn.fillers = [(worker, run)]
            start = self.feed.start_of(Part(turn.made, 0, 0, ()))
            turn.base = turn.made
            self._do(do.Fill(worker, run, turn.ticket, turn.index + turn.made, turn.batches - turn.made, start))

    def _start(self, epoch: Epoch, key: int, lane: Lane) -> Filler:
        """Open a run for the lane: at home, or, where workers came or went, with the worker that has fewest lanes."""
        if self._indexable:
            worker = key if key in self._crew.hands else self._crew.home(key)
        elif epoch.moved:
            loads = epoch.loads(self._crew.hands)
            worker = min(loads, key=lambda number: (loads[number], number))
        else:
            worker = self._crew.home(key)
        lane.run = worker, next(self._ids)
        number = 0 if self._indexable else key
        splits = epoch.splits.number if epoch.splits else 0
        self._do(
            do.StartRun(
                *lane.run,
                feed=self.feed.name,
                epoch=epoch.number,
                lane=number,
                splits=splits,
                record=lane.record,
                skip=lane.skip,
                careful=lane.careful,
            )
        )
        return lane.run

    def _write_leftovers(self, epoch: Epoch, turn: Turn, wanted: set[Leftover]) -> None:
        """Have those leftovers of a merged batch written that are wanted (again)."""
        rows = sum(part.count for part in turn.leftovers)
        row = 0
        for part in turn.leftovers:
            lane = epoch.lane(part.lane)
            if lane.error is not None:
                self._fail_turn(epoch, turn, lane.error)
            elif part in wanted and turn.slot and turn.error is None:
                worker, run = lane.run or self._start(epoch, part.lane, lane)
                turn.fillers.append((worker, run))
                self._do(do.WriteRows(worker, run, turn.ticket, part.start, part.count, row, rows, turn.index))
            row += part.count
        if turn.slot and not turn.fillers:
            self._close_turn(epoch, turn)

    def _merges(self, epoch: Epoch) -> Iterator[Turn]:
        """The merged batches of the epoch that are not complete."""
        for other, turn in list(self._tickets.values()):
            if other is epoch and turn.lane == TAIL_LANE and not turn.closed and not turn.settled:
                yield turn

    def _merges_of(self, epoch: Epoch, run: int) -> bool:
        return any(filler[1] == run for turn in self._merges(epoch) for filler in turn.fillers)

    # --- the end of turns and epochs ---

    def _close_turn(self, epoch: Epoch, turn: Turn) -> None:
        """Nobody fills the turn's slot any more."""
        turn.closed = True
        if turn.lane != TAIL_LANE:
            epoch.filling[turn.group] -= 1
            epoch.lane(self._key(turn)).turns.remove(turn)
        if turn.settled:
            self._give_back(turn)
        elif epoch.order is not None:
            epoch.order.closed(turn)

    def _fail_turn(self, epoch: Epoch, turn: Turn, error: PenstockError) -> None:
        """The stream fails when this turn is next."""
        turn.error = error
        epoch.failing = True

    def _settle(self, epoch: Epoch, turn: Turn) -> None:
        """The order is done with the turn: all of it was sent, or its epoch is closed."""
        turn.settled = True
        if turn.closed:
            self._give_back(turn)
        elif not turn.fillers:
            self._close_turn(epoch, turn)

    def _give_back(self, turn: Turn) -> None:
        """The turn leaves production; its slot is free unless the consumer still has slabs of it."""
        self._production -= 1
        if not turn.out:
            self._free(turn)

    def _came_back(self, turn: Turn) -> None:
        """The last slab of the turn came back from the consumer."""
        if turn.closed and turn.settled:
            self._free(turn)

    def _free(self, turn: Turn) -> None:
        del self._tickets[turn.ticket]
        self._do(do.Free(turn.ticket))

    def _close_epoch(self, epoch: Epoch) -> None:
        for lane in epoch.lanes.values():
            if lane.run is not None:
                self._drop(lane)
        if epoch.order is not None:
            for turn in epoch.order.window:
                turn.parts.clear()
                if turn.ticket != -1:
                    self._settle(epoch, turn)
            epoch.order.window.clear()
        if epoch.splits is not None and self.feed.static_splits is None:
            self._do(do.ForgetSplits(epoch.splits.number))

    def _stop_production(self) -> None:
        self.wanted = None
        while self._epochs:
            self._close_epoch(self._epochs.popleft())
