"""The loader daemon: one process that carries out what the coordinator decides.

Everything runs on one event loop and one thread (pages of new slots are reserved, and slots copied, on others). Events
from workers and consumers go to the coordinator; after each, its commands are carried out in order.

What a peer does ends neither the daemon nor its clock. A failure is put down to what it is about:

- what a consumer says: to its session (sessions.py);
- what a worker says, or a command: to the stream that its run, its ticket or its reader tells (`_failed`). The commands
  behind one that failed are carried out all the same, as they are about other streams, or give back what this one has;
- a part of the clock: to the stream or the session that it was looking at; the other parts are done all the same;
- what cannot be written to the state file: to the stream of the group, whose consumers hear nothing that follows from
  it, and come back to where the file stands, as they would to another daemon.

A PenstockError, or no memory and no file descriptors (OSError, MemoryError), is then what the stream failed with. All
else is a bug: it is logged with its traceback, and counted in the status. Only where no stream can be told (as while
the feeds are being made ready, which no peer can influence), the daemon ends, since nobody knows where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from penstock_proto import DaemonStopped, MemoryBound, PenstockError, ProtocolError, StartError, codec
from penstock_proto import messages as m

from . import status
from .bugs import Bugs
from .coordinator import Coordinator, size
from .coordinator import commands as do
from .coordinator.feeds import Skipped, SplitsInfo
from .coordinator.memory import least_slots
from .coordinator.order import Part
from .coordinator.stream import Stream
from .doing import Doing
from .feed import mixing_warning, workers_warning
from .host import descriptors
from .host.arena import Arena, Segment
from .host.local import Listener, LocalPeer
from .host.network import Router
from .host.slots import Slots
from .host.supervisor import Supervisor
from .sessions import Consumers
from .sparing import Sparing
from .statefile import StateFile
from .to_workers import ToWorkers

log = logging.getLogger(__name__)

HAND_OVER = 60.0
"""Seconds that a worker which is to leave may go on until its lanes come to a border."""

HURRY = 10.0
"""Seconds that it then has for the batch that it is making."""

SAY_AGAIN = 300
"""Seconds after which it is said again why a feed cannot be started."""

STATUSES = 10
"""How often a second the status is made at most. More frequent requests get a copy that is at most 0.2 s old."""


class Daemon:
    """Serves feeds until it is stopped.

    Args:
        feeds: MODULE:ATTR of each feed.
        workers: number of worker processes, 1 or more.
        bind: `tcp://address:port` to listen on.
        advertise: HOST or HOST:PORT in the feeds' URLs, or None for what `bind` tells.
        memory: bytes that slots and shuffle blocks may take.
        on_ready: called with the URL of each feed once it can be consumed.
        hang_timeout: seconds without a sample after which a worker is killed, or None.
        state: path of the file by which groups outlive the daemon, or None.

    Raises:
        StartError: that file cannot be used, or the process may not have enough files open.
    """

    def __init__(
        self,
        feeds: list[str],
        *,
        workers: int,
        bind: str,
        memory: int,
        on_ready: Callable[[str], None],
        hang_timeout: float | None = None,
        state: str | None = None,
        advertise: str | None = None,
    ) -> None:
        self._feeds = feeds
        self._advertise = advertise
        self._bind = bind
        self._on_ready = on_ready
        self._workers = workers
        self._hang_timeout = hang_timeout
        self._draining = False
        self._carrying_out = False
        slots = _slots(len(feeds), workers)
        self._state = None if state is None else StateFile(state)
        kept = None if self._state is None else self._state.load()
        self._coordinator = Coordinator(workers=workers, memory=memory, kept=kept, slots=slots)
        self._arena = Arena()
        self._stopped = asyncio.Event()
        self._error: PenstockError | None = None
        self._warned: set[str] = set()
        self._started = time.monotonic()
        self._bugs = Bugs()
        self._log = Sparing(log)
        self._unkept: set[tuple[str, str]] = set()
        """Groups of which a command in hand could not be written to the state file."""
        self._status = ""
        self._status_at = 0.0
        self._statuses = 0
        """How many were asked for since the clock went last."""

    async def run(self, until_stdin_closes: bool = False) -> None:
        """Serve until SIGTERM, SIGINT, a stop request, or (where asked for) the end of standard input.

        The first signal lets the epochs that are being read go on to their ends, a second one does not. SIGTTIN and
        SIGTTOU mean one worker more and one fewer.

        Raises:
            StartError: the address cannot be bound, or a feed cannot be served at all.
            PenstockError: whatever else keeps a feed from being served.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        self._router = Router(self._bind, self._frame, self._connection_ended)
        if not re.match(r"tcp://(127\.|localhost|\[::1\])", self._router.endpoint):
            log.warning(
                "listening on %s: batches are not encrypted and whoever reaches the port can read them; use it in a "
                "trusted network only",
                self._router.endpoint,
            )
        try:
            self._listener = Listener(
                self._datagram, self._peer_ended, descriptors.for_local(descriptors.limit(), self._workers)
            )
            self._consumers = Consumers(
                self._coordinator,
                self._router,
                self._listener.name,
                ready=self._all_ready,
                status=self._status_text,
                stop=self._stop_asked,
                scale=self.scale,
                bugs=self._bugs,
            )
            self._slots = Slots(
                self._arena,
                reserved=lambda: (self._coordinator.reserved, self._coordinator.slots_reserved),
                found=self._slot_found,
                copied=self._copied,
                refused=self._refused,
                gone=self._segment_gone,
            )
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, self.drain)
            loop.add_signal_handler(signal.SIGTTIN, self._scale_by, 1)
            loop.add_signal_handler(signal.SIGTTOU, self._scale_by, -1)
            if until_stdin_closes:
                loop.add_reader(0, self._stdin)
            self._supervisor = Supervisor(
                self._feeds,
                self._workers,
                self._from_worker,
                self._worker_died,
                self._worker_given_up,
                self._hang_timeout,
            )
            self._to_workers = ToWorkers(self._supervisor, range(self._workers))
            self._supervisor.start()
            clock = loop.create_task(self._clock())
            clock.add_done_callback(self._clock_stopped)
            await self._stopped.wait()
            clock.cancel()
            if until_stdin_closes:
                loop.remove_reader(0)
            self._consumers.stop(self._error or DaemonStopped("the daemon was stopped"))
            await self._slots.stop()
            await self._supervisor.stop(codec.encode(m.Shutdown()))
            self._listener.close()
        finally:
            self._router.close()
            if self._state is not None:
                self._state.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop serving: consumers are told, workers end."""
        self._stopped.set()

    def drain(self) -> None:
        """Stop when the epochs that are being read have ended; when asked for the second time, at once."""
        if self._draining:
            self.stop()
            return
        self._draining = True
        reading = len(self._coordinator.streams)
        self._coordinator.stop(DaemonStopped("the daemon was stopped"))
        self._carry_out()
        if not self._stopped.is_set():
            log.info(
                "stopping when %d streams have come to the end of their epochs; a second signal stops now", reading
            )

    def scale(self, workers: int, now: bool = False) -> tuple[int, int]:
        """Run so many workers from now on; those too many leave when their lanes come to a border, or `now`.

        Returns:
            How many there were, and how many there will be.
        """
        crew = self._coordinator.workers
        staying = [number for number in crew.numbers if number not in crew.leaving]
        before, workers = len(staying), max(1, workers)
        most = descriptors.most_workers(descriptors.limit(), self._coordinator.slots_reserved)
        if workers > max(before, most):
            log.error("there are file descriptors for %d workers only: %s", max(before, most), descriptors.MEND)
            workers = max(before, most)
        for _ in range(before, workers):
            try:
                number = self._supervisor.add()
            except OSError as error:
                log.error("no worker can be added (%s): %s", error, descriptors.MEND)
                workers = len(crew.numbers) - len(crew.leaving)
                break
            self._to_workers.anew(number)
            self._coordinator.add_worker(number)
        for number in staying[workers:]:
            self._coordinator.retire_worker(number)
            if now:
                self._supervisor.kill(number)
            else:
                asyncio.get_running_loop().call_later(HAND_OVER, self._hurry, number)
        self._coordinator.allow_slots(descriptors.for_slots(descriptors.limit(), len(crew.numbers)))
        log.info("workers: %d, now %d", before, workers)
        self._carry_out()
        return before, workers

    def _hurry(self, number: int) -> None:
        if number in self._coordinator.workers.leaving:
            self._coordinator.hurry(number)
            self._carry_out()
            asyncio.get_running_loop().call_later(HURRY, self._end_leaving, number)

    def _end_leaving(self, number: int) -> None:
        if number in self._coordinator.workers.leaving:
            self._supervisor.kill(number)

    def _scale_by(self, more: int) -> None:
        crew = self._coordinator.workers
        self.scale(len(crew.numbers) - len(crew.leaving) + more)

    def _stop_asked(self, now: bool) -> None:
        if now:
            self.stop()
        elif not self._draining:
            self.drain()

    def _status_text(self) -> str:
        now = time.monotonic()
        self._statuses += 1
        if self._statuses <= STATUSES or now - self._status_at > 0.2:
            text = json.dumps(self.status(), ensure_ascii=False)
            self._status, self._status_at = text.encode(errors="replace").decode(), now  # half a surrogate pair
        return self._status

    def status(self) -> dict[str, object]:
        """What `penstock status` shows, as JSON types."""
        return {
            "pid": os.getpid(),
            "version": m.VERSION,
            "endpoint": self._router.endpoint,
            "unix": self._listener.name,
            "seconds": round(time.monotonic() - self._started, 3),
            "cpus": len(os.sched_getaffinity(0)),
            "cpu_seconds": time.process_time(),
            "ready": self._all_ready(),
            "memory": {
                "allowed": self._coordinator.memory,
                "reserved": self._coordinator.reserved,
                "arena": self._arena.nbytes,
                "positions": self._consumers.greeted.nbytes,
            },
            "malformed": self._consumers.malformed,
            "greeted": len(self._consumers.greeted),
            "internal_errors": self._bugs.count,
            "draining": self._draining,
            "failing": [
                {"feed": name, "times": failing.times, "error": failing.error.message}
                for name, failing in self._coordinator.failing.items()
            ],
            "feeds": [status.of_feed(feed, self._url(feed.name)) for feed in self._coordinator.feeds.values()],
            "workers": [
                status.of_worker(worker, leaving=worker.number in self._coordinator.workers.leaving)
                for worker in self._supervisor.workers.values()
            ],
            **status.of_streams(self._consumers.sessions.values()),
        }

    # --- events ---

    def _frame(self, routing_id: bytes, data: bytes) -> None:
        self._consumers.frame(routing_id, data)
        self._carry_out()

    def _datagram(self, peer: LocalPeer, data: bytes) -> None:
        self._consumers.datagram(peer, data)
        self._carry_out()

    def _peer_ended(self, peer: LocalPeer) -> None:
        self._consumers.peer_ended(peer)
        self._carry_out()

    def _connection_ended(self, routing_id: bytes) -> None:
        self._consumers.connection_ended(routing_id)
        self._carry_out()

    def _from_worker(self, number: int, data: bytes, fd: int | None) -> None:
        try:
            message = codec.from_worker(data)
        except ProtocolError as error:
            self._log.error("worker %d is killed, as it said what no worker says: %s", number, error.message)
            if fd is not None:
                os.close(fd)
            self._supervisor.kill(number)
            return
        try:
            self._heard(number, message, fd)
        except Exception as error:
            self._failed(error, getattr(message, "run", 0))
        self._carry_out()

    def _heard(self, number: int, message: m.FromWorker, fd: int | None) -> None:
        coordinator = self._coordinator
        match message:
            case m.Made():
                part = None
                if message.batches:
                    part = Part(message.first, message.batches, message.rows, message.shapes, message.record)
                coordinator.made(
                    message.ticket,
                    message.run,
                    part,
                    last=message.last,
                    ended=message.ended,
                    leftover=message.leftover,
                    record=message.record,
                    border=message.border,
                )
            case m.RowsWritten():
                coordinator.rows_written(message.ticket, message.run)
            case m.NeedRoom():
                coordinator.need_room(message.ticket, message.run, message.nbytes)
            case m.SplitSkipped():
                self._split_skipped(message)
            case m.RunFailed():
                error = message.error.error()
                if message.run >= m.IDS_PER_STREAM:  # otherwise it is what the start fails with
                    self._log.error("%s", error)
                failing = set(coordinator.failing)
                coordinator.run_failed(message.run, error)
                self._say_what_fails(coordinator.failing.keys() - failing)
            case m.SplitsListed():
                self._splits_listed(message, fd)
                fd = None
            case m.Compared():
                if message.warning:
                    self._warn_once(message.warning)
                log.debug("a first sample was compared with another worker's")
            case m.Imported():
                self._imported(number, message)
            case m.StartFailed() if self._all_ready() or self._coordinator.retries:
                log.error("worker %d cannot start any more: %s", number, message.error.error())
            case m.StartFailed():
                self._fail(message.error.error())
        if fd is not None:
            os.close(fd)

    def _worker_died(self, number: int, how: str, doing: Doing | None) -> None:
        self._to_workers.anew(number)
        blamed = None
        where = ""
        leaving = number in self._coordinator.workers.leaving  # then it was us
        if doing is not None and doing.in_user_code and not leaving:
            blamed = doing.run, doing.number, doing.split
        elif doing is not None and doing.works_on >= 0 and not leaving:
            blamed = doing.works_on, -1, ""
        if doing is not None and (doing.in_user_code or doing.cut_off) and doing.split and not leaving:
            where = f" while it read {doing.split}" if doing.run >= 0 else f" while it was {doing.split}"
        log.error("worker %d %s%s; what it was to make is made elsewhere", number, how, where)
        if not self._coordinator.feeds and not self._coordinator.retries:
            self._fail(StartError(f"worker {number} {how}{where} before it could serve a feed: see its output above"))
        failing = set(self._coordinator.failing)
        self._coordinator.worker_died(number, how, blamed)
        self._say_what_fails(self._coordinator.failing.keys() - failing)
        self._carry_out()

    def _worker_given_up(self, number: int, text: str) -> None:
        self._to_workers.gone(number)
        self._coordinator.worker_gone(number, text)
        self._carry_out()

    def _split_skipped(self, message: m.SplitSkipped) -> None:
        why = "it ended its worker again and again"
        if message.error is not None:
            why = message.error.message
        skipped = Skipped(message.split, message.samples, why)
        feed = self._coordinator.split_skipped(message.run, message.number, skipped)
        if feed is not None:
            log.warning(
                "feed %s: the rest of %s is left out after %d samples: %s",
                feed.name,
                message.split if feed.plan.segment is not None else f"split {message.split}",
                message.samples,
                why,
            )
            if message.error is not None and message.error.remote_traceback:
                log.info("%s", message.error.remote_traceback)

    def _stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                self.stop()

    def _say_what_fails(self, feeds: Iterable[str]) -> None:
        for name in feeds:
            failing = self._coordinator.failing[name]
            log.error(
                "feed %s cannot be started yet, and is tried again (tries so far: %d): %s",
                *(name, failing.times, failing.error),
            )

    async def _clock(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            if seconds % SAY_AGAIN == 0:
                self._say_what_fails(self._coordinator.failing)
            if seconds % 10 == 0 and not self._all_ready() and not self._coordinator.failing:
                log.info("not ready after %d s: importing, listing splits, or waiting for a first sample", seconds)
            self._statuses = 0
            now = time.monotonic()
            for part in (
                self._consumers.look_at_the_clock,
                partial(self._listener.look_at_the_clock, now),
                partial(self._coordinator.look_at_the_clock, now),
                partial(self._log.look_at_the_clock, now),
                self._forget_in_file,
            ):
                try:
                    part()
                except Exception as error:
                    self._bugs.note(error)
            self._carry_out()

    def _clock_stopped(self, clock: asyncio.Task[None]) -> None:
        if not clock.cancelled() and (error := clock.exception()) is not None:
            self._broken(asyncio.get_running_loop(), {"message": "the clock stopped", "exception": error})

    def _imported(self, number: int, message: m.Imported) -> None:
        if not self._coordinator.plans(message.feeds, number):
            log.error(
                "worker %d imported other feeds than the daemon serves: a module changed; restart the daemon", number
            )
            self._to_workers.say(number, m.Shutdown())
            return
        self._supervisor.ready(number)
        if any(plan.on_error == "retry" for plan in message.feeds):
            self._supervisor.give_nobody_up()
        self._coordinator.worker_ready(number)
        for plan in message.feeds:
            for text in plan.warnings:
                self._warn_once(text)
        if message.tensorflow:
            self._warn_once(
                "your module imports TensorFlow, and each worker does so by itself, which takes about 250 MB and 3 s: "
                "keep the generator in a module of its own that does not, or begin the module with its imports, which "
                "are then done once for all workers"
            )
        log.info("worker %d is ready: its imports took %.2f s", number, message.imports_seconds)

    def _splits_listed(self, message: m.SplitsListed, fd: int | None) -> None:
        number = 0 if fd is None else self._to_workers.keep_list(fd, message.nbytes)
        splits = SplitsInfo(number, message.count, message.digest)
        for text in message.first.warnings if message.first is not None else ():
            self._warn_once(text)
        self._coordinator.splits_listed(message.run, splits, message.spec, message.sample_nbytes, message.first)

    # --- commands ---

    def _carry_out(self) -> None:
        if self._carrying_out:  # whoever does will see to what has come up
            return
        if (
            self._state is not None and self._stopped.is_set()
        ):  # what consumers do now, the next daemon learns from them
            return
        self._carrying_out = True
        try:
            while commands := self._coordinator.take():
                for command in commands:
                    try:
                        self._carry_out_one(command)
                    except Exception as error:
                        self._command_failed(command, error)
                    if self._state is not None and self._error is not None:
                        return
        finally:
            self._carrying_out = False
        self._unkept.clear()
        self._slots.trim()
        if self._draining and self._coordinator.stopped:
            self.stop()

    def _carry_out_one(self, command: do.Command) -> None:
        match command:
            case do.FindSlot():
                self._slots.request(command)
            case do.Fill():
                self._to_workers.fill(command, self._slots.segment(command.ticket))
            case do.WriteRows():
                self._to_workers.write_rows(command, self._slots.segment(command.ticket))
            case do.SendSlab():
                self._consumers.deliver(command, self._slots.segment(command.ticket))
            case do.Copy():
                self._slots.copy(command)
            case do.SaveGroup():
                self._keep(command)
            case do.ForgetGroup():
                self._forget(command)
            case do.Free():
                self._slots.free(command.ticket)
            case do.StartRun():
                self._to_workers.start_run(command, self._coordinator.feeds[command.feed].info.spec)
            case do.DropRun():
                self._to_workers.say(command.worker, m.DropRun(command.run))
            case do.Tell():
                self._consumers.send(command.consumer, command.message)
            case do.Retry():
                asyncio.get_running_loop().call_later(command.seconds, self._retry, command.run)
            case do.Retire():
                self._to_workers.gone(command.worker)
                self._supervisor.retire(command.worker, codec.encode(m.Shutdown()))
            case do.ListSplits():
                self._to_workers.say(command.worker, m.ListSplits(command.run, command.feed, command.epoch))
            case do.Compare():
                self._to_workers.compare(command)
            case do.ForgetSplits():
                self._to_workers.forget_list(command.splits)
            case do.FeedReady():
                self._feed_ready(command.feed, command.splits)
            case do.FailStart():
                self._fail(command.error)
            case do.ReportBug():
                self._bugs.note(command.error)

    def _command_failed(self, command: do.Command, error: Exception) -> None:
        match command:
            case do.StartRun() if isinstance(error, PenstockError):  # it has not been said
                self._coordinator.run_failed(command.run, error)
            case do.SendSlab() | do.Tell():
                stream = self._consumers.stream_of(command.consumer)
                if stream is None:
                    self._bugs.note(error)
                else:
                    self._stream_failed(stream, error)
            case do.FindSlot() | do.Copy() | do.Free() | do.Fill() | do.WriteRows():
                self._failed(error, command.ticket)
            case do.StartRun() | do.DropRun() | do.ListSplits() | do.Retry():
                self._failed(error, command.run)
            case _:
                raise error

    def _failed(self, error: Exception, number: int) -> None:
        """Something failed that was about this run or ticket."""
        stream = self._coordinator.stream_of(number)
        if stream is not None:
            self._stream_failed(stream, error)
        elif number < m.IDS_PER_STREAM:
            raise error
        else:  # of a stream that has ended
            self._bugs.note(error)

    def _stream_failed(self, stream: Stream, error: Exception) -> None:
        if isinstance(error, OSError | MemoryError):
            error = MemoryBound(
                f"the daemon has no memory or no file descriptors left ({error!r}): raise its limits (ulimit -n), or "
                "close other streams",
                feed=stream.feed.name,
            )
        if isinstance(error, PenstockError):
            self._coordinator.fail(stream, error)
        else:
            self._coordinator.broken(stream, error)

    def _keep(self, command: do.SaveGroup) -> None:
        assert self._state is not None
        feed, group = key = command.feed.name, command.group
        if key in self._unkept:  # it says what has changed since one that could not be written
            return
        try:
            self._state.keep(command)
            return
        except DaemonStopped as error:
            failed = error
        self._unkept.add(key)
        self._log.error("feed %s: group %r waits: %s", feed, group, failed.message)
        try:
            kept = self._state.kept(feed, group)
        except StartError as error:
            self._fail(error)
            return
        stream = self._coordinator.not_kept(feed, group, kept, failed)
        if stream is not None:
            self._consumers.mute(stream)

    def _forget(self, command: do.ForgetGroup) -> None:
        assert self._state is not None
        try:
            self._state.forget(command.feed, command.group)
        except DaemonStopped as error:
            text = "feed %s: group %r has ended, and is deleted from the state file when that can be written: %s"
            self._log.error(text, command.feed, command.group, error.message)

    def _forget_in_file(self) -> None:
        """Delete the groups that have ended and could not be deleted then."""
        if self._state is not None and self._state.to_forget and not self._stopped.is_set():
            for feed, group in list(self._state.to_forget):
                self._forget(do.ForgetGroup(feed, group))

    def _happened(self, number: int, event: Callable[..., None], *values: object) -> None:
        """Tell the coordinator of something that happened to a run or a ticket."""
        try:
            event(number, *values)
        except Exception as error:
            self._failed(error, number)
        self._carry_out()

    def _slot_found(self, ticket: int) -> None:
        self._happened(ticket, self._coordinator.slot_found)

    def _copied(self, ticket: int) -> None:
        self._happened(ticket, self._coordinator.copied)

    def _refused(self, ticket: int, error: PenstockError) -> None:
        self._happened(ticket, self._coordinator.no_slot, error)

    def _retry(self, run: int) -> None:
        self._happened(run, self._coordinator.retry)

    def _segment_gone(self, segment: Segment) -> None:
        self._consumers.segment_gone(segment)
        self._to_workers.forget_segment(segment)

    # --- starting ---

    def _all_ready(self) -> bool:
        return len(self._coordinator.feeds) == len(self._feeds)

    def _feed_ready(self, name: str, splits: int) -> None:
        feed = self._coordinator.feeds[name]
        log.info("feed %s: %s, slots of %s", name, feed.info.spec, size(feed.slot_nbytes))
        if splits:
            for text in (mixing_warning(feed.plan, splits), workers_warning(feed.plan, splits, self._workers)):
                if text:
                    self._warn_once(text)
        self._on_ready(self._url(name))
        if self._all_ready():
            self._consumers.feeds_ready()

    def _url(self, feed: str) -> str:
        address, _, port = self._router.endpoint.removeprefix("tcp://").rpartition(":")
        host = socket.gethostname() if address in ("0.0.0.0", "[::]", "*") else address
        place = self._advertise or host
        return f"tcp://{place if re.search(r':[0-9]+$', place) else f'{place}:{port}'}/{feed}"

    def _fail(self, error: PenstockError) -> None:
        if self._error is None:
            self._error = error
        self.stop()

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something was raised that nobody expected: better an end with its traceback than consumers that wait."""
        error = context.get("exception")
        log.critical("%s", context.get("message", "unexpected"), exc_info=error)
        self._fail(PenstockError(f"the daemon failed: {error!r}; please report this as a bug"))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)


