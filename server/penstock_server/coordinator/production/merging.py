"""Merging: has the leftover rows of lanes written to merged batches.

Each run writes the rows of its lane to their place in the batch. If samples vary in size, the places and the size of
the batch depend on all of its rows. Then the rows are measured first, and the batch gets a larger slot if it needs one.
If the feed has a `batch_transform`, it runs when all rows are written (pooling.py says where).
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_proto import PenstockError, ProtocolError
from penstock_proto.messages import RowsMeasured, Shapes

from ..model import commands as do
from ..model.feeds import ServedFeed
from ..model.leases import Leases
from ..model.turn import COMPLETE, DONE, FILLING, IDLE, WAITING, Leftover, Part, Turn
from ..order.epoch import Epoch
from ..order.lane import Filler, Lane
from ..order.open_turns import OpenTurns


class Merging:
    """The merged batches of one stream that are being measured or written.

    Args:
        feed: the feed whose batches are made.
        turns: the stream's turns in production.
        slots: the stream's slots.
        start: starts a run for a lane without one.
        transform: has a batch transformed whose rows are all written.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        turns: OpenTurns,
        slots: Leases,
        *,
        start: Callable[[Epoch, int, Lane], Filler],
        transform: Callable[[Epoch, Turn], None],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._turns = turns
        self._slots = slots
        self._start = start
        self._transform = transform
        self._do = out

    def fill(self, epoch: Epoch, turn: Turn, wanted: set[Leftover]) -> None:
        """Tell runs to write the leftovers `wanted` of a merged batch (again), or to measure them if that comes
        first. Rows of a lane that is paused have to wait."""
        turn.measuring = self._feed.leftovers_vary and not turn.shapes
        turn.transforming = False
        may_fill = turn.state is not WAITING
        row = 0
        for leftover in turn.leftovers:
            lane = epoch.lane(leftover.lane)
            known = turn.measuring and leftover in turn.sizes
            if lane.error is not None:
                self._turns.fail(epoch, turn, lane.error)
            elif leftover in wanted and may_fill and not known and turn.error is None:
                if lane.run is None and lane.pause is not None:
                    turn.paused.add(leftover)
                else:
                    self._tell(turn, leftover, row, lane.run or self._start(epoch, leftover.lane, lane))
            row += leftover.count
        if may_fill and not turn.fillers and (turn.error is not None or not turn.paused):
            self._turns.complete(epoch, turn, COMPLETE)

    def pause(self, epoch: Epoch, key: int, run: int) -> None:
        """Have the rows that the lane's run was to write or measure wait until the lane's pause is over."""
        for turn in self._turns.merged(epoch):
            if any(filler[1] == run for filler in turn.fillers):
                turn.paused.update(one for one in turn.leftovers if one.lane == key)
                self._turns.take_from(turn, lambda filler: filler[1] == run)
                if turn.error is not None and not turn.fillers:
                    self._turns.complete(epoch, turn, COMPLETE)

    def resume(self, epoch: Epoch, key: int) -> None:
        """Have the rows of the lane written or measured that waited for the end of its pause."""
        for turn in self._turns.merged(epoch):
            waited = {one for one in turn.paused if one.lane == key}
            if waited:
                turn.paused -= waited
                self.fill(epoch, turn, waited)

    def fail(self, epoch: Epoch, run: int, error: PenstockError) -> None:
        """Fail the merged batches for which this run was to write or measure rows."""
        for turn in self._turns.merged(epoch):
            if any(filler[1] == run for filler in turn.fillers):
                self._turns.take_from(turn, lambda filler: filler[1] == run)
                self._turns.fail(epoch, turn, error)
                if not turn.fillers:
                    self._turns.complete(epoch, turn, COMPLETE)

    def on_measured(self, said: RowsMeasured) -> int:
        """Note the sizes of a run's rows. Return the bytes of the merged batch, or 0 while not all of its rows are
        measured."""
        epoch, turn = self._turns.by_ticket.get(said.ticket, (None, None))
        if epoch is None or turn is None or turn.left_order or turn.shapes:
            return 0
        columns = self._feed.sample_columns
        for leftover in turn.leftovers:
            run = epoch.lane(leftover.lane).run
            if run is not None and run[1] == said.run and run in turn.fillers:
                if not columns.fit(said.sizes):
                    text = f"a worker said that leftover rows have the sizes {said.sizes}"
                    self._turns.fail(epoch, turn, ProtocolError(text, feed=self._feed.name))
                turn.sizes[leftover] = said.sizes
        if turn.error is not None or len(turn.sizes) < len(turn.leftovers):
            return 0
        turn.shapes = columns.shapes(turn.rows, columns.joined(turn.sizes.values()))
        return self._feed.leftovers_layout(turn.shapes).nbytes

    def on_answered(self, epoch: Epoch, turn: Turn, run: int, shapes: Shapes = ()) -> None:
        """Note that a run has written or measured its rows of the turn, or has transformed it to `shapes`. Go on with
        the turn after the last of them. Ignore a run that has failed: it answers for rows that it was told to write
        before the coordinator knew."""
        others = [filler for filler in turn.fillers if filler[1] != run]
        if len(others) == len(turn.fillers):
            return
        turn.fillers = others
        if others:
            return
        if turn.left_order:
            self._turns.complete(epoch, turn, DONE)
        elif turn.error is not None:
            self._turns.complete(epoch, turn, COMPLETE)
        elif turn.paused:
            turn.become(IDLE)
        elif not turn.measuring and self._feed.sample_spec is not None and not turn.transforming:
            self._transform(epoch, turn)
        elif not turn.measuring:
            turn.parts.append(Part(0, 1, turn.rows, shapes if turn.transforming else turn.shapes))
            self._turns.complete(epoch, turn, COMPLETE)
        elif turn.shapes and self._feed.leftovers_layout(turn.shapes).nbytes > turn.slot.nbytes:
            turn.become(WAITING)
            self._slots.enlarge(turn.slot)
        else:
            turn.become(IDLE)
            self.fill(epoch, turn, set(turn.leftovers))

    def _tell(self, turn: Turn, leftover: Leftover, row: int, filler: Filler) -> None:
        """Tell a run to measure these leftover rows, or to write them to the batch from its row `row` on."""
        turn.fillers.append(filler)
        if turn.state is IDLE:
            turn.become(FILLING)
        if turn.measuring:
            self._do(do.MeasureRows(*filler, turn.slot.ticket, leftover.start, leftover.count))
            return
        before = turn.leftovers[: turn.leftovers.index(leftover)]
        self._do(
            do.WriteRows(
                *filler,
                ticket=turn.slot.ticket,
                start=leftover.start,
                count=leftover.count,
                row=row,
                rows=turn.rows,
                index=turn.index,
                shapes=turn.shapes,
                before=self._feed.sample_columns.joined(turn.sizes[other] for other in before) if turn.shapes else (),
                sizes=turn.sizes.get(leftover, ()),
            )
        )
