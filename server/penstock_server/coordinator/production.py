"""The turns of a stream that are being made: which slots they have, who fills them, and who else when a worker ends.

The rule: what a worker has reported is in its slot and counts; whatever else it was to make is made again, from the
lane's last restart record on, by whoever is there. So a worker's end changes nothing that is sent.

Events are methods; what is to be done goes to `out`. No socket, no clock, no memory here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from penstock_proto import GeneratorError, PenstockError, ProtocolError, WorkerDied
from penstock_proto.layout import TAIL_LANE
from penstock_proto.messages import FeedPlan

from ..feed import block_samples
from . import commands as do
from .epoch import Epoch, Filler, Lane
from .feeds import ServedFeed, Skipped
from .order import Leftover, Part, Turn
from .workers import Workers

ALL = 2**62
"""More batches than a lane ever has."""
LAST_PAUSE = 30.0
"""Seconds from a failure to the next try, at most."""


class Production:
    """See the file's head.

    Args:
        feed: what is made.
        epochs: the stream's open epochs; it adds them and takes them away.
        workers: the workers.
        ids: where the numbers of runs and tickets come from.
        careful: whether each batch is to be reported by itself.
        out: where commands go.

    Attributes:
        slot_nbytes: bytes of a new slot.
        slots_used: how many slots are being filled or wait for their place.
        nbytes: bytes of all slots, those at the consumer among them.
    """

    def __init__(
        self,
        feed: ServedFeed,
        epochs: deque[Epoch],
        *,
        workers: Workers,
        ids: Iterator[int],
        careful: bool,
        out: Callable[[do.Command], None],
    ) -> None:
        self.feed = feed
        self.slot_nbytes = feed.slot_nbytes
        self.slots_used = 0
        self.nbytes = 0
        self._indexable = feed.plan.length is not None
        self._epochs = epochs
        self._workers = workers
        self._ids = ids
        self._careful = careful
        self._do = out
        self._tickets: dict[int, tuple[Epoch, Turn]] = {}

    @property
    def slots(self) -> int:
        """How many slots there are, those at the consumer among them."""
        return len(self._tickets)

    def has(self, ticket: int) -> bool:
        """Whether the ticket is known still."""
        return ticket in self._tickets

    # --- turns, from the stream ---

    def hold(self, epoch: Epoch, turn: Turn) -> None:
        turn.ticket = next(self._ids)
        turn.nbytes = self.slot_nbytes
        self._tickets[turn.ticket] = epoch, turn
        self.slots_used += 1
        self.nbytes += turn.nbytes
        if turn.lane != TAIL_LANE:
            if epoch.groups is not None:
                epoch.groups.begins(turn.group)
            epoch.lane(self._key(turn)).turns.append(turn)
        self._do(do.FindSlot(turn.ticket, self.slot_nbytes))

    def settle(self, epoch: Epoch, turn: Turn) -> None:
        """The order is done with the turn: all of it was sent, or its epoch is closed."""
        turn.settled = True
        if turn.closed:
            self._give_back(turn)
        elif not turn.fillers:
            self._close_turn(epoch, turn)

    def repeat(self, epoch: Epoch, turn: Turn, part: Part) -> tuple[Turn, Part]:
        """A copy of this batch, which is to be made in a slot of its own. Whoever asks keeps both until `made` is 1."""
        copy = Turn(turn.lane, turn.index, 1, closed=True, settled=True, original=(turn, part))
        copy.ticket = next(self._ids)
        copy.nbytes = self.slot_nbytes
        self.nbytes += copy.nbytes
        self._tickets[copy.ticket] = epoch, copy
        self._do(do.FindSlot(copy.ticket, self.slot_nbytes))
        return copy, replace(part, record=b"")

    def came_back(self, turn: Turn) -> None:
        """The last slab of the turn came back from the consumer."""
        if turn.closed and turn.settled:
            self._free(turn)

    def close_epoch(self, epoch: Epoch) -> None:
        """Nothing of the epoch is wanted any more."""
        for lane in epoch.lanes.values():
            if lane.run is not None:
                self._drop(epoch, lane)
        if epoch.order is not None:
            for turn in epoch.order.drop():
                turn.parts.clear()
                if turn.ticket != -1:
                    self.settle(epoch, turn)

    # --- events from the host and from workers ---

    def slot_found(self, ticket: int) -> None:
        """The ticket has its slot."""
        epoch, turn = self._tickets.get(ticket, (None, None))
        if epoch is None or turn is None:
            return
        if turn.original is not None:
            self._copy(turn, *turn.original)
        if turn.closed:
            return
        turn.slot = True
        if turn.lane == TAIL_LANE:
            self._write_leftovers(epoch, turn, set(turn.leftovers))
        else:
            self._fill(epoch, self._key(turn))

    def copied(self, ticket: int) -> None:
        """The copy in the ticket's slot is there."""
        _, turn = self._tickets[ticket]
        assert turn.original is not None
        turn.made = 1
        for one in (turn, turn.original[0]):
            one.out -= 1
            if not one.out:
                self.came_back(one)

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
            lane.index, lane.failures, lane.unexplained = turn.index + turn.made, 0, 0
            if not turn.settled and epoch.order is not None:
                self._add(turn, part)
                epoch.order.came(turn)
        if part is not None or ended:
            lane.record, lane.border, lane.skip = record, border, ()
        if last:
            turn.fillers = []
            complete = ended or turn.made == turn.batches
            if turn.settled or complete:
                turn.ended, turn.leftover = ended, leftover
                if ended and not self._indexable:
                    epoch.end(lane)
                self._close_turn(epoch, turn)
            elif lane.letting_go is None:
                said = f"a worker made {turn.made} of {turn.batches} batches and did not say that the lane has ended"
                self._fail_turn(epoch, turn, ProtocolError(said, feed=self.feed.name))
                self._close_turn(epoch, turn)
            self._went_by(epoch, lane)

    def _add(self, turn: Turn, part: Part) -> None:
        """Put a part behind those that wait to be dealt; with the one before it, it makes one slab if both are full."""
        before, full = turn.parts[-1] if turn.parts else None, self.feed.plan.batch_size
        if (
            before
            and full
            and not self._careful
            and before.rows == full * before.batches
            and part.rows == full * part.batches
        ):
            turn.parts.pop()
            part = Part(before.first, before.batches + part.batches, before.rows + part.rows, (), part.record)
        turn.parts.append(part)

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

    def needs(self, ticket: int, run: int) -> bool:
        """Whether the ticket's turn is wanted still, and this run is to make it."""
        _, turn = self._tickets.get(ticket, (None, None))
        return turn is not None and not turn.settled and any(filler[1] == run for filler in turn.fillers)

    def need_room(self, ticket: int) -> None:
        """The next batch of the ticket's turn did not fit; slots are large enough for it now."""
        epoch, turn = self._tickets[ticket]
        self.nbytes += self.slot_nbytes - turn.nbytes
        turn.nbytes = self.slot_nbytes
        turn.slot, turn.fillers = False, []
        self._do(do.FindSlot(ticket, self.slot_nbytes))
        self._went_by(epoch, epoch.lane(self._key(turn)))

    def run_failed(self, run: int, error: PenstockError) -> None:
        """User code failed in the run, which is closed with all of its turns."""
        for epoch in self._epochs:
            for key, lane in list(epoch.lanes.items()):
                if lane.run is not None and lane.run[1] == run:
                    self._lane_failed(epoch, key, lane, lane.run, error)
                elif lane.letting_go is not None and lane.letting_go[1] == run:
                    self._unassign(lane, run)
                    self._went_by(epoch, lane)
        self._close_unwanted(lambda filler: filler[1] == run)

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
                    lane.pause = None
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
                if lane.letting_go is not None and lane.letting_go[0] == worker:
                    if blamed is not None and blamed[0] == lane.letting_go[1]:
                        self._blame(epoch, lane, blamed, worker, how)
                    self._unassign(lane, lane.letting_go[1])
                    lane.letting_go = None
                    lost.add(key)
            for key in sorted(lost):
                self._hand_over(epoch, key)
            for turn in self._merges(epoch):
                lanes = {writers[run] for writer, run in turn.fillers if writer == worker}
                if lanes:  # not of other lanes: who wrote twice might do so when the slot is another's
                    turn.fillers = [filler for filler in turn.fillers if filler[0] != worker]
                    self._write_leftovers(epoch, turn, {part for part in turn.leftovers if part.lane in lanes})
        self._close_unwanted(lambda filler: filler[0] == worker)

    # --- workers come and go ---

    def workers_changed(self) -> None:
        """Workers came, or are to leave: lanes move when they come to a border."""
        for epoch in self._epochs:
            epoch.moved = True
            for lane in epoch.lanes.values():
                self._consider_moving(epoch, lane)

    def move_all(self, worker: int) -> None:
        """The lanes of this worker move now, whatever is to be made again for it."""
        for epoch in self._epochs:
            for lane in epoch.lanes.values():
                if lane.run is not None and lane.run[0] == worker:
                    self._let_go(epoch, lane)

    def uses(self, worker: int) -> bool:
        """Whether the worker does anything for this stream."""
        for epoch in self._epochs:
            if epoch.runs[worker] or any(
                lane.letting_go is not None and lane.letting_go[0] == worker for lane in epoch.lanes.values()
            ):
                return True
        return any(filler[0] == worker for _, turn in self._tickets.values() for filler in turn.fillers)

    def _consider_moving(self, epoch: Epoch, lane: Lane) -> None:
        """Let the lane go where its worker is to leave, or has two lanes more than another one."""
        if not epoch.moved or lane.run is None:
            return
        if self._indexable or lane.ended:
            if lane.run[0] in self._workers.leaving and not lane.busy and not self._merges_of(epoch, lane.run[1]):
                self._drop(epoch, lane)
            return
        if not lane.border:
            return
        loads = [epoch.loads[worker] for worker in self._workers.available]
        if lane.run[0] in self._workers.available and epoch.loads[lane.run[0]] - min(loads) < 2:
            if max(loads) - min(loads) < 2 and not self._workers.leaving:
                epoch.moved = False
            return
        self._let_go(epoch, lane)

    def _let_go(self, epoch: Epoch, lane: Lane) -> None:
        """Have the lane's run dropped; another goes on when it has answered."""
        if self._indexable or lane.ended:
            return  # its turns are all that it still does
        run = self._drop(epoch, lane)
        if lane.busy:
            lane.letting_go = run

    def _drop(self, epoch: Epoch, lane: Lane) -> Filler:
        run = epoch.stop(lane)
        self._do(do.DropRun(*run))
        return run

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

    def _blame(self, epoch: Epoch, lane: Lane, blamed: tuple[int, int, str], worker: int, how: str) -> None:
        """A worker died while it worked on the lane. Once too often, and the feed says what becomes of it.

        What counts is how often the split ended its worker in this epoch. Outside of user code no split is to blame,
        and what counts is how often that happened in a row before the lane got any further.
        """
        plan, (run, split, name) = self.feed.plan, blamed
        lane.careful = _batches_at_stake(plan)
        lane.failures += 1
        if self._indexable:  # the work that goes elsewhere is a turn
            turn = next((turn.index for turn in lane.turns if turn.fillers), 0)
            epoch.deaths[turn] += 1
            count = epoch.deaths[turn]
        else:
            count = lane.blame(split)
        if count < plan.attempts or plan.on_error == "retry":
            if lane.failures > 1 and not self._indexable:
                self._pause(lane, run, lane.failures - 1)
        elif plan.on_error == "skip" and not self._indexable and split >= 0 and count < 2 * plan.attempts:
            lane.skip = tuple(sorted({*lane.skip, split}))
        else:
            lane.error = self._deadly(epoch, split, count, how, worker, name)

    def _deadly(self, epoch: Epoch, split: int, count: int, how: str, worker: int, name: str) -> WorkerDied:
        plan = self.feed.plan
        if split < 0:
            said = f"the worker process died {count} times in a row at one place of epoch {epoch.number}, outside of "
            said += "the feed's code"
        else:
            said = f"a {plan.piece} ended its worker process {count} times in epoch {epoch.number}"
        mend = "If memory ran out, fewer workers or a smaller shuffle need less"
        if plan.on_error == "raise" and not self._indexable and split >= 0:
            mend += f'; Feed(on_error="skip") leaves such {plan.piece}s out'
        return WorkerDied(
            f"{said}, the last time it {how}. {mend}", feed=self.feed.name, worker=worker, split=name or None
        )

    def _pause(self, lane: Lane, run: int, times: int) -> None:
        """Let the lane wait before the next try. Where there are only so many, or it got further since the last, the
        pause is short: it is not to hold up the stream, for which a worker is there."""
        lane.pause = run
        self._do(do.Retry(pause(times if self.feed.plan.on_error == "retry" else 1), run))

    def _lane_failed(self, epoch: Epoch, key: int, lane: Lane, run: Filler, error: PenstockError) -> None:
        self._drop(epoch, lane)
        self._unassign(lane, run[1])
        if self.feed.plan.on_error == "retry" and isinstance(error, GeneratorError) and not lane.ended:
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
                turn.worker = self._workers.pick(turn.index // self.feed.turn)
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

    # --- who makes what ---

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
            turn.base = turn.made
            self._do(do.Fill(worker, run, turn.ticket, turn.index + turn.made, turn.batches - turn.made, turn.made))

    def _start(self, epoch: Epoch, key: int, lane: Lane) -> Filler:
        """Open a run for the lane: at home, or, where workers came or went, with the worker that has fewest lanes."""
        if self._indexable:
            worker = key if key in self._workers.available else self._workers.pick(key)
        elif epoch.moved:
            worker = min(self._workers.available, key=epoch.loads.__getitem__)
        else:
            worker = self._workers.pick(key)
        run = worker, next(self._ids)
        epoch.start(lane, run)
        number = 0 if self._indexable else key
        splits = epoch.splits.number if epoch.splits else 0
        self._do(
            do.StartRun(
                *run,
                feed=self.feed.name,
                epoch=epoch.number,
                lane=number,
                splits=splits,
                record=lane.record,
                skip=lane.skip,
                careful=ALL if self._careful else lane.careful,
                ahead=lane.ahead,
            )
        )
        return run

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

    def _copy(self, copy: Turn, original: Turn, part: Part) -> None:
        copy.out += 1  # which keeps both slots while they are written and read
        original.out += 1
        regions = self.feed.layout(part.shapes).regions(part.first, part.batches)
        self._do(do.Copy(copy.ticket, original.ticket, part.first, tuple(regions)))

    # --- the end of a turn ---

    def _close_turn(self, epoch: Epoch, turn: Turn) -> None:
        """Nobody fills the turn's slot any more."""
        turn.closed = True
        if turn.lane != TAIL_LANE:
            if epoch.groups is not None:
                epoch.groups.ends(turn.group)
            epoch.lane(self._key(turn)).turns.remove(turn)
        if turn.settled:
            self._give_back(turn)
        elif epoch.order is not None:
            epoch.order.closed(turn)

    def _fail_turn(self, epoch: Epoch, turn: Turn, error: PenstockError) -> None:
        """The stream fails when this turn is next."""
        turn.error = error
        epoch.failing = True
        if not turn.settled and epoch.order is not None:
            epoch.order.came(turn)

    def _give_back(self, turn: Turn) -> None:
        """The turn leaves production; its slot is free unless the consumer still has slabs of it."""
        self.slots_used -= 1
        if not turn.out:
            self._free(turn)

    def _free(self, turn: Turn) -> None:
        del self._tickets[turn.ticket]
        self.nbytes -= turn.nbytes
        self._do(do.Free(turn.ticket))


def pause(times: int) -> float:
    """Seconds from the last of so many failures to the next try."""
    return min(LAST_PAUSE, 0.1 * 2.0 ** min(times, 10))


def _batches_at_stake(plan: FeedPlan) -> int:
    """Within how many batches of a lane the splits that are open come to their ends. (An endless lane is not to be
    careful for ever.)"""
    if plan.segment is None:
        return ALL
    rows = plan.interleave * plan.segment + block_samples(plan.shuffle, plan.lanes, plan.batch_size)
    return min(ALL, -(-rows // (plan.batch_size or 1)))
