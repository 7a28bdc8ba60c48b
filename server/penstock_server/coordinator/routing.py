"""Routes events about work (workers' reports on runs, the daemon's on slots) to the stream of their run or ticket.

Runs that list splits at the start of the daemon belong to the start (starting.py), not to a stream.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock_proto.messages import Made, NeedRoom, RowsMeasured, RowsWritten

from .model import commands as do
from .model import events as on
from .model.timers import Timers
from .staffing import Staffing
from .starting import Starting
from .stream.affected import AffectedStreams
from .stream.budget import Budget
from .stream.stream import Stream


class Routing:
    """Finds the stream of a run or ticket, and passes the event to the part that it concerns.

    Args:
        streams: all streams; notes those that the event affects.
        staffing: ends workers that are to leave.
        starting: how feeds start.
        budget: the memory that streams share.
        timers: for further attempts.
        out: where commands go.
    """

    def __init__(
        self,
        streams: AffectedStreams,
        staffing: Staffing,
        starting: Starting,
        budget: Budget,
        timers: Timers,
        out: Callable[[do.Command], None],
    ) -> None:
        self._affected = streams
        self._staffing = staffing
        self._starting = starting
        self._budget = budget
        self._timers = timers
        self._do = out

    def on_made(self, event: Made) -> None:
        """Take a part of a turn that a worker has made: the part joins its turn, and the lane keeps the record.

        `last` says that the run has answered for the turn and no longer writes to its slot; `ended`, that the lane has
        no further full batch. After `last` a turn is complete if it is full or its lane has ended; this may complete
        its pool too. The order counts the leftover rows of an ended lane, and may add merged batches. An unfinished
        turn of a run that was dropped becomes IDLE. Once that run has answered for all its turns, another run takes
        over. If the epoch was closed meanwhile, nothing is delivered, and at `last` production releases the slot.
        """
        if (stream := self._affected.affect(event.ticket)) is not None and not stream.remaking.on_made(event):
            stream.production.on_made(event)

    def on_bytes_lost(self, event: on.BytesLost) -> None:
        """Have reported batches made again, because their bytes are lost with their host."""
        for ticket in event.tickets:
            if (stream := self._affected.affect(ticket)) is not None:
                stream.remaking.on_bytes_lost((ticket,))

    def on_rows_measured(self, event: RowsMeasured) -> None:
        """Take the sizes of leftover rows, if samples vary in size (`MeasureRows` then comes before `WriteRows`).

        When all rows of a merged batch are measured, its size is known. It gets a larger slot if it needs one, and
        then the runs write its rows.
        """
        if (stream := self._affected.affect(event.ticket)) is not None:
            self._has_room(stream, stream.production.merging.on_measured(event))
            stream.production.on_rows_answered(event.ticket, event.run)

    def on_rows_written(self, event: RowsWritten) -> None:
        """Note that a worker has written leftover rows, or the rows of pooled batches, to their slot, or has
        transformed a merged batch.

        A merged batch is complete when all its writers have answered. If the feed has a `batch_transform`, one of the
        daemon's own workers then transforms the batch. A turn of a pool has one writer. When all turns of the pool are
        complete, the slots of its visits are free.
        """
        if (stream := self._affected.affect(event.ticket)) is not None:
            stream.production.on_rows_answered(event.ticket, event.run, event.shapes)

    def on_need_room(self, event: NeedRoom) -> None:
        """Make new slots larger, if the memory allows it: a batch does not fit into its slot.

        If there is not enough memory for the same number of slots, there are fewer (a second `Opened`). The turn,
        which has one batch, waits for a new slot under the same ticket. Its run keeps the batch, makes nothing else
        until the slot is there, and then goes on to the lane's next turns. If `--memory` has no room for the new size,
        the stream fails.
        """
        stream = self._affected.affect(event.ticket)
        if stream is None:
            return
        if stream.remaking.is_of(event.run):
            stream.remaking.on_need_room(event.run)
            return
        if not stream.production.needs(event.ticket, event.run):
            stream.production.on_unwanted(event.ticket, event.run)
            return
        if self._has_room(stream, event.nbytes):
            stream.production.enlarge(event.ticket)

    def on_slot_found(self, event: on.SlotFound) -> None:
        """Pass a slot that was found to the turn that waits for it."""
        stream = self._affected.find(event.ticket)
        if stream is None:
            return
        if stream.production.on_slot_found(event.ticket):
            self._affected.add(stream)  # otherwise it can neither send nor grant more than before

    def on_no_slot(self, event: on.NoSlot) -> None:
        """Fail the stream of the ticket: there is no memory for its slot."""
        stream = self._affected.affect(event.ticket)
        if stream is not None and event.ticket in stream.slots:
            stream.fail(event.error)

    def on_splits_listed(self, event: on.SplitsListed) -> None:
        """Pass a list of splits to the start or the stream that asked for it."""
        if self._starting.lists(event.run):
            self._starting.on_splits_listed(event)
            self._staffing.retire()
        elif (stream := self._affected.affect(event.run)) is not None:
            stream.on_splits_listed(event.run, event.splits)
        else:
            self._do(do.ForgetSplits(event.splits.number))

    def on_run_failed(self, event: on.RunFailed) -> None:
        """Pass a failure of user code to the start or the stream of its run."""
        if self._starting.lists(event.run):
            self._starting.on_run_failed(event.run, event.error)
            self._staffing.retire()
        elif (stream := self._affected.affect(event.run)) is not None:
            stream.on_run_failed(event.run, event.error)

    def on_split_skipped(self, event: on.SplitSkipped) -> None:
        """Report that a run leaves out the rest of a split, unless that was reported before."""
        stream = self._affected.affect(event.run)
        if stream is not None and stream.production.on_split_skipped(event.run, event.number, event.skipped):
            skipped = event.skipped
            what = skipped.split, skipped.samples, skipped.why, skipped.traceback
            self._do(do.ReportSkipped(stream.feed.name, event.run, *what))

    def on_check_began(self, event: on.CheckBegan) -> None:
        """Let the end of the epoch wait for a comparison."""
        if (stream := self._affected.affect(event.run)) is not None:
            stream.on_check_began()

    def on_check_ended(self, event: on.CheckEnded) -> None:
        """Note that a comparison is over."""
        if (stream := self._affected.affect(event.run)) is not None:
            stream.on_check_ended()

    def retry_later(self, seconds: float, run: int) -> None:
        """Try the work of a failed run again in `seconds` seconds."""

        def retry() -> None:
            if (stream := self._affected.affect(run)) is not None:
                with self._affected.alone(stream):
                    stream.retry(run)

        self._timers.later(seconds, retry)

    def _has_room(self, stream: Stream, nbytes: int) -> bool:
        """Make later slots of the stream at least `nbytes` large. If the memory does not allow it, fail the stream and
        return False."""
        missing = self._budget.grow(stream, nbytes) if nbytes > stream.slots.slot_nbytes else None
        if missing is not None:
            stream.fail(missing)
        return missing is None
