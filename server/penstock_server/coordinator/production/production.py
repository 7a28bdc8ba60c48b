"""Production: decides which runs make the turns of a stream, and which others take over when a worker ends.

The rule: a batch that a worker has reported is in its slot, and production never has it made again. If the worker ends,
another one makes the rest, from the lane's last restart record on. So the end of a worker does not change the stream.

This file has the part that all feeds share; lane_production.py and range_production.py have the rest. Commands go to
`out`. No socket, no clock and no memory here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from penstock_proto import GeneratorError, PenstockError, ProtocolError
from penstock_proto.messages import Made, Shapes

from ..model import commands as do
from ..model import failures
from ..model.feeds import ServedFeed, Skipped
from ..model.leases import Leases, Recipe
from ..model.stripe import Stripe
from ..model.turn import COMPLETE, DONE, FILLING, IDLE, WAITING, Part, Turn
from ..model.workers import REMOTE, VACANT, Workers
from ..order.epoch import Epoch
from ..order.lane import Filler, Lane
from ..order.open_turns import OpenTurns
from ..order.order import EpochOrder
from ..order.striped_order import StripedOrder
from .merging import Merging
from .pooling import Pooling
from .rank_placing import Placing
from .remaking import can_be_made_again


class Production(ABC):
    """The part of production that lanes and ranges share.

    Args:
        feed: the feed whose batches are made.
        epochs: the stream's open epochs; the stream adds and removes them.
        slots: the stream's slots.
        workers: the worker processes.
        ids: numbers for new runs.
        placing: decides where the batches of ranks are made.
        may_stay: whether the batches of remote workers may stay at their hosts.
        later: `later(seconds, run)` tries the run's work again after `seconds`.
        out: where commands go.

    Attributes:
        turns: the turns that are being made, or wait until the order comes to them.
        merging: has the merged batches among them made.
        pooling: has those with rows of pools made, and merged batches transformed.
    """

    def __init__(
        self,
        feed: ServedFeed,
        epochs: deque[Epoch],
        slots: Leases,
        *,
        workers: Workers,
        ids: Iterator[int],
        placing: Placing,
        may_stay: bool,
        later: Callable[[float, int], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self.feed = feed
        self.turns = OpenTurns(slots)
        self._replay = math.inf
        """The latest `Lane.replay`, as an estimate for other lanes."""
        self._epochs = epochs
        self._slots = slots
        self._workers = workers
        self._ids = ids
        self._placing = placing
        self._may_stay = may_stay and can_be_made_again(feed)
        self._later = later
        self._do = out
        self.pooling = Pooling(feed, self.turns, workers=workers, ids=ids, fill=self._fill_again, later=later, out=out)
        self.merging = Merging(feed, self.turns, slots, start=self._start, transform=self.pooling.transform, out=out)

    def close_epoch(self, epoch: Epoch) -> None:
        """Drop the runs and the turns of an epoch that is closed."""
        for lane in epoch.lanes.values():
            if lane.run is not None:
                self._drop(epoch, lane)
        if epoch.order is not None:
            for turn in epoch.order.drop():
                turn.parts.clear()
                self.pooling.drop(turn)
                self.turns.on_left_order(epoch, turn)

    # --- slots that are found, and reports from workers ---

    def on_slot_found(self, ticket: int) -> bool:
        """Have the ticket's turn filled, now that it has its slot. Return True if the turn has ended or failed at once,
        so that something may be sent now. Ignore a turn that is no longer open, because it has failed or its epoch is
        closed."""
        if ticket in self.turns.sharing:
            return self._on_shared_slot_found(self.turns.sharing.pop(ticket))
        epoch, turn = self._turn_of(ticket)
        if epoch is None or turn is None:
            return False
        turn.become(IDLE)
        if turn.merged:
            self.merging.fill(epoch, turn, set(turn.leftovers))
        elif turn.pooled:
            self.pooling.fill(epoch, turn)
        else:
            self._fill(epoch, turn.key)
        return turn.shows

    def _on_shared_slot_found(self, visits: list[tuple[Epoch, Turn]]) -> bool:
        """Have these visits filled, now that they have their slot."""
        visits = [(epoch, visit) for epoch, visit in visits if visit.state is WAITING]
        for _, visit in visits:
            visit.become(IDLE)
        for epoch, visit in visits:
            self._fill(epoch, visit.key)
        return any(visit.shows for _, visit in visits)

    def on_made(self, made: Made) -> None:
        """Add the part that a run has made, if any, to its turn. With `last` the run has answered for the turn. Ignore
        a run that is not to fill the turn: its worker is gone, or it has asked for a larger slot."""
        epoch, turn = self.turns.by_ticket.get(made.ticket, (None, None))
        if epoch is None or turn is None or not turn.fillers or turn.fillers[0][1] != made.run:
            return
        lane = epoch.lane(turn.key)
        if made.batches:
            self.feed.made += made.batches
            if not turn.shares and self._stays(turn.fillers[0][0], turn.base):
                self._keep_recipe(epoch, turn, lane, made.batches)
            turn.made += made.batches
            self._on_batches(turn, made)
            lane.index, lane.failures, lane.unexplained = turn.index + turn.made, 0, 0
            if not turn.left_order and epoch.order is not None:
                if turn.striped:
                    self._add_to_stripe(epoch.order, turn, made)
                else:
                    place = turn.place + turn.base + made.first
                    part = Part(place, made.batches, made.rows, made.shapes, made.record, skipped=made.skipped)
                    self._add(turn, part)
                epoch.order.on_ready(turn)
        if made.batches or made.ended:
            lane.record, lane.border, lane.skip = made.record, made.border, ()
            lane.replay = self._replay = made.replay_ms / 1000
        if made.last:
            turn.fillers = []
            turn.ended, turn.leftover = made.ended, made.leftover
            if made.ended:
                self._on_lane_ended(epoch, lane)
            if turn.left_order:
                self.turns.complete(epoch, turn, DONE)
            elif made.ended or turn.made == turn.batches:
                self.turns.complete(epoch, turn, COMPLETE)
            elif lane.dropped is not None:
                turn.become(IDLE)
            elif not self._cut(epoch, turn):
                said = f"a worker made {turn.made} of {turn.batches} batches and did not say that the lane has ended"
                self.turns.fail(epoch, turn, ProtocolError(said, feed=self.feed.name))
                self.turns.complete(epoch, turn, COMPLETE)
            self._on_answered(epoch, lane)

    def _add(self, turn: Turn, part: Part) -> None:
        """Add a part after those that wait. If the batches of it and of the part before are full, join the two, so that
        they share a slab, unless the record of the part before is needed."""
        before, full = turn.parts[-1] if turn.parts else None, self.feed.plan.batch_size
        if before and full and before.rows == full * before.batches and part.rows == full * part.batches:
            batches, rows = before.batches + part.batches, before.rows + part.rows
            if not before.skipped:
                turn.parts[-1] = replace(part, first=before.first, batches=batches, rows=rows)
                return
        turn.parts.append(part)

    def _add_to_stripe(self, order: EpochOrder, turn: Turn, made: Made) -> None:
        """Add batches of a visit of a stripe: as parts of their own if they are delivered one by one."""
        assert isinstance(order, StripedOrder)
        if not order.singly:
            order.on_record(turn, made.record, needed=made.skipped)
            return
        for number in range(turn.made - made.batches, turn.made):
            record = made.record if number == turn.made - 1 else b""
            rows = made.rows // made.batches
            turn.parts.append(Part(turn.place + number * turn.step, 1, rows, (), record))

    def on_rows_answered(self, ticket: int, run: int, shapes: Shapes = ()) -> None:
        """Note that a run has written or measured its rows of a merged batch, or has transformed it (to `shapes`, if
        batches vary in size), or has copied the rows of pooled batches."""
        epoch, turn = self._turn_of(ticket)
        if epoch is None or turn is None:
            return
        if self.pooling.on_revoked(epoch, turn, run):
            return
        if turn.pooled:
            self.pooling.on_written(epoch, turn, run)
            return
        self.merging.on_answered(epoch, turn, run, shapes)
        for leftover in turn.leftovers:
            self._consider_moving(epoch, epoch.lane(leftover.lane))

    def needs(self, ticket: int, run: int) -> bool:
        """Whether the ticket's turn is still wanted, and this run is to fill it."""
        _, turn = self._turn_of(ticket)
        return turn is not None and not turn.left_order and any(filler[1] == run for filler in turn.fillers)

    def on_unwanted(self, ticket: int, run: int) -> None:
        """Free the slot of a merged batch that has left the order, and does not fit: its worker keeps nothing of it,
        and gives no other answer. (The run of a lane keeps its batch, and answers once it is dropped.)"""
        epoch, turn = self._turn_of(ticket)
        if epoch is not None and turn is not None and turn.transforming:
            self.merging.on_answered(epoch, turn, run)

    def enlarge(self, ticket: int) -> None:
        """Exchange the slot of the ticket's turn for a larger one, because the next batch does not fit. New slots
        already have the larger size."""
        epoch, turn = self.turns.by_ticket[ticket]
        turn.fillers = []
        turn.become(WAITING)
        self._slots.enlarge(turn.slot)
        if turn.lane >= 0:
            self._on_answered(epoch, epoch.lane(turn.key))

    def on_run_failed(self, run: int, error: PenstockError) -> None:
        """Handle a failure of user code in the run. The worker has dropped the run and all its turns."""
        self.feed.errors += 1
        for epoch in self._epochs:
            for key, lane in list(epoch.lanes.items()):
                if lane.run is not None and lane.run[1] == run:
                    self._on_lane_failed(epoch, key, lane, lane.run, error)
                elif lane.dropped is not None and lane.dropped[1] == run:
                    self._unassign(lane, run)
                    self._on_answered(epoch, lane)
        self.pooling.on_run_failed(run, error)
        self.turns.complete_abandoned(lambda filler: filler[1] == run)

    def on_split_skipped(self, run: int, number: int, skipped: Skipped) -> bool:
        """Note that the run leaves out the rest of a split. Return True if this is new: a run that replays reports it
        again. (A run that was dropped may report it, too, before a batch that still counts.)"""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                runs = [filler[1] for filler in (lane.run, lane.dropped) if filler is not None]
                if run in runs and number not in lane.skipped:
                    lane.skipped.append(number)
                    self.feed.skip(replace(skipped, epoch=epoch.number))
                    return True
        return False

    def retry(self, run: int) -> None:
        """Go on with the lane of this run: the pause after the run's failure is over. A lane that has ended workers
        waits until the worker that is set apart for it is ready."""
        for epoch in self._epochs:
            for key, lane in epoch.lanes.items():
                if lane.pause == run and lane.deaths and self._workers.apart in self._workers.away:
                    self._later(failures.FIRST_PAUSE, run)
                elif lane.pause == run:
                    lane.end_pause()
                    self._fill(epoch, key)
                    self.merging.resume(epoch, key)
        self.pooling.retry(run)

    def on_workers_gone(self, workers: Collection[int], how: str, blamed: tuple[int, int, str] | None) -> None:
        """Reassign the work of workers whose processes are gone, with all of their runs. Others go on from the last
        restart records.

        `blamed`: the run that one of them was working on; the number of the split within the lane, or -1 if the worker
        died outside of user code; and the name of the split. None if nothing is to blame.
        """
        for epoch in self._epochs:
            epoch.moved = True
            lost: set[int] = set()
            writers: dict[int, int] = {}  # by run: the lane whose leftovers it may be writing
            for key, lane in epoch.lanes.items():
                if lane.run is not None and lane.run[0] in workers:
                    worker, run = epoch.stop(lane)
                    writers[run] = key
                    if blamed is not None and blamed[0] == run:
                        self._blame(epoch, lane, blamed, worker, how)
                    self._unassign(lane, run)
                    lost.add(key)
                if lane.dropped is not None and lane.dropped[0] in workers:
                    worker, run = lane.dropped
                    if blamed is not None and blamed[0] == run:  # first: another run may write rows of the ended lane
                        self._blame(epoch, lane, blamed, worker, how)
                    lane.on_answered()
                    self._unassign(lane, run)
                    lost.add(key)
            self._reassign(epoch, *sorted(lost))
            for turn in self.turns.merged(epoch):
                writing = [] if turn.transforming else turn.fillers
                lanes = {writers[run] for writer, run in writing if writer in workers}
                if lanes:  # only these: a run that writes its rows twice might do so when the slot has another use
                    self.turns.take_from(turn, lambda filler: filler[0] in workers)
                    self.merging.fill(epoch, turn, {one for one in turn.leftovers if one.lane in lanes})
            self.pooling.on_workers_gone(epoch, workers, how, blamed)
        self.turns.complete_abandoned(lambda filler: filler[0] in workers)

    def _fill_again(self, epoch: Epoch, turn: Turn) -> None:
        """Have a turn made that one of the daemon's own workers has not finished: a merged batch from the start, since
        the worker may have written to it."""
        if turn.pooled:
            self.pooling.fill(epoch, turn)
        else:
            self.merging.fill(epoch, turn, set(turn.leftovers))

    # --- workers come and go ---

    def on_workers_changed(self) -> None:
        """Move lanes when they come to a border: workers came, or are to leave."""
        for epoch in self._epochs:
            epoch.moved = True
            for lane in epoch.lanes.values():
                self._consider_moving(epoch, lane)

    def move_all(self, worker: int) -> None:
        """Move the lanes of this worker now, even if batches have to be made again for it."""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                if lane.run is not None and lane.run[0] == worker:
                    self._move(epoch, lane)

    def on_worker_stands(self, worker: int, seconds: float) -> None:
        """Take from a worker what it has not begun: it has been in one call of user code of another stream for
        `seconds`.

        It is told to drop its runs. When this is called again, it has certainly been sent that. So it writes nothing
        more for them, even if it goes on meanwhile, and their turns go to other runs at once. If it answers first, they
        go to others as after any DropRun. A lane stays as long as others would take longer to read it again. So does
        one with leftover rows that the worker may be writing.
        """
        for epoch in self._epochs:
            epoch.moved = True
            taken: set[int] = set()
            for key, lane in epoch.lanes.items():
                if lane.dropped is not None and lane.dropped[0] == worker:
                    _, run = lane.dropped
                    lane.on_answered()
                    self._unassign(lane, run)
                    taken.add(key)
            self._reassign(epoch, *sorted(taken))
            for lane in list(epoch.lanes.values()):
                if lane.run is not None and lane.run[0] == worker and self._may_be_taken(epoch, lane, seconds):
                    lane.drop(self._drop(epoch, lane))
        self.pooling.on_worker_stands(worker)
        for epoch, turn in list(self.turns.by_ticket.values()):
            if turn.left_order and turn.lane >= 0 and any(filler[0] == worker for filler in turn.fillers):
                turn.fillers = []  # its run was dropped with its epoch
                self.turns.complete(epoch, turn, DONE)

    def _may_be_taken(self, epoch: Epoch, lane: Lane, seconds: float) -> bool:
        """Whether the lane is taken from its worker, which stands for `seconds`."""
        assert lane.run is not None
        worker, run = lane.run
        if lane.waits or not lane.busy or self._replay_of(lane) > seconds:
            return False
        if lane.deaths and worker == self._workers.apart:
            return False
        if self._workers.standing.issuperset(self._placing.workers(lane.number, epoch.lane_count)):
            return False
        return not any(filler[1] == run for turn in self.turns.merged(epoch) for filler in turn.fillers)

    def _replay_of(self, lane: Lane) -> float:
        """Return about how many seconds it costs if another worker goes on with the lane."""
        if lane.replay is not None:
            return lane.replay
        plan = self.feed.plan
        starts_afresh = not (lane.record or lane.ahead)
        return 0.0 if starts_afresh and (plan.length is not None or not plan.shuffle) else self._replay

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        for epoch in self._epochs:
            if epoch.runs[worker] or any(
                lane.dropped is not None and lane.dropped[0] == worker for lane in epoch.lanes.values()
            ):
                return True
        return self.turns.filled_by(worker)

    # --- what lanes and ranges do differently ---

    @property
    def has_place(self) -> bool:
        """Whether the next visit needs no slot, because the one before has left room in its own."""
        return False

    def begin(self, epoch: Epoch, visit: Turn | Stripe) -> None:
        """Ask for a slot for the visit, or for the stripe."""
        if isinstance(visit, Stripe):
            self.turns.begin_stripe(epoch, visit)
        else:
            self.turns.begin(epoch, visit)

    @property
    def _most_ms(self) -> int:
        """After how many milliseconds a run may stop within a visit that shares its slot; 0: not at all."""
        return 0

    def _cut(self, epoch: Epoch, turn: Turn) -> bool:
        """Have the rest of the turn made by others, because its run has stopped within it. Return False if it may
        not."""
        return False

    @abstractmethod
    def next_visit(self, epoch: Epoch, most: int) -> Turn | Stripe | None:
        """Return the epoch's next visit, or its next stripe; None if none can be made now. In fast order a set of lanes
        has at most its share of `most` turns at a time."""

    def _on_batches(self, turn: Turn, made: Made) -> None:  # noqa: B027
        """Note how long batches of the turn took."""

    @abstractmethod
    def _on_lane_ended(self, epoch: Epoch, lane: Lane) -> None:
        """Note that the lane has no further full batch, as a run has found."""

    @abstractmethod
    def _worker_for(self, epoch: Epoch, key: int) -> int:
        """Return the worker that gets the lane's next run."""

    @abstractmethod
    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        """Move the lane if its worker is to leave, has two lanes more than another one, or is not near its reader."""

    @abstractmethod
    def _move(self, epoch: Epoch, lane: Lane) -> None:
        """Drop the lane's run now. Another run goes on when this one has answered for its turns."""

    @abstractmethod
    def _reassign(self, epoch: Epoch, *keys: int) -> None:
        """Have other runs fill the turns of these lanes, whose runs are gone, or fail the turns."""

    @abstractmethod
    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """Pause the lane, leave out the split, or fail the lane: a worker died while it worked on the lane."""

    # --- runs ---

    def _fill(self, epoch: Epoch, key: int) -> None:
        """Tell a run to fill those turns of the lane that have a slot, in order."""
        lane = epoch.lane(key)
        if lane.waits:
            return
        for turn in list(lane.turns):
            if turn.fillers:
                continue
            if lane.error is not None:
                self.turns.fail(epoch, turn, lane.error)
                self.turns.complete(epoch, turn, COMPLETE)
                continue
            if turn.state is WAITING:
                if self.feed.plan.length is not None:
                    continue  # ranges do not depend on each other
                break
            if lane.ended:  # the visit finds nothing
                turn.ended = True
                self.turns.complete(epoch, turn, COMPLETE)
                continue
            worker, run = lane.run or self._start(epoch, key, lane)
            turn.fillers = [(worker, run)]
            turn.base = turn.made
            turn.become(FILLING)
            index, left, place = turn.index + turn.made, turn.batches - turn.made, turn.place + turn.made * turn.step
            if turn.shares:
                shared, step = turn.slot.ticket, turn.step
                most_ms = self._most_ms
                fill = do.Fill(worker, run, turn.ticket, index, left, place, stripe=shared, step=step, most_ms=most_ms)
                self._do(fill)
            else:
                stays, reader = self._stays(worker, turn.base), self._placing.reader(turn.foreseen)
                self._do(do.Fill(worker, run, turn.ticket, index, left, place, stays, reader))

    def _stays(self, worker: int, base: int) -> bool:
        """Whether the batches that the worker makes of a turn, from the turn's batch `base` on, may stay at its host.
        (A turn that another run has begun is continued in the slot.)"""
        return self._may_stay and worker >= REMOTE and not base

    def _keep_recipe(self, epoch: Epoch, turn: Turn, lane: Lane, batches: int) -> None:
        """Keep the recipe of `batches` more batches of the turn, which were reported and may have stayed at a host."""
        if not turn.made:
            number, splits = self._place(epoch, turn.key)
            turn.slot.recipe = Recipe(epoch.number, number, splits, turn.index, lane.record)
        turn.slot.made = turn.made + batches

    def _place(self, epoch: Epoch, key: int) -> tuple[int, int]:
        """Return the lane's number for a StartRun, and the number of the list of splits."""
        return 0 if self.feed.plan.length is not None else key, epoch.splits.number if epoch.splits else 0

    def _start(self, epoch: Epoch, key: int, lane: Lane) -> Filler:
        """Start a run for the lane, and return it."""
        run = self._worker_for(epoch, key), next(self._ids)
        epoch.start(lane, run)
        self.feed.replays += bool(lane.record) and run[0] != VACANT
        number, splits = self._place(epoch, key)
        self._do(
            do.StartRun(
                *run,
                feed=self.feed.name,
                epoch=epoch.number,
                lane=number,
                splits=splits,
                record=lane.record,
                skip=lane.skip,
                careful=lane.careful,
                ahead=lane.ahead,
                sample_spec=self.feed.sample_spec,
            )
        )
        return run

    def _drop(self, epoch: Epoch, lane: Lane) -> Filler:
        """Drop the lane's run, and return it. The caller decides whether the lane waits until the run has answered."""
        run = epoch.stop(lane)
        self._do(do.DropRun(*run))
        return run

    def _on_answered(self, epoch: Epoch, lane: Lane) -> None:
        """Go on with a lane whose run has finished with a turn."""
        if lane.dropped is not None and not lane.busy:
            lane.on_answered()
            self._reassign(epoch, lane.number)
        elif epoch.moved:
            self._consider_moving(epoch, lane)

    def _unassign(self, lane: Lane, run: int) -> None:
        """Take the lane's turns from the run."""
        for turn in lane.turns:
            self.turns.take_from(turn, lambda filler: filler[1] == run)

    def _on_lane_failed(self, epoch: Epoch, key: int, lane: Lane, run: Filler, error: PenstockError) -> None:
        """Pause the lane, or fail it with its turns: user code failed in its run. (If the lane has ended, its run has
        read it again for its leftover rows.)"""
        self._drop(epoch, lane)
        self._unassign(lane, run[1])
        if self.feed.plan.on_error == "retry" and isinstance(error, GeneratorError):
            lane.failures += 1
            self._pause(lane, run[1], lane.failures)
            self.merging.pause(epoch, key, run[1])
        else:
            lane.fail(error)
            self._reassign(epoch, key)
            self.merging.fail(epoch, run[1], error)

    def _pause(self, lane: Lane, run: int, times: int) -> None:
        """Make the lane wait before the next attempt. The pause is short if attempts are limited, or if the lane got
        further since the last attempt, so that the lane does not hold up the stream."""
        lane.wait(run)
        self._later(failures.pause(times if self.feed.plan.on_error == "retry" else 1), run)

    def _turn_of(self, ticket: int) -> tuple[Epoch, Turn] | tuple[None, None]:
        return self.turns.by_ticket.get(ticket, (None, None))
