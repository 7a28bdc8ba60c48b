"""The loader daemon: one process that serves feeds until it is stopped. Here is how it starts, scales, drains and ends.

Everything runs on one event loop and one thread (pages of new slots are reserved, and slots copied, on others). Events
from workers (from_workers.py) and consumers (sessions.py) go to the coordinator. Its commands are carried out in order
(dispatch.py).

What a peer does ends neither the daemon nor its clock. A failure is put down to what it is about:

- what a consumer says: to its session (sessions.py);
- what a worker says, or a command: to the stream that its run, its ticket or its consumer tells (dispatch.py);
- a part of the clock: to the stream or the session that it was looking at; the other parts are done all the same;
- what cannot be written to the state file: to the stream of the group (group_file.py).

A PenstockError, or no memory and no file descriptors (OSError, MemoryError), is then what the stream failed with. All
else is a bug: it is logged with its traceback, and counted in the status.
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
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock_proto import DaemonStopped, PenstockError, StartError, codec
from penstock_proto import messages as m

from . import status
from .bugs import Bugs
from .coordinator import Coordinator, size
from .coordinator import events as on
from .coordinator.memory import least_slots
from .dispatch import Dispatch
from .feed import mixing_warning, workers_warning
from .from_workers import FromWorkers
from .group_file import GroupFile
from .host import descriptors
from .host.arena import Arena, Memfd
from .host.local import Listener, LocalPeer
from .host.network import Router
from .host.slots import Slots
from .host.supervisor import Supervisor
from .rate_limited_log import RateLimitedLog
from .sessions import Sessions
from .statefile import StateFile
from .to_workers import ToWorkers

log = logging.getLogger(__name__)

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
        environment: variables of the workers; None as a value removes one.

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
        environment: m.Environment | None = None,
    ) -> None:
        self._environment = environment
        self._feeds = feeds
        self._advertise = advertise
        self._bind = bind
        self._on_ready = on_ready
        self._workers = workers
        self._hang_timeout = hang_timeout
        self._draining = False
        slots = _slots(len(feeds), workers)
        self._state = None if state is None else StateFile(state)
        saved = None if self._state is None else self._state.load()
        self._coordinator = Coordinator(workers=workers, memory=memory, saved=saved, slots=slots)
        self._arena = Arena()
        self._stopped = asyncio.Event()
        self._error: PenstockError | None = None
        self._warned: set[str] = set()
        self._started = time.monotonic()
        self._bugs = Bugs()
        self._group_file: GroupFile | None = None
        self._log = RateLimitedLog(log)
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
            self._connect()
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, self.drain)
            loop.add_signal_handler(signal.SIGTTIN, self._scale_by, 1)
            loop.add_signal_handler(signal.SIGTTOU, self._scale_by, -1)
            if until_stdin_closes:
                loop.add_reader(0, self._stdin)
            self._supervisor.start()
            clock = loop.create_task(self._clock())
            clock.add_done_callback(self._clock_stopped)
            await self._stopped.wait()
            clock.cancel()
            if until_stdin_closes:
                loop.remove_reader(0)
            self._sessions.stop(self._error or DaemonStopped("the daemon was stopped"))
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
        if self._state is not None:
            self._dispatch.halt()  # what consumers do now, the next daemon learns from them

    def drain(self) -> None:
        """Stop when the epochs that are being read have ended; when asked for the second time, at once."""
        if self._draining:
            self.stop()
            return
        self._draining = True
        reading = len(self._coordinator.streams)
        self._dispatch.tell(on.Stop(DaemonStopped("the daemon was stopped")))
        if not self._stopped.is_set():
            log.info(
                "stopping when %d streams have come to the end of their epochs; a second signal stops now", reading
            )

    def scale(self, workers: int, now: bool = False) -> tuple[int, int]:
        """Run so many workers from now on; those too many leave when their lanes come to a border, or `now`.

        Returns:
            How many there were, and how many there will be.
        """
        there = self._coordinator.workers
        staying = [number for number in there.numbers if number not in there.leaving]
        before, workers = len(staying), max(1, workers)
        most = descriptors.most_workers(descriptors.limit(), self._coordinator.budget.slots_reserved)
        if workers > max(before, most):
            log.error("there are file descriptors for %d workers only: %s", max(before, most), descriptors.HOW_TO_RAISE)
            workers = max(before, most)
        for _ in range(before, workers):
            try:
                number = self._supervisor.add()
            except OSError as error:
                log.error("no worker can be added (%s): %s", error, descriptors.HOW_TO_RAISE)
                workers = len(there.numbers) - len(there.leaving)
                break
            self._to_workers.anew(number)
            self._dispatch.tell(on.WorkerAdded(number))
        for number in staying[workers:]:
            self._dispatch.tell(on.RetireWorker(number, now))
        self._dispatch.tell(on.SlotsAllowed(descriptors.for_slots(descriptors.limit(), len(there.numbers))))
        log.info("workers: %d, now %d", before, workers)
        return before, workers

    def _scale_by(self, more: int) -> None:
        there = self._coordinator.workers
        self.scale(len(there.numbers) - len(there.leaving) + more)

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
                "allowed": self._coordinator.budget.memory,
                "reserved": self._coordinator.budget.reserved,
                "arena": self._arena.nbytes,
                "positions": self._sessions.greeted.nbytes,
            },
            "malformed": self._sessions.malformed.count,
            "greeted": len(self._sessions.greeted),
            "internal_errors": self._bugs.count,
            "draining": self._draining,
            "failing": [
                {"feed": name, "times": failing.times, "error": failing.error.message}
                for name, failing in self._coordinator.starting.failing.items()
            ],
            "feeds": [status.of_feed(feed, self._url(feed.name)) for feed in self._coordinator.feeds.values()],
            "workers": [
                status.of_worker(worker, leaving=worker.number in self._coordinator.workers.leaving)
                for worker in self._supervisor.workers.values()
            ],
            **status.of_streams(self._sessions.sessions.values(), self._coordinator),
        }

    # --- parts ---

    def _connect(self) -> None:
        """Make the parts that tell the coordinator what happens, and those that carry out what it decides."""
        self._dispatch = dispatch = Dispatch(
            self._coordinator,
            bugs=self._bugs,
            feed_ready=self._feed_ready,
            accepted=lambda worker: self._from_workers.accepted(worker),
            rejected=lambda worker: self._from_workers.rejected(worker),
            skipped=lambda said: self._from_workers.skipped(said),
            fail_start=self._fail,
            settled=self._settled,
        )
        self._sessions = Sessions(
            self._coordinator,
            dispatch.tell,
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
            reserved=lambda: (self._coordinator.budget.reserved, self._coordinator.budget.slots_reserved),
            found=lambda ticket: dispatch.tell(on.SlotFound(ticket)),
            copied=lambda ticket: dispatch.tell(on.Copied(ticket)),
            refused=lambda ticket, error: dispatch.tell(on.NoSlot(ticket, error)),
            gone=self._memfd_gone,
        )
        self._supervisor = Supervisor(
            self._feeds,
            self._workers,
            lambda worker, data, fd: self._from_workers.heard(worker, data, fd),
            lambda worker, how, doing: self._from_workers.died(worker, how, doing),
            lambda worker, how: self._from_workers.given_up(worker, how),
            self._hang_timeout,
            self._environment,
        )
        self._to_workers = ToWorkers(self._supervisor, range(self._workers))
        self._from_workers = FromWorkers(
            self._coordinator,
            dispatch,
            supervisor=self._supervisor,
            to_workers=self._to_workers,
            spare=self._log,
            warn_once=self._warn_once,
            fail=self._fail,
        )
        if self._state is not None:
            self._group_file = GroupFile(
                self._state, self._coordinator, self._sessions, tell=dispatch.tell, fail=self._fail
            )
        dispatch.connect(
            slots=self._slots,
            sessions=self._sessions,
            supervisor=self._supervisor,
            to_workers=self._to_workers,
            group_file=self._group_file,
        )

    def _frame(self, routing_id: bytes, data: bytes) -> None:
        self._sessions.frame(routing_id, data)

    def _datagram(self, peer: LocalPeer, data: bytes) -> None:
        self._sessions.datagram(peer, data)

    def _peer_ended(self, peer: LocalPeer) -> None:
        self._sessions.peer_ended(peer)

    def _connection_ended(self, routing_id: bytes) -> None:
        self._sessions.connection_ended(routing_id)

    def _stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                self.stop()

    async def _clock(self) -> None:
        seconds = 0
        while True:
            await asyncio.sleep(1)
            seconds += 1
            if seconds % SAY_AGAIN == 0:
                self._from_workers.say_what_fails(self._coordinator.starting.failing)
            if seconds % 10 == 0 and not self._all_ready() and not self._coordinator.starting.failing:
                log.info("not ready after %d s: importing, listing splits, or waiting for a first sample", seconds)
            self._statuses = 0
            now = time.monotonic()
            parts: list[Callable[[], None]] = [
                self._sessions.look_at_the_clock,
                partial(self._listener.look_at_the_clock, now),
                partial(self._log.look_at_the_clock, now),
            ]
            if self._group_file is not None and not self._stopped.is_set():
                parts.append(partial(self._group_file.look_at_the_clock, now))
            for part in parts:
                try:
                    part()
                except Exception as error:
                    self._bugs.note(error)

    def _clock_stopped(self, clock: asyncio.Task[None]) -> None:
        if not clock.cancelled() and (error := clock.exception()) is not None:
            self._broken(asyncio.get_running_loop(), {"message": "the clock stopped", "exception": error})

    def _settled(self) -> None:
        """All that was to be done has been carried out."""
        if self._draining and self._coordinator.stopped:
            self.stop()

    def _memfd_gone(self, memfd: Memfd) -> None:
        self._sessions.memfd_gone(memfd)
        self._to_workers.forget_memfd(memfd)

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
            self._sessions.feeds_ready()

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
            f"daemon may have {limit}: {descriptors.HOW_TO_RAISE}, or run fewer workers"
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
    environment: m.Environment | None = None,
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
            environment=environment,
        )
        await daemon.run(until_stdin_closes)

    uvloop.run(main())
