"""Converts the coordinator's commands to messages for workers, and workers' messages to its events.

Messages name a slot by the number of its memfd. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_proto import messages as m
from penstock_proto.spec import Spec

from .model import commands as do
from .model import events as on
from .model.feeds import Skipped


def fill(command: do.Fill, memfd: int, nbytes: int) -> m.Fill:
    """Return the message for a slot in `memfd`, of `nbytes` bytes."""
    return m.Fill(
        run=command.run,
        ticket=command.ticket,
        index=command.index,
        batches=command.batches,
        memfd=memfd,
        nbytes=nbytes,
        stripe=command.stripe or 0,
        first=command.first,
        step=command.step,
        most_ms=command.most_ms,
    )


def write_rows(command: do.WriteRows, memfd: int, nbytes: int) -> m.WriteRows:
    """Return the message for a slot in `memfd`, of `nbytes` bytes."""
    return m.WriteRows(
        run=command.run,
        ticket=command.ticket,
        memfd=memfd,
        nbytes=nbytes,
        start=command.start,
        count=command.count,
        row=command.row,
        rows=command.rows,
        index=command.index,
        shapes=command.shapes,
        before=command.before,
        sizes=command.sizes,
    )


def pool_rows(command: do.PoolRows, memfd: int, nbytes: int, sources: Sequence[int], spec: Spec) -> m.PoolRows:
    """Return the message for a slot in `memfd`, of `nbytes` bytes, and visits in the memfds `sources`."""
    return m.PoolRows(
        run=command.run,
        ticket=command.ticket,
        memfd=memfd,
        nbytes=nbytes,
        feed=command.feed,
        epoch=command.epoch,
        visit=command.visit,
        part=command.part,
        sources=tuple(
            m.PooledVisit(source, batches) for source, (_, batches) in zip(sources, command.sources, strict=True)
        ),
        first=command.first,
        batches=command.batches,
        index=command.index,
        spec=spec,
        sample_spec=command.sample_spec,
    )


def transform_rows(command: do.TransformRows, memfd: int, nbytes: int, spec: Spec) -> m.TransformRows:
    """Return the message for a slot in `memfd`, of `nbytes` bytes, and a feed with this `spec`."""
    return m.TransformRows(
        run=command.run,
        ticket=command.ticket,
        memfd=memfd,
        nbytes=nbytes,
        feed=command.feed,
        epoch=command.epoch,
        rows=command.rows,
        index=command.index,
        shapes=command.shapes,
        spec=spec,
        sample_spec=command.sample_spec,
    )


def measure_rows(command: do.MeasureRows) -> m.MeasureRows:
    """Return the message."""
    return m.MeasureRows(run=command.run, ticket=command.ticket, start=command.start, count=command.count)


def start_run(command: do.StartRun, spec: Spec) -> m.StartRun:
    """Return the message for a feed with this `spec`."""
    return m.StartRun(
        run=command.run,
        feed=command.feed,
        epoch=command.epoch,
        lane=command.lane,
        splits=command.splits,
        spec=spec,
        record=command.record,
        skip=command.skip,
        careful=command.careful,
        ahead=command.ahead,
        sample_spec=command.sample_spec,
    )


def compare(command: do.Compare) -> m.Compare:
    """Return the message."""
    return m.Compare(
        run=command.run,
        feed=command.feed,
        splits=command.splits,
        index=command.index,
        digests=command.digests,
    )


def slab(command: do.SendSlab, memfd: int, kept: m.Kept | None = None) -> m.Slab:
    """Return the message for a slab whose slot is in `memfd` (0 if the bytes follow), or whose bytes are `kept`."""
    return m.Slab(
        seq=command.seq,
        epoch=command.epoch,
        lane=command.lane,
        index=command.index,
        batches=command.batches,
        rows=command.rows,
        nbytes=command.nbytes,
        memfd=memfd,
        first=command.first,
        shapes=command.shapes,
        record=command.record,
        repeat=command.repeat,
        kept=kept,
        lanes=command.lanes,
        places=command.places,
        shared=command.shared,
        stride=command.stride,
    )


def split_skipped(message: m.SplitSkipped) -> on.SplitSkipped:
    """Return the event for a worker's message."""
    why, traceback = "it ended its worker again and again", ""
    if message.error is not None:
        why, traceback = message.error.message, message.error.remote_traceback or ""
    return on.SplitSkipped(
        message.run, message.number, Skipped(message.split, message.samples, why, traceback=traceback)
    )
