"""The worker's loop: reads the daemon's messages, and between them makes batches, one small step at a time.

A step makes a batch, or reads part of what must be read before one can be made. Between two steps the worker looks for
messages, so it drops a run that nobody wants within one step, and never lets rows for a merged batch wait for a turn.
User code runs inside these steps, in `_list_splits`, and where generators are closed.

An error in a run fails that run only: the worker sends RunFailed and goes on.
"""

from __future__ import annotations

import hashlib
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock_proto import FeedError, GeneratorError, PenstockError, ProtocolError, codec, layout, seqpacket
from penstock_proto import messages as m
from penstock_proto.spec import Spec, leaf_list

from ..activity import ActivityPage
from ..feed import segment_count
from .failures import describe
from .indexed import IndexRun
from .lane import LaneRun
from .loaded_feed import LoadedFeed, look_at_item, look_at_splits
from .process_guard import ProcessGuard, above_standard
from .randomness import GlobalRandomness
from .reproducibility import check_reproducibility
from .scheduler import Job, Scheduler
from .slots import Segments
from .splits import OpenSplit, SharedSplits, SplitOpener, list_splits, write_list

_PART_SECONDS = 0.020
"""A turn that takes longer than this is handed over in parts, so that a waiting consumer sees what there is."""


@dataclass(eq=False)
class Run:
    """A run that the daemon has opened."""

    number: int
    feed: LoadedFeed
    epoch: int
    lane: int
    batches: LaneRun | IndexRun
    careful: int = 0
    """Report each batch before this one at once."""
    read_again: bool = False
    """It was read again for its leftover alone."""
    closed: bool = False
    """Dropped or failed: nothing more is made of it."""
    waiting: int | None = None
    """The ticket for which a batch, `held`, needs a larger slot."""
    held: list[Any] = field(default_factory=list)