def _slots(feeds: int, workers: int) -> int:
    """For how many slots there are file descriptors.

    Raises:
        StartError: each feed could not have the least that a stream needs.
    """
    limit, least = descriptors.limit(), feeds * least_slots(1)
    slots = descriptors.for_slots(limit, workers)
    if slots < least:
        raise StartError(
            f"--workers {workers} needs {descriptors.needed(least, workers)} open files with these feeds, and the "
            f"daemon may have {limit}: {descriptors.MEND}, or run fewer workers"
        )
    return slots


def serve(
    feeds: list[str],
    *,
    workers: int,
    bind: str,
    memory: int,
    on_ready: Callable[[str], None],
    until_stdin_closes: bool = False,
    hang_timeout: float | None = None,
    state: str | None = None,
    advertise: str | None = None,
) -> None:
    """Run a daemon in this process, on uvloop, until it is stopped. Call it on the main thread.

    Raises:
        PenstockError: it could not start; the message says why.
    """
    import uvloop

    descriptors.raise_limit()

    async def main() -> None:
        daemon = Daemon(
            feeds,
            workers=workers,
            bind=bind,
            memory=memory,
            on_ready=on_ready,
            hang_timeout=hang_timeout,
            state=state,
            advertise=advertise,
        )
        await daemon.run(until_stdin_closes)

    uvloop.run(main())
