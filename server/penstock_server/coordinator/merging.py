"""Merging: has the leftover rows of lanes written to merged batches.

Each run writes the rows of its lane to their place in the batch. If samples vary in size, the places and the size of
the batch depend on all of its rows. Then the rows are measured first, and the batch gets a larger slot if it needs one.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_proto import ProtocolError
from penstock_proto.messages import RowsMeasured

from . import commands as do
from .epoch import Epoch
from .feeds import ServedFeed
from .lane import Filler, Lane
from .open_turns import OpenTurns
from .slots import Slots
from .turn import COMPLETE, DONE, FILLING, IDLE, WAITING, Leftover, Part, Turn


class Merging:
    """See the file's head.

    Args:
        feed: the feed whose batches are made.
        turns: the stream's turns in production.
        slots: the stream's slots.
        start: starts a run for a lane without one.
        out: where commands go.
    """

    def __init__(
        self,
        feed: ServedFeed,
        turns: OpenTurns,
        slots: Slots,
        *,
        start: Callable[[Epoch, int, Lane], Filler],
        out: Callable[[do.Command], None],
    ) -> None:
        self._feed = feed
        self._turns = turns
        self._slots = slots
        self._start = start
        self._do = out

    def fill(self, epoch: Epoch, turn: Turn, wanted: set[Leftover]) -> None:
        """Tell runs to write the leftovers `wanted` of a merged batch (again), or to measure them if that comes
        first."""
        turn.measuring = self._feed.varies and not turn.shapes
        may_fill = turn.state is not WAITING
        row = 0
        for leftover in turn.leftovers:
            lane = epoch.lane(leftover.lane)
            known = turn.measuring and leftover in turn.sizes
            if lane.error is not None:
                self._turns.fail(epoch, turn, lane.error)
            elif leftover in wanted and may_fill and not known and turn.error is None:
                filler = lane.run or self._start(epoch, leftover.lane, lane)
                turn.fillers.append(filler)
                if turn.state is IDLE:
                    turn.become(FILLING)
                if turn.measuring:
                    self._do(do.MeasureRows(*filler, turn.slot.ticket, leftover.start, leftover.count))
                else:
                    self._do(self._write(turn, leftover, row, filler))
            row += leftover.count
        if may_fill and not turn.fillers:
            self._turns.complete(epoch, turn, COMPLETE)

    def measured(self, said: RowsMeasured) -> int:
        """Note the sizes of a run's rows. Return the bytes of the merged batch, or 0 while not all of its rows are
        measured."""
        epoch, turn = self._turns.by_ticket.get(said.ticket, (None, None))
        if epoch is None or turn is None or turn.left_order or turn.shapes:
            return 0
        columns = self._feed.columns
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
        return self._feed.layout(turn.shapes).nbytes

    def answered(self, epoch: Epoch, turn: Turn, run: int) -> None:
        """Note that a run has written or measured its rows of the turn. Go on with the turn after the last of them."""
        turn.fillers = [filler for filler in turn.fillers if filler[1] != run]
        if turn.fillers:
            return
        if turn.left_order:
            self._turns.complete(epoch, turn, DONE)
        elif turn.error is not None:
            self._turns.complete(epoch, turn, COMPLETE)
        elif not turn.measuring:
            turn.parts.append(Part(0, 1, turn.rows, turn.shapes))
            self._turns.complete(epoch, turn, COMPLETE)
        elif turn.shapes and self._feed.layout(turn.shapes).nbytes > turn.slot.nbytes:
            turn.become(WAITING)
            self._slots.enlarge(turn.slot)
        else:
            turn.become(IDLE)
            self.fill(epoch, turn, set(turn.leftovers))

    def _write(self, turn: Turn, leftover: Leftover, row: int, filler: Filler) -> do.WriteRows:
        """Return the command to write these leftover rows to a merged batch, from its row `row` on."""
        before = turn.leftovers[: turn.leftovers.index(leftover)]
        return do.WriteRows(
            *filler,
            ticket=turn.slot.ticket,
            start=leftover.start,
            count=leftover.count,
            row=row,
            rows=turn.rows,
            index=turn.index,
            shapes=turn.shapes,
            before=self._feed.columns.joined(turn.sizes[other] for other in before) if turn.shapes else (),
            sizes=turn.sizes.get(leftover, ()),
        )