class WorkerLoop:
    """Serves the daemon at the other end of a connection.

    Args:
        connection: blocking, SOCK_SEQPACKET.
        number: the worker's number, for errors.
        feeds: what is served, by name.
        page: where it says what it does.
        own: keeps what is the worker's from user code.
    """

    def __init__(
        self,
        connection: socket.socket,
        number: int,
        feeds: dict[str, LoadedFeed],
        page: ActivityPage,
        guard: ProcessGuard,
    ) -> None:
        self._connection = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._number = number
        self._feeds = feeds
        self._page = page
        self._guard = guard
        self._segments = Segments()
        guard.on_fork(self._segments.abandon)
        self._lists: dict[int, SharedSplits] = {}
        self._runs: dict[int, Run] = {}
        self._scheduler = Scheduler[Run](
            lambda run: run.number // m.IDS_PER_STREAM, lambda run: run.waiting is not None
        )
        self._randomness = GlobalRandomness()
        self._stopping = False

    def serve(self) -> None:
        """Serve until Shutdown. When the daemon is gone, the process ends here, at once."""
        while not self._stopping:
            job = self._scheduler.next()
            if job is None:
                self._page.idle(self._readable.poll)
                self._receive()
            else:
                self._page.works_on(job.run.number)
                self._step(job)
                self._page.works_on(-1)
            self._poll()
        for run in self._runs.values():
            run.batches.close()

    def _step(self, job: Job[Run]) -> None:
        began = time.monotonic()
        try:
            next(job.steps)
        except StopIteration:
            self._scheduler.done(job)
        except Exception as error:
            self._fail(job.run.number, None, error)
        self._scheduler.stepped(job, began, time.monotonic())

    # --- messages ---

    def _poll(self) -> None:
        while not self._stopping and self._readable.poll(0):
            self._receive()

    def _receive(self) -> None:
        try:
            data, fd = seqpacket.receive(self._connection)
        except ConnectionError:
            data, fd = b"", None
        except OSError:
            self._guard.check()
            raise
        if not data:
            os._exit(0)  # user code's threads and exit handlers must not outlive the daemon
        if fd is not None:
            fd = above_standard(fd)
        try:
            message = codec.to_worker(data)
        except ProtocolError as error:
            self._cannot_read(data, fd, error)
            return
        before = self._page.works_on(getattr(message, "run", -1))
        try:
            self._handle(message, fd)
        except Exception as error:
            if not isinstance(message, m.ListSplits | m.StartRun | m.Fill | m.WriteRows | m.DropRun):
                raise
            self._fail(message.run, message.feed if isinstance(message, m.ListSplits | m.StartRun) else None, error)
        self._page.works_on(before)  # not where this process ends by what was raised

    def _cannot_read(self, data: bytes, fd: int | None, error: ProtocolError) -> None:
        """A message could not be decoded: the run that it is about fails. What is about none is only logged; if it was
        needed, the run that needs it fails."""
        if fd is not None:
            os.close(fd)
        try:
            run = msgspec.msgpack.decode(data, type=_AboutARun).run
        except (msgspec.MsgspecError, ValueError, RecursionError):
            print(f"penstock: a message from the daemon is left out: {error}", file=sys.stderr)
        else:
            self._fail(run, None, error)

    def _handle(self, message: m.ToWorker, fd: int | None) -> None:
        match message:
            case m.Fill():
                self._queue(message)
            case m.WriteRows():
                self._write_rows(message)
            case m.StartRun():
                self._start(message)
            case m.DropRun():
                self._drop(message.run)
            case m.ListSplits():
                self._list_splits(message)
            case m.Compare():
                self._compare(message)
            case m.SplitList():
                fd = _needed(fd, message)
                try:
                    self._lists[message.splits] = SharedSplits(fd, message.nbytes)
                finally:
                    os.close(fd)
            case m.ForgetSplits():
                self._lists.pop(message.splits, None)
            case m.Segment():
                self._segments.add(message.segment, message.nbytes, _needed(fd, message))
            case m.SegmentGone():
                self._segments.remove(message.segment)
            case m.Shutdown():
                self._stopping = True

    def _send(self, message: m.FromWorker, fd: int | None = None) -> None:
        self._guard.check()
        try:
            seqpacket.send(self._connection, codec.encode(message), fd)
        except ConnectionError:
            os._exit(0)

    def _fail(self, run: int, feed: str | None, error: Exception) -> None:
        """Report `error`, and close the run with all of its tickets."""
        if not isinstance(error, PenstockError):
            error = PenstockError(
                f"the worker failed in this stream: it {describe(error)}",
                remote_traceback="".join(traceback.format_exception(error)),
            )
        error.feed = error.feed or feed
        error.worker = self._number
        opened = self._runs.get(run)
        if opened is not None:
            error.feed = opened.feed.plan.name
            self._close(opened)
        self._send(m.RunFailed(run=run, error=m.ErrorReport.of(error)))

    # --- splits and the first sample ---

    def _list_splits(self, message: m.ListSplits) -> None:
        loaded = self._feeds[message.feed]
        plan = loaded.plan
        if plan.length is not None:
            spec, nbytes = look_at_item(loaded, self._randomness, self._page, message.run)
            self._send_listed(message.run, 0, f"indexable {plan.length}", spec, nbytes, loaded.first)
            return
        if plan.segment is not None:
            count = segment_count(plan)
            spec, nbytes = look_at_splits(
                loaded, range(count), message.epoch, self._randomness, self._page, message.run
            )
            self._send_listed(message.run, count, f"segments {plan.segment} {plan.samples}", spec, nbytes, loaded.first)
            return
        splits = list_splits(loaded.declared, plan, message.epoch, self._randomness, self._page, message.run)
        spec, nbytes = look_at_splits(loaded, splits, message.epoch, self._randomness, self._page, message.run)
        self._page.enter(message.run, -1, "pickling the splits")
        try:
            fd, length, digest = write_list(splits)
        finally:
            self._page.leave()
        try:
            self._send(
                m.SplitsListed(
                    run=message.run,
                    count=len(splits),
                    nbytes=length,
                    digest=digest,
                    spec=spec,
                    sample_nbytes=nbytes,
                    first=loaded.first,
                ),
                fd,
            )
        finally:
            os.close(fd)

    def _send_listed(
        self, run: int, count: int, what: str, spec: Spec | None, nbytes: int, first: m.FirstSample | None
    ) -> None:
        """Answer for a feed that has no list."""
        self._send(
            m.SplitsListed(
                run=run,
                count=count,
                nbytes=0,
                digest=hashlib.sha256(what.encode()).digest(),
                spec=spec,
                sample_nbytes=nbytes,
                first=first,
            )
        )

    def _compare(self, message: m.Compare) -> None:
        loaded = self._feeds[message.feed]
        splits = self._lists.get(message.splits, range(segment_count(loaded.plan) if loaded.plan.segment else 0))
        found = check_reproducibility(
            loaded, splits, message.index, message.digests, self._randomness, self._page, message.run
        )
        self._send(m.Compared(run=message.run, warning=found[:1024]))

    # --- runs ---

    def _start(self, message: m.StartRun) -> None:
        loaded = self._feeds[message.feed]
        if message.spec is not None:
            loaded.learn(message.spec)
        batches: LaneRun | IndexRun
        if loaded.plan.length is not None:
            loaded.warm_up(self._randomness, self._page, message.run)
            batches = IndexRun(
                loaded.plan,
                loaded.declared.generate,
                epoch=message.epoch,
                collate=loaded.collate,
                randomness=self._randomness,
                page=self._page,
                run=message.run,
            )
        else:
            batches = self._lane(message, loaded)
        careful = batches.index + message.careful
        self._runs[message.run] = Run(message.run, loaded, message.epoch, message.lane, batches, careful)

    def _lane(self, message: m.StartRun, loaded: LoadedFeed) -> LaneRun:
        splits: SharedSplits | range | None
        if loaded.plan.segment is not None:
            splits = range(segment_count(loaded.plan))
        else:
            splits = self._lists.get(message.splits)
        if splits is None:
            raise ProtocolError(f"a run of splits {message.splits}, which this worker was not given")
        opener = SplitOpener(loaded.declared, loaded.plan, self._randomness, self._page, message.run)

        def item(number: int, index: int) -> Any:
            if isinstance(splits, range):
                return index
            self._page.enter(message.run, number, f"item {index} of the list of splits")
            try:
                return splits[index]
            finally:
                self._page.leave()

        def open_split(number: int, index: int) -> OpenSplit:
            return opener.open(item(number, index), index, message.epoch, number)

        def on_skip(number: int, index: int, samples: int, error: GeneratorError | None) -> None:
            report = None
            if error is not None:
                error.feed, error.worker = loaded.plan.name, self._number
                report = m.ErrorReport.of(error)
            try:
                text = opener.show(item(number, index))
            except FeedError:  # it cannot be unpickled
                text = f"item {index} of the list of splits"
            self._send(m.SplitSkipped(run=message.run, number=number, split=text[:1024], samples=samples, error=report))

        return LaneRun(
            loaded.plan,
            epoch=message.epoch,
            lane=message.lane,
            n_splits=len(splits),
            collate=loaded.collate,
            open_split=open_split,
            record=message.record,
            ahead=message.ahead,
            skip=message.skip,
            on_skip=on_skip,
        )

    def _drop(self, number: int) -> None:
        run = self._runs.pop(number, None)
        if run is None:
            return  # its StartRun failed
        jobs = [] if run.closed else self._scheduler.drop(run)  # if it failed, its tickets are gone with it
        if run.waiting is not None:
            self._send(_nothing(number, run.waiting))
        self._close(run)
        for job in jobs:
            if job.fills:
                self._send(_nothing(number, job.ticket, job.reported))
            else:
                self._send(m.RowsWritten(run=number, ticket=job.ticket))  # the daemon only waits for its slot

    def _close(self, run: Run) -> None:
        run.closed = True
        run.waiting = None
        run.held = []
        run.batches.close()
        self._scheduler.drop(run)

    # --- turns ---

    def _queue(self, fill: m.Fill) -> None:
        run = self._runs.get(fill.run)
        if run is None or run.closed:
            return  # it failed when the daemon had not heard of it
        job = Job(run, fill.ticket, fills=True)
        if run.feed.layout is None:
            job.steps = self._fill_one(fill, job)
        else:
            job.steps = self._fill_turn(fill, job, run.feed.layout)
        waited = run.waiting == fill.ticket
        if waited:
            run.waiting = None
        self._scheduler.add(job, first=waited)

    def _fill_turn(self, fill: m.Fill, job: Job[Run], slot_layout: layout.SlotLayout) -> Iterator[None]:
        """A turn of a fixed feed: batches one after another, reported in parts where they take their time."""
        run = job.run
        source = run.batches
        _go_to(source, fill.index)
        if fill.first + fill.batches > slot_layout.batches:
            raise ProtocolError(f"{fill.batches} batches from place {fill.first} on do not fit a slot")
        slot = self._segments.batches(slot_layout, fill.segment)
        full = run.feed.plan.batch_size
        at = rows = 0
        ended = False
        reported = time.monotonic()

        def report(*, last: bool = False) -> None:
            nonlocal rows, reported
            self._report(fill, source, job.reported, at, rows, last=last, ended=ended)
            job.reported, rows, reported = at, 0, time.monotonic()

        def takes_long() -> bool:
            return at > job.reported and source.settled and time.monotonic() - reported > _PART_SECONDS

        while at < fill.batches:
            place = fill.first + at
            try:
                while not source.prepare():
                    if takes_long():
                        report()
                    yield
                made = source.next_batch([leaf[place] for leaf in slot.leaves])
            except Exception:
                if at > job.reported and source.settled:
                    report()  # what was made before is not lost
                raise
            if not made:
                ended = True
                break
            if made != full and at > job.reported:  # an epoch's last batch, which is a slab by itself
                report()
            slot.headers[place, :4] = made, run.epoch, run.lane, source.index - 1
            rows += made
            at += 1
            if at == fill.batches:
                break
            if source.index < run.careful or takes_long():
                report()
            yield
        report(last=True)

    def _fill_one(self, fill: m.Fill, job: Job[Run]) -> Iterator[None]:
        """One batch of a feed whose batches vary in size, which needs no more than it takes."""
        run = job.run
        if fill.batches != 1:
            raise ProtocolError(f"{fill.batches} batches in a slot of a feed whose batches vary in size")
        source = run.batches
        if not run.held:
            _go_to(source, fill.index)
            while not source.prepare():
                yield
            target: list[Any] = [None]
            if not source.next_batch(target):
                self._report(fill, source, 0, 0, 0, last=True, ended=True)
                return
            run.held = target[0]
        batch, run.held = run.held, []
        assert run.feed.spec is not None
        shapes = tuple(leaf.shape for leaf in batch)
        slot_layout = layout.lay_out([leaf.dtype for leaf in leaf_list(run.feed.spec)], shapes)
        if slot_layout.nbytes > fill.nbytes:
            run.held = [leaf.copy() for leaf in batch]  # the generator may reuse its buffers in another lane
            run.waiting = fill.ticket
            self._send(m.NeedRoom(run=fill.run, ticket=fill.ticket, nbytes=slot_layout.nbytes))
            return
        slot = self._segments.batches(slot_layout, fill.segment)
        for room, leaf in zip(slot.leaves, batch, strict=True):
            room[0] = leaf
        rows = next((shape[0] for shape in shapes if shape), 1)
        slot.headers[0, :4] = rows, run.epoch, run.lane, source.index - 1
        self._report(fill, source, 0, 1, rows, last=True, shapes=shapes)

    def _report(
        self,
        fill: m.Fill,
        source: LaneRun | IndexRun,
        first: int,
        at: int,
        rows: int,
        *,
        last: bool = False,
        ended: bool = False,
        shapes: m.Shapes = (),
    ) -> None:
        tells = at > first or ended  # the end too, as splits may have been skipped behind the last batch
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
                border=tells and source.border,
            )
        )

    def _write_rows(self, message: m.WriteRows) -> None:
        run = self._runs.get(message.run)
        if run is None or run.closed:  # the daemon only waits for the slot to be let alone
            self._send(m.RowsWritten(run=message.run, ticket=message.ticket))
            return
        steps = self._written(message, run)
        if isinstance(run.batches, LaneRun) and not run.batches.ended:
            job = Job(run, message.ticket, fills=False)
            job.steps = steps
            self._scheduler.add(job, first=True)
        else:
            next(steps, None)

    def _written(self, message: m.WriteRows, run: Run) -> Iterator[None]:
        """Write leftover rows. A run that goes on from behind its last full batch is read to its end first, which gives
        its leftover again."""
        lane, slot_layout = run.batches, run.feed.layout
        if isinstance(lane, LaneRun) and not lane.ended:
            run.read_again = True
            while not lane.prepare():
                yield
            if lane.next_batch(run.feed.collate.store(run.feed.plan.batch_size or 1)):
                raise ProtocolError(f"leftover rows are asked of a lane that has a full batch, number {lane.index - 1}")
        if slot_layout is None or message.start + message.count > lane.leftover:
            if run.read_again:
                raise FeedError(
                    f"lane {run.lane} had {message.start + message.count} samples or more behind its last full batch, "
                    f"and only {lane.leftover} when its splits were read again: a stream can go on elsewhere only if "
                    "a split always yields the same samples"
                )
            raise ProtocolError(
                f"rows {message.start} to {message.start + message.count} of a run with {lane.leftover} rows left over"
            )
        slot = self._segments.batches(slot_layout, message.segment)
        for target, rows in zip(slot.leaves, lane.leftover_rows, strict=True):
            target[0, message.row : message.row + message.count] = rows[message.start : message.start + message.count]
        slot.headers[0, :4] = message.rows, run.epoch, layout.TAIL_LANE, message.index
        self._send(m.RowsWritten(run=message.run, ticket=message.ticket))


class _AboutARun(msgspec.Struct):
    """What of a message tells which run it is about."""

    run: m.Count


def _needed(fd: int | None, message: m.Message) -> int:
    if fd is None:
        raise ProtocolError(f"a {type(message).__name__} message without its fd")
    return fd


def _nothing(run: int, ticket: int, first: int = 0) -> m.Made:
    return m.Made(run=run, ticket=ticket, first=first, batches=0, rows=0, last=True)


def _go_to(source: LaneRun | IndexRun, index: int) -> None:
    if isinstance(source, IndexRun):
        source.index = index
    elif source.index != index and not source.ended:
        raise ProtocolError(f"batch {index} is asked of a lane that stands at batch {source.index}")
