"""The worker's loop: reads the daemon's messages, and between them makes batches, one small step at a time.

A step makes a batch, or reads part of what must be read before one can be made. Between two steps the worker looks for
messages, so it drops a run that nobody wants within one step, and never lets rows for a merged batch wait for a turn.
User code runs inside these steps, while splits are listed or samples compared, and when generators are closed.

An error in a run fails that run only: the worker sends RunFailed and goes on.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import traceback

import msgspec

from penstock_proto import PenstockError, ProtocolError, codec, seqpacket
from penstock_proto import messages as m

from ..activity import ActivityPage
from ..feed import segment_count
from .failures import describe
from .filling import Filler, nothing_made
from .lane import LaneRun
from .listing import answer_listing
from .loaded_feed import LoadedFeed
from .process_guard import ProcessGuard, above_standard
from .randomness import GlobalRandomness
from .reproducibility import check_reproducibility
from .run import Run, RunOpener
from .scheduler import Job, Scheduler
from .slots import Memfds
from .splits import SharedSplits


class WorkerLoop:
    """Serves the daemon at the other end of a connection.

    Args:
        connection: blocking, SOCK_SEQPACKET.
        number: the worker's number, for errors.
        feeds: what is served, by name.
        page: the worker's activity page.
        guard: keeps the worker's own resources from user code.
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
        self._memfds = Memfds()
        guard.on_fork(self._memfds.abandon)
        self._lists: dict[int, SharedSplits] = {}
        self._runs: dict[int, Run] = {}
        self._scheduler = Scheduler[Run](
            lambda run: run.number // m.IDS_PER_STREAM, lambda run: run.waiting is not None
        )
        self._randomness = GlobalRandomness()
        self._opener = RunOpener(number, self._lists, self._randomness, page, self._send)
        self._filler = Filler(self._memfds, self._send)
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
            if not isinstance(message, m.ListSplits | m.StartRun | m.Fill | m.MeasureRows | m.WriteRows | m.DropRun):
                raise
            self._fail(message.run, message.feed if isinstance(message, m.ListSplits | m.StartRun) else None, error)
        self._page.works_on(before)  # not if this process ends by what was raised

    def _cannot_read(self, data: bytes, fd: int | None, error: ProtocolError) -> None:
        """A message could not be decoded: fail its run. A message that belongs to no run is only logged; a run that
        needs it fails later."""
        if fd is not None:
            os.close(fd)
        try:
            run = msgspec.msgpack.decode(data, type=_AboutARun).run
        except (msgspec.MsgspecError, ValueError, RecursionError):
            print(f"penstock: ignored a message from the daemon: {error}", file=sys.stderr)
        else:
            self._fail(run, None, error)

    def _handle(self, message: m.ToWorker, fd: int | None) -> None:
        match message:
            case m.Fill():
                self._queue(message)
            case m.WriteRows() | m.MeasureRows():
                self._leftover(message)
            case m.StartRun():
                self._runs[message.run] = self._opener.open(message, self._feeds[message.feed])
            case m.DropRun():
                self._drop(message.run)
            case m.ListSplits():
                answer_listing(message, self._feeds[message.feed], self._randomness, self._page, self._send)
            case m.Compare():
                self._compare(message)
            case m.ShareSplits():
                fd = _needed(fd, message)
                try:
                    self._lists[message.splits] = SharedSplits(fd, message.nbytes)
                finally:
                    os.close(fd)
            case m.ForgetSplits():
                self._lists.pop(message.splits, None)
            case m.Map():
                self._memfds.add(message.memfd, message.nbytes, _needed(fd, message))
            case m.Unmap():
                self._memfds.remove(message.memfd)
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
                f"the worker failed while it served this stream: it {describe(error)}",
                remote_traceback="".join(traceback.format_exception(error)),
            )
        error.feed = error.feed or feed
        error.worker = self._number
        opened = self._runs.get(run)
        if opened is not None:
            error.feed = opened.feed.plan.name
            self._close(opened)
        self._send(m.RunFailed(run=run, error=m.ErrorReport.of(error)))

    # --- the daemon's requests ---

    def _compare(self, message: m.Compare) -> None:
        feed = self._feeds[message.feed]
        splits = self._lists.get(message.splits, range(segment_count(feed.plan) if feed.plan.segment else 0))
        found = check_reproducibility(
            feed, splits, message.index, message.digests, self._randomness, self._page, message.run
        )
        self._send(m.Compared(run=message.run, warning=found[:1024]))

    def _drop(self, number: int) -> None:
        run = self._runs.pop(number, None)
        if run is None:
            return  # its StartRun failed
        jobs = [] if run.closed else self._scheduler.drop(run)  # if it failed, its tickets are gone with it
        if run.waiting is not None:
            self._send(nothing_made(number, run.waiting))
        self._close(run)
        for job in jobs:
            if job.fills:
                self._send(nothing_made(number, job.ticket, job.reported))
            else:
                self._send(m.RowsWritten(run=number, ticket=job.ticket))  # the daemon only waits for its slot

    def _close(self, run: Run) -> None:
        run.close()
        self._scheduler.drop(run)

    def _queue(self, fill: m.Fill) -> None:
        run = self._runs.get(fill.run)
        if run is None or run.closed:
            return  # it failed before the daemon knew
        job = Job(run, fill.ticket, fills=True)
        if run.feed.layout is None:
            job.steps = self._filler.one(fill, job)
        else:
            job.steps = self._filler.turn(fill, job, run.feed.layout)
        waited = run.waiting == fill.ticket
        if waited:
            run.waiting = None
        self._scheduler.add(job, first=waited)

    def _leftover(self, message: m.WriteRows | m.MeasureRows) -> None:
        run = self._runs.get(message.run)
        if run is None or run.closed:  # the daemon only waits until nothing writes to the slot
            self._send(m.RowsWritten(run=message.run, ticket=message.ticket))
            return
        steps = self._filler.leftover(message, run)
        if isinstance(run.batches, LaneRun) and not run.batches.ended:
            job = Job(run, message.ticket, fills=False)
            job.steps = steps
            self._scheduler.add(job, first=True)
        else:
            next(steps, None)


class _AboutARun(msgspec.Struct):
    """The part of a message that names its run."""

    run: m.Count


def _needed(fd: int | None, message: m.Message) -> int:
    if fd is None:
        raise ProtocolError(f"a {type(message).__name__} message without its fd")
    return fd
