"""Makes a run's batches in the slots that the daemon names, and reports them.

Each method returns an iterator of steps. The worker's loop takes one step at a time, and checks for messages in
between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy.typing as npt

from penstock_proto import FeedError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.batches import layout

from ..lane.lane import LaneRun
from ..lane.restart_record import SAME_AGAIN
from ..reading.indexed import IndexRun
from ..reading.lane_batches import LaneBatches
from .memfds import Memfds
from .run import Run
from .scheduler import Job

_STEP_SECONDS = 0.0002
"""A step makes batches for at least so long, unless it reports some. To look for messages after each batch of 0.05 ms
takes a worker 3 % longer."""

_PART_SECONDS = 0.020
"""A turn that takes longer than this is reported in parts, so that a waiting consumer gets the batches that are
ready."""


class BatchMaker:
    """Makes turns, measures rows, and writes leftover rows.

    Args:
        memfds: the mapped slots.
        send: sends a message to the daemon.
    """

    def __init__(
        self, memfds: Memfds, send: Callable[[m.Made | m.NeedRoom | m.RowsMeasured | m.RowsWritten], None]
    ) -> None:
        self._memfds = memfds
        self._send = send

    def turn(self, fill: m.Fill, job: Job[Run], slot_layout: layout.SlotLayout) -> Iterator[None]:
        """Make a turn of a feed whose batches have one size; report it in parts if it takes long."""
        run = job.run
        source, transforms = run.batches, run.transforms
        if fill.first + (fill.batches - 1) * fill.step >= slot_layout.batches:
            raise ProtocolError(f"{fill.batches} batches from place {fill.first} on do not fit into a slot")
        slot = self._memfds.batches(slot_layout, fill.memfd)
        full = run.feed.plan.batch_size
        if isinstance(source, LaneRun) and fill.step == 1 and transforms is None:
            source.offer(lambda: slot.rows(fill.first, fill.batches), fill.batches)
        at = rows = 0
        ended = False
        begun, reported = run.worked, time.monotonic()

        def report(*, last: bool = False) -> None:
            nonlocal rows, reported
            self._report(run, fill, job.reported, at, rows, last=last, ended=ended, begun=begun)
            job.reported, rows, reported = at, 0, time.monotonic()

        def takes_long() -> bool:
            return at > job.reported and source.replayed and time.monotonic() - reported > _PART_SECONDS

        while at < fill.batches:
            place = fill.first + at * fill.step
            target = [leaf[place] for leaf in slot.leaves]
            store = target if transforms is None else transforms.store()
            try:
                if source.index != fill.index + at:  # an older turn may have come in between
                    if isinstance(source, LaneRun):
                        yield from _pass_over(source, run.lane, fill.index + at, store)
                    _go_to(source, fill.index + at)
                while not source.prepare():
                    if takes_long():
                        report()
                    yield
                made = source.next_batch(store)
                if made and transforms is not None:
                    _transform(run, transforms, store, made, target)
            except Exception:
                if at > job.reported and source.replayed:
                    report()  # the batches made before are not lost
                raise
            if not made:
                ended = True
                break
            if made != full and at > job.reported:  # an epoch's last batch, which is a slab of its own
                report()
            slot.headers[place, :4] = made, run.epoch, run.lane, source.index - 1
            rows += made
            at += 1
            if at == fill.batches or 0 < fill.most_ms < 1000 * (run.worked - begun):
                break
            job.place = place + fill.step
            # A consumer may stop between two batches of a report. Then it goes on from the record before the report,
            # which does not list the splits that were skipped in it.
            skipped = source.skipped and source.replayed
            if skipped or source.index <= run.careful or takes_long():
                report()
            elif time.monotonic() - run.began < _STEP_SECONDS:
                continue
            yield
        report(last=True)

    def one(self, fill: m.Fill, job: Job[Run]) -> Iterator[None]:
        """Make one batch of a feed whose batches vary in size; ask for a larger slot if it does not fit."""
        run = job.run
        if fill.batches != 1:
            raise ProtocolError(f"{fill.batches} batches in a slot of a feed whose batches vary in size")
        source = run.batches
        collate = run.feed.collate_alone
        if run.held is None:
            _go_to(source, fill.index)
            while not source.prepare():
                yield
            store = collate.store(run.feed.plan.batch_size or 1)
            samples = store if run.transforms is None else run.transforms.store()
            made = source.next_batch(samples)
            if not made:
                self._report(run, fill, 0, 0, 0, last=True, ended=True)
                return
            if run.transforms is not None:
                _transform(run, run.transforms, samples, made, store)
        else:
            (store, made), run.held = run.held, None
        shapes = collate.shapes(store, made)
        slot_layout = layout.lay_out(collate.dtypes, shapes)
        if slot_layout.nbytes > fill.nbytes:
            collate.keep(store)
            run.held = store, made
            run.waiting = fill.ticket
            self._send(m.NeedRoom(run=fill.run, ticket=fill.ticket, nbytes=slot_layout.nbytes))
            return
        slot = self._memfds.batches(slot_layout, fill.memfd)
        collate.write(store, made, [leaf[0, ...] for leaf in slot.leaves])
        rows = collate.count(store, made)
        slot.headers[0, :4] = rows, run.epoch, run.lane, source.index - 1
        self._report(run, fill, 0, 1, rows, last=True, shapes=shapes)

    def leftover(self, message: m.WriteRows | m.MeasureRows, run: Run) -> Iterator[None]:
        """Write leftover rows, or measure them."""
        yield from self._read_leftover(message, run)
        if isinstance(message, m.WriteRows):
            self._write_leftover(message, run)
        else:
            sizes = run.feed.collate_variable.sizes(run.batches.leftover_rows, message.start, message.count)
            self._send(m.RowsMeasured(run=message.run, ticket=message.ticket, sizes=sizes))

    def _read_leftover(self, message: m.WriteRows | m.MeasureRows, run: Run) -> Iterator[None]:
        """Make sure that the leftover rows are there. If the run began at its last full batch, read its lane to the end
        first, which yields the leftover again."""
        lane = run.batches
        if isinstance(lane, LaneRun) and not lane.ended:
            run.read_again = True
            while not lane.prepare():
                yield
            if lane.next_batch(run.feed.sample_collate.store(run.feed.plan.batch_size or 1)):
                raise ProtocolError(
                    f"leftover rows were requested of a lane that has a full batch, number {lane.index - 1}"
                )
        if message.start + message.count > lane.leftover:
            if run.read_again:
                raise FeedError(
                    f"lane {run.lane} had {message.start + message.count} samples or more after its last full batch, "
                    f"and only {lane.leftover} when its splits were read again: {SAME_AGAIN}"
                )
            raise ProtocolError(
                f"rows {message.start} to {message.start + message.count} of a run with {lane.leftover} rows left over"
            )

    def _write_leftover(self, message: m.WriteRows, run: Run) -> None:
        start, count, stored = message.start, message.count, run.batches.leftover_rows
        if run.feed.sample_layout is not None:
            slot = self._memfds.batches(run.feed.sample_layout, message.memfd)
            for target, rows in zip(slot.leaves, stored, strict=True):
                target[0, message.row : message.row + count] = rows[start : start + count]
        else:
            collate = run.feed.collate_variable
            slot = self._memfds.batches(layout.lay_out(collate.dtypes, message.shapes), message.memfd)
            arrays = [leaf[0, ...] for leaf in slot.leaves]
            if collate.sizes(stored, start, count) != message.sizes:
                raise FeedError(
                    f"the samples after the last full batch of lane {run.lane} had other sizes when its splits were "
                    f"read again: {SAME_AGAIN}"
                )
            collate.write_rows(stored, start, count, arrays, message.row, message.before)
        slot.headers[0, :4] = message.rows, run.epoch, layout.TAIL_LANE, message.index
        self._send(m.RowsWritten(run=message.run, ticket=message.ticket))

    def _report(
        self,
        run: Run,
        fill: m.Fill,
        first: int,
        at: int,
        rows: int,
        *,
        last: bool = False,
        ended: bool = False,
        shapes: m.Shapes = (),
        begun: float | None = None,
    ) -> None:
        source = run.batches
        tells = at > first or ended  # the end too, as splits may have been skipped after the last batch
        self._send(
            m.Made(
                run=fill.run,
                ticket=fill.ticket,
                first=first,
                batches=at - first,
                rows=rows,
                last=last,
                ended=ended,
                leftover=source.leftover if ended else 0,
                shapes=shapes,
                record=source.record() if tells else b"",
                border=tells and source.at_border(fill.batches),
                replay_ms=run.replay_ms if tells else 0,
                work_ms=0 if begun is None else int(1000 * (run.worked - begun)),
                dropped=source.dropped if tells else 0,
                skipped=at > first and source.skipped,
            )
        )


def _transform(run: Run, transforms: LaneBatches, store: list[Any], rows: int, target: list[Any]) -> None:
    """Transform the lane's last batch, whose samples are in `store`, to `target`.

    Raises:
        GeneratorError, SpecError: as `LaneBatches.put`. The lane's record is then that of the batch before.
    """
    lane = run.batches
    assert isinstance(lane, LaneRun)
    try:
        transforms.put(store, rows, run.epoch, run.lane, lane.index - 1, target)
    except Exception:
        lane.take_back()
        raise


def nothing_made(run: int, ticket: int, first: int = 0) -> m.Made:
    """Return the answer for a ticket whose run was dropped after `first` batches were reported."""
    return m.Made(run=run, ticket=ticket, first=first, batches=0, rows=0, last=True)


def _pass_over(source: LaneRun, lane: int, index: int, target: list[npt.NDArray[Any]]) -> Iterator[None]:
    """Make the batches before number `index`, which were delivered before, in `target`: the restart record may be that
    of an earlier batch."""
    if source.index < index:
        source.pass_to(index)
    while source.index < index and not source.ended:
        while not source.prepare():
            yield
        if not source.next_batch(target):
            raise FeedError(
                f"lane {lane} had {index} batches or more, and only {source.index} when its splits were read again: "
                f"{SAME_AGAIN}"
            )
        yield


def _go_to(source: LaneRun | IndexRun, index: int) -> None:
    if isinstance(source, IndexRun):
        source.index = index
    elif source.index != index and not source.ended:
        raise ProtocolError(f"batch {index} was requested of a lane that is at batch {source.index}")
