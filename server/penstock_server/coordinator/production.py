"""Production: which turns of a stream are being made, in which slots and by which runs, also after a worker has ended.

The rule: what a worker has reported is in its slot and counts. Whatever else it was to make is made again, from the
lane's last restart record on, by another worker. So the end of a worker changes nothing that is sent.

What is the same for all feeds is here; see lane_production.py and range_production.py for the rest. Commands go to
`out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from penstock_proto import GeneratorError, PenstockError, ProtocolError
from penstock_proto.layout import TAIL_LANE
from penstock_proto.messages import Made, RowsMeasured

from . import commands as do
from . import failures
from .epoch import Epoch
from .feeds import ServedFeed, Skipped
from .lane import Filler, Lane
from .slots import Slots
from .turn import ABANDONED, COMPLETE, DONE, FILLING, IDLE, PLANNED, WAITING, Leftover, Part, Repeat, Turn, TurnState
from .workers import Workers


class Production(ABC):
    """See the file's head.

    Args:
        feed: what is made.
        epochs: the stream's open epochs; the stream adds and removes them.
        slots: the stream's slots.
        workers: the worker processes.
        ids: gives numbers to runs.
        singly: whether workers report each batch by itself.
        later: called to try a run's work again in so many seconds.
        out: where commands go.

    Attributes:
        slot_nbytes: bytes of a new slot.
        turns: how many turns are being made or wait for their place in the order.
    """

    def __init__(
        self,
        feed: ServedFeed,
        epochs: deque[Epoch],
        slots: Slots,
        *,
        workers: Workers,
        ids: Iterator[int],
        singly: bool,
        later: Callable[[float, int], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self.feed = feed
        self.slot_nbytes = feed.slot_nbytes
        self.turns = 0
        self._epochs = epochs
        self._slots = slots
        self._workers = workers
        self._ids = ids
        self._singly = singly
        self._later = later
        self._do = out
        self._open: dict[int, tuple[Epoch, Turn]] = {}
        """The turns that are not complete, by ticket."""
        self._repeats: dict[int, Repeat] = {}
        """The copies that are not made, by ticket."""

    # --- turns, from the stream ---

    def begin(self, epoch: Epoch, turn: Turn) -> None:
        """Get a slot for the turn, and then have it filled."""
        turn.become(WAITING)
        turn.slot = self._slots.acquire(self.slot_nbytes)
        self._open[turn.slot.ticket] = epoch, turn
        self.turns += 1
        if turn.lane != TAIL_LANE:
            if epoch.lane_sets is not None:
                epoch.lane_sets.begins(turn.lane_set)
            epoch.lane(self._key(turn)).turns.append(turn)

    def settle(self, epoch: Epoch, turn: Turn) -> None:
        """The order has done with the turn: all of it was delivered, or its epoch is closed."""
        if turn.state is FILLING:
            turn.become(ABANDONED)
        elif turn.state is COMPLETE:
            self._done(turn)
        elif turn.state is not PLANNED:
            self._complete(epoch, turn, DONE)

    def repeat(self, turn: Turn, part: Part) -> Repeat:
        """A copy of this batch, to be made in a slot of its own. The caller holds that slot, and keeps the original."""
        repeat = Repeat(turn, replace(part, record=b""), self._slots.acquire(self.slot_nbytes))
        self._repeats[repeat.slot.ticket] = repeat
        return repeat

    def let_go(self, repeat: Repeat) -> None:
        """The caller of `repeat` holds the copy no longer."""
        self._slots.release(repeat.slot)
        if repeat.slot.ticket not in self._slots:
            self._repeats.pop(repeat.slot.ticket, None)

    def close_epoch(self, epoch: Epoch) -> None:
        """Nothing of the epoch is wanted any longer."""
        for lane in epoch.lanes.values():
            if lane.run is not None:
                self._drop(epoch, lane)
        if epoch.order is not None:
            for turn in epoch.order.drop():
                turn.parts.clear()
                self.settle(epoch, turn)

    # --- events from the host and from workers ---

    def slot_found(self, ticket: int) -> bool:
        """The ticket has its slot. Returns whether something may be sent now: its turn ended, or failed, at once."""
        if (repeat := self._repeats.get(ticket)) is not None:
            self._copy(repeat)
        epoch, turn = self._turn_of(ticket)
        if epoch is None or turn is None:
            return False
        turn.become(IDLE)
        if turn.merged:
            self._write_leftovers(epoch, turn, set(turn.leftovers))
        else:
            self._fill(epoch, self._key(turn))
        return turn.shows

    def copied(self, ticket: int) -> None:
        """The copy in the ticket's slot is there."""
        repeat = self._repeats.pop(ticket)
        repeat.made = True
        self._stop_copying(repeat)

    def no_slot(self, ticket: int) -> None:
        """The ticket has no slot, or a copy could not be made in it."""
        repeat = self._repeats.pop(ticket, None)
        if repeat is not None and repeat.copying:
            self._stop_copying(repeat)

    def made(self, made: Made) -> None:
        """A part of a turn is in its slot, or the run has no more for it (`last`)."""
        epoch, turn = self._open.get(made.ticket, (None, None))
        if epoch is None or turn is None or not turn.fillers or turn.fillers[0][1] != made.run:
            return
        lane = epoch.lane(self._key(turn))
        if made.batches:
            turn.made += made.batches
            lane.index, lane.failures, lane.unexplained = turn.index + turn.made, 0, 0
            if not turn.settled and epoch.order is not None:
                self._add(turn, Part(turn.base + made.first, made.batches, made.rows, made.shapes, made.record))
                epoch.order.came(turn)
        if made.batches or made.ended:
            lane.record, lane.border, lane.skip = made.record, made.border, ()
        if made.last:
            turn.fillers = []
            turn.ended, turn.leftover = made.ended, made.leftover
            if made.ended:
                self._lane_ended(epoch, lane)
            if turn.settled:
                self._complete(epoch, turn, DONE)
            elif made.ended or turn.made == turn.batches:
                self._complete(epoch, turn, COMPLETE)
            elif lane.dropped is not None:
                turn.become(IDLE)
            else:
                said = f"a worker made {turn.made} of {turn.batches} batches and did not say that the lane has ended"
                self._fail_turn(epoch, turn, ProtocolError(said, feed=self.feed.name))
                self._complete(epoch, turn, COMPLETE)
            self._answered(epoch, lane)

    def _add(self, turn: Turn, part: Part) -> None:
        """Add a part behind those that wait. It joins the one before it to one slab if the batches of both are full."""
        before, full = turn.parts[-1] if turn.parts else None, self.feed.plan.batch_size
        if (
            before
            and full
            and not self._singly
            and before.rows == full * before.batches
            and part.rows == full * part.batches
        ):
            turn.parts.pop()
            part = Part(before.first, before.batches + part.batches, before.rows + part.rows, (), part.record)
        turn.parts.append(part)

    def rows_measured(self, said: RowsMeasured) -> int:
        """A run has measured its rows of a merged batch. Returns the batch's bytes, or 0 while not all are known."""
        epoch, turn = self._turn_of(said.ticket)
        if epoch is None or turn is None or turn.settled or turn.shapes:
            return 0
        columns, runs = self.feed.columns, {filler[1] for filler in turn.fillers}
        for part in turn.leftovers:
            lane = epoch.lane(part.lane)
            if lane.run is not None and lane.run[1] == said.run and said.run in runs:
                if not columns.fit(said.sizes):
                    text = f"a worker said that leftover rows have the sizes {said.sizes}"
                    self._fail_turn(epoch, turn, ProtocolError(text, feed=self.feed.name))
                turn.sizes[part] = said.sizes
        if turn.error is not None or len(turn.sizes) < len(turn.leftovers):
            return 0
        turn.shapes = columns.shapes(turn.rows, columns.joined(turn.sizes.values()))
        return self.feed.layout(turn.shapes).nbytes

    def rows_answered(self, ticket: int, run: int) -> None:
        """A run has written its rows of a merged batch, or measured them."""
        epoch, turn = self._turn_of(ticket)
        if epoch is None or turn is None:
            return
        turn.fillers = [filler for filler in turn.fillers if filler[1] != run]
        if turn.fillers:
            return
        if turn.settled:
            self._complete(epoch, turn, DONE)
        elif turn.error is None and turn.measuring:
            self._merge_measured(epoch, turn)
        else:
            if turn.error is None:
                turn.parts.append(Part(0, 1, turn.rows, turn.shapes))
            self._complete(epoch, turn, COMPLETE)
        for leftover in turn.leftovers:
            self._consider_moving(epoch, epoch.lane(leftover.lane))

    def needs(self, ticket: int, run: int) -> bool:
        """Whether the ticket's turn is still wanted, and this run is to make it."""
        _, turn = self._turn_of(ticket)
        return turn is not None and not turn.settled and any(filler[1] == run for filler in turn.fillers)

    def enlarge(self, ticket: int) -> None:
        """The next batch of the ticket's turn did not fit into its slot. New slots are large enough by now."""
        epoch, turn = self._open[ticket]
        turn.fillers = []
        turn.become(WAITING)
        self._slots.enlarge(turn.slot, self.slot_nbytes)
        self._answered(epoch, epoch.lane(self._key(turn)))

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run. The worker has closed it with all of its turns."""
        for epoch in self._epochs:
            for key, lane in list(epoch.lanes.items()):
                if lane.run is not None and lane.run[1] == run:
                    self._lane_failed(epoch, key, lane, lane.run, error)
                elif lane.dropped is not None and lane.dropped[1] == run:
                    self._unassign(lane, run)
                    self._answered(epoch, lane)
        self._complete_abandoned(lambda filler: filler[1] == run)

    def split_skipped(self, run: int, number: int, skipped: Skipped) -> bool:
        """The run leaves out the rest of a split; one that replays says so again. Returns whether it is new."""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                if lane.run is not None and lane.run[1] == run and number not in lane.skipped:
                    lane.skipped.append(number)
                    self.feed.skip(replace(skipped, epoch=epoch.number))
                    return True
        return False

    def retry(self, run: int) -> None:
        """The pause after this run's failure is over."""
        for epoch in self._epochs:
            for key, lane in epoch.lanes.items():
                if lane.pause == run:
                    lane.waited()
                    self._fill(epoch, key)

    def worker_died(self, worker: int, how: str, blamed: tuple[int, int, str] | None) -> None:
        """The worker's process is gone, with all of its runs. Others go on from the last restart records.

        `blamed`: the run that it worked on; the split's number within the lane, or -1 if it died outside of user code;
        and the split's name. None if it worked on nothing.
        """
        for epoch in self._epochs:
            epoch.moved = True
            lost: set[int] = set()
            writers: dict[int, int] = {}  # the lanes of its runs that may be writing leftovers
            for key, lane in epoch.lanes.items():
                if lane.run is not None and lane.run[0] == worker:
                    _, run = epoch.stop(lane)
                    writers[run] = key
                    if blamed is not None and blamed[0] == run:
                        self._blame(epoch, lane, blamed, worker, how)
                    self._unassign(lane, run)
                    lost.add(key)
                if lane.dropped is not None and lane.dropped[0] == worker:
                    run = lane.dropped[1]
                    lane.released()
                    if blamed is not None and blamed[0] == run:
                        self._blame(epoch, lane, blamed, worker, how)
                    self._unassign(lane, run)
                    lost.add(key)
            for key in sorted(lost):
                self._hand_over(epoch, key)
            for turn in self._merges(epoch):
                lanes = {writers[run] for writer, run in turn.fillers if writer == worker}
                if lanes:  # not of other lanes: a run that wrote twice might do so when the slot is another's
                    self._take_from(turn, lambda filler: filler[0] == worker)
                    self._write_leftovers(epoch, turn, {part for part in turn.leftovers if part.lane in lanes})
        self._complete_abandoned(lambda filler: filler[0] == worker)

    # --- workers come and go ---

    def workers_changed(self) -> None:
        """Workers came, or are to leave: lanes move when they come to a border."""
        for epoch in self._epochs:
            epoch.moved = True
            for lane in epoch.lanes.values():
                self._consider_moving(epoch, lane)

    def move_all(self, worker: int) -> None:
        """Move the lanes of this worker now, whatever is to be made again for it."""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                if lane.run is not None and lane.run[0] == worker:
                    self._let_go(epoch, lane)

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        for epoch in self._epochs:
            if epoch.runs[worker] or any(
                lane.dropped is not None and lane.dropped[0] == worker for lane in epoch.lanes.values()
            ):
                return True
        return any(filler[0] == worker for _, turn in self._open.values() for filler in turn.fillers)

    # --- what lanes and ranges do differently ---

    @abstractmethod
    def next_visit(self, epoch: Epoch, most: int) -> Turn | None:
        """The epoch's next visit, if one can be made now. In fast order no set of lanes gets more than its part of
        `most` turns at a time."""

    @abstractmethod
    def _key(self, turn: Turn) -> int:
        """The number of the turn's entry in `Epoch.lanes`."""

    @abstractmethod
    def _lane_ended(self, epoch: Epoch, lane: Lane) -> None:
        """A run has found that the lane has no further full batch."""

    @abstractmethod
    def _worker_for(self, epoch: Epoch, key: int) -> int:
        """The worker that gets the lane's next run."""

    @abstractmethod
    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        """Take the lane from its worker if that is to leave, or has two lanes more than another one."""

    @abstractmethod
    def _let_go(self, epoch: Epoch, lane: Lane) -> None:
        """Have the lane's run dropped now; another goes on when that has answered."""

    @abstractmethod
    def _hand_over(self, epoch: Epoch, key: int) -> None:
        """The lane's run is gone: have its turns made by others, or let them fail."""

    @abstractmethod
    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """A worker died while it worked on the lane: pause, leave out the split, or let the lane fail."""

    # --- runs ---

    def _fill(self, epoch: Epoch, key: int) -> None:
        """Have those turns of the lane filled that have a slot, in order."""
        lane = epoch.lane(key)
        if lane.waits:
            return
        for turn in list(lane.turns):
            if turn.fillers:
                continue
            if lane.error is not None:
                self._fail_turn(epoch, turn, lane.error)
                self._complete(epoch, turn, COMPLETE)
                continue
            if turn.state is WAITING:
                break
            if lane.ended:  # the visit finds nothing
                turn.ended = True
                self._complete(epoch, turn, COMPLETE)
                continue
            worker, run = lane.run or self._start(epoch, key, lane)
            turn.fillers = [(worker, run)]
            turn.base = turn.made
            turn.become(FILLING)
            ticket, left = turn.slot.ticket, turn.batches - turn.made
            self._do(do.Fill(worker, run, ticket, turn.index + turn.made, left, turn.made))

    def _start(self, epoch: Epoch, key: int, lane: Lane) -> Filler:
        """Open a run for the lane."""
        run = self._worker_for(epoch, key), next(self._ids)
        epoch.start(lane, run)
        self._do(
            do.StartRun(
                *run,
                feed=self.feed.name,
                epoch=epoch.number,
                lane=0 if self.feed.plan.length is not None else key,
                splits=epoch.splits.number if epoch.splits else 0,
                record=lane.record,
                skip=lane.skip,
                careful=failures.ALL if self._singly else lane.careful,
                ahead=lane.ahead,
            )
        )
        return run

    def _drop(self, epoch: Epoch, lane: Lane) -> Filler:
        run = epoch.stop(lane)
        self._do(do.DropRun(*run))
        return run

    def _answered(self, epoch: Epoch, lane: Lane) -> None:
        """A run of the lane has ended its work on a turn."""
        if lane.dropped is not None and not lane.busy:
            lane.released()
            for key, other in epoch.lanes.items():
                if other is lane:
                    self._fill(epoch, key)
                    break
        else:
            self._consider_moving(epoch, lane)

    def _unassign(self, lane: Lane, run: int) -> None:
        """The run does nothing more for the lane's turns."""
        for turn in lane.turns:
            self._take_from(turn, lambda filler: filler[1] == run)

    def _take_from(self, turn: Turn, gone: Callable[[Filler], bool]) -> None:
        """These fillers of the turn are gone."""
        turn.fillers = [filler for filler in turn.fillers if not gone(filler)]
        if not turn.fillers and turn.state is FILLING:
            turn.become(IDLE)

    def _lane_failed(self, epoch: Epoch, key: int, lane: Lane, run: Filler, error: PenstockError) -> None:
        self._drop(epoch, lane)
        self._unassign(lane, run[1])
        if self.feed.plan.on_error == "retry" and isinstance(error, GeneratorError) and not lane.ended:
            lane.failures += 1
            self._pause(lane, run[1], lane.failures)
        else:
            lane.fail(error)
            self._hand_over(epoch, key)
        for turn in self._merges(epoch):
            if run in turn.fillers:
                self._take_from(turn, lambda filler: filler == run)
                self._fail_turn(epoch, turn, error)
                if not turn.fillers:
                    self._complete(epoch, turn, COMPLETE)

    def _pause(self, lane: Lane, run: int, times: int) -> None:
        """Let the lane wait before the next try. Where tries are limited, or it got further since the last one, the
        pause is short, so that it does not hold up the stream."""
        lane.wait(run)
        self._later(failures.pause(times if self.feed.plan.on_error == "retry" else 1), run)

    # --- merged batches and copies ---

    def _write_leftovers(self, epoch: Epoch, turn: Turn, wanted: set[Leftover]) -> None:
        """Have those leftovers of a merged batch written that are wanted (again), or, before that, measured."""
        turn.measuring = self.feed.varies and not turn.shapes
        row = 0
        for part in turn.leftovers:
            lane = epoch.lane(part.lane)
            if lane.error is not None:
                self._fail_turn(epoch, turn, lane.error)
            elif part in wanted and part not in (turn.sizes if turn.measuring else ()) and self._may_fill(turn):
                worker, run = lane.run or self._start(epoch, part.lane, lane)
                turn.fillers.append((worker, run))
                if turn.state is IDLE:
                    turn.become(FILLING)
                if turn.measuring:
                    self._do(do.MeasureRows(worker, run, turn.slot.ticket, part.start, part.count))
                else:
                    self._do(self._write_rows(turn, part, row, (worker, run)))
            row += part.count
        if turn.state is not WAITING and not turn.fillers:
            self._complete(epoch, turn, COMPLETE)

    @staticmethod
    def _may_fill(turn: Turn) -> bool:
        return turn.state is not WAITING and turn.error is None

    def _write_rows(self, turn: Turn, part: Leftover, row: int, filler: Filler) -> do.WriteRows:
        """The command to write this part of a merged batch from `row` on."""
        before = turn.leftovers[: turn.leftovers.index(part)]
        return do.WriteRows(
            *filler,
            ticket=turn.slot.ticket,
            start=part.start,
            count=part.count,
            row=row,
            rows=turn.rows,
            index=turn.index,
            shapes=turn.shapes,
            before=self.feed.columns.joined(turn.sizes[other] for other in before) if turn.shapes else (),
            sizes=turn.sizes.get(part, ()),
        )

    def _merge_measured(self, epoch: Epoch, turn: Turn) -> None:
        """All runs have answered that were to measure rows of a merged batch: have it written, if its slot is large
        enough, or get one that is."""
        if turn.shapes and self.feed.layout(turn.shapes).nbytes > turn.slot.nbytes:
            turn.become(WAITING)
            self._slots.enlarge(turn.slot, self.slot_nbytes)
        else:
            turn.become(IDLE)
            self._write_leftovers(epoch, turn, set(turn.leftovers))

    def _merges(self, epoch: Epoch) -> Iterator[Turn]:
        """The merged batches of the epoch that are wanted and not complete."""
        for other, turn in list(self._open.values()):
            if other is epoch and turn.merged and not turn.complete and not turn.settled:
                yield turn

    def _copy(self, repeat: Repeat) -> None:
        repeat.copying = True
        for slot in (repeat.slot, repeat.original.slot):  # while they are written and read
            self._slots.hold(slot)
        regions = self.feed.layout(repeat.part.shapes).regions(repeat.part.first, repeat.part.batches)
        tickets = repeat.slot.ticket, repeat.original.slot.ticket
        self._do(do.Copy(*tickets, repeat.part.first, tuple(regions)))

    def _stop_copying(self, repeat: Repeat) -> None:
        repeat.copying = False
        for slot in (repeat.slot, repeat.original.slot):
            self._slots.release(slot)

    # --- the end of a turn ---

    def _complete(self, epoch: Epoch, turn: Turn, state: TurnState) -> None:
        """No run fills the turn's slot any longer. `state` is DONE if the order has done with it, else COMPLETE."""
        del self._open[turn.slot.ticket]
        if turn.lane != TAIL_LANE:
            if epoch.lane_sets is not None:
                epoch.lane_sets.ends(turn.lane_set)
            epoch.lane(self._key(turn)).turns.remove(turn)
        if state is DONE:
            self._done(turn)
        else:
            turn.become(state)
            if epoch.order is not None:
                epoch.order.completed(turn)

    def _done(self, turn: Turn) -> None:
        """The turn leaves production. Its slot is free unless a consumer still has slabs in it."""
        turn.become(DONE)
        self.turns -= 1
        self._slots.release(turn.slot)

    def _complete_abandoned(self, lost: Callable[[Filler], bool]) -> None:
        """Turns that nobody wants are done when their fillers are gone."""
        for epoch, turn in list(self._open.values()):
            if turn.settled and any(map(lost, turn.fillers)):
                self._take_from(turn, lost)
                if not turn.fillers:
                    self._complete(epoch, turn, DONE)

    def _fail_turn(self, epoch: Epoch, turn: Turn, error: PenstockError) -> None:
        """The stream fails when this turn is next."""
        turn.error = error
        epoch.failing = True
        if not turn.settled and epoch.order is not None:
            epoch.order.came(turn)

    def _turn_of(self, ticket: int) -> tuple[Epoch, Turn] | tuple[None, None]:
        return self._open.get(ticket, (None, None))
