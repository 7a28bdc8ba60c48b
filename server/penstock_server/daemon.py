"""The loader daemon: one process that serves feeds until it is stopped. This file starts, drains and ends it.

Everything runs on one event loop and one thread. (Other threads reserve the pages of new slots, copy slots, and work
out what takes long for the HTTP server; with keys, threads of libzmq encrypt.) Events from workers (from_workers.py)
and consumers (sessions.py) go to the coordinator. Its commands are carried out in order (dispatch.py).

Nothing that a peer does ends the daemon. A failure costs only what it is about:

- a consumer's message: its session (sessions.py);
- a worker's message, or a command: the stream of its run, ticket or consumer (dispatch.py);
- a part of the clock: nothing; the other parts are called all the same (clock.py);
- a write to the state file: the stream of the group (group_file.py).

A stream fails with the PenstockError that was raised, or with MemoryBound if memory or file descriptors ran out
(OSError, MemoryError). Any other exception is a bug: it is logged with its traceback, and counted in the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Collection
from typing import Any

from penstock_proto import DaemonStopped, PenstockError, StartError, codec
from penstock_proto import messages as m
from penstock_proto.status_history import History

from . import http as http_server
from . import status
from .access import Access
from .bugs import Bugs
from .clock import Clock
from .coordinator import Coordinator, size
from .coordinator import events as on
from .coordinator.memory import least_slots
from .dispatch import Dispatch
from .feed_warnings import mixing_warning, workers_warning
from .from_workers import FromWorkers
from .group_file import GroupFile
from .host import descriptors
from .host.arena import Arena, Memfd
from .host.local import Listener, LocalPeer
from .host.network import Router
from .host.slots import Slots
from .host.supervisor import Supervisor
from .http.watched import Watched
from .rate_limited_log import RateLimitedLog
from .reloading.reloader import Reloader
from .scaling import Scaling
from .sessions import Sessions
from .statefile import StateFile
from .to_workers import ToWorkers
from .waits import Looks
from .worker_memory import WorkerMemory

log = logging.getLogger(__name__)

SAY_AGAIN = 300
"""Seconds after which the log says again why a feed cannot be started."""


class Daemon:
    """Serves feeds until it is stopped.

    Args:
        feeds: MODULE:ATTR of each feed.
        workers: number of worker processes, 1 or more.
        bind: `tcp://address:port` to listen on.
        advertise: HOST or HOST:PORT for the feeds' URLs; None: the address of `bind`.
        memory: bytes that slots and shuffle blocks may take.
        on_ready: called with the URL of each feed once it can be consumed.
        hang_timeout: seconds without a sample after which a worker is killed, or None.
        environment: variables of the workers; None as a value removes one.
        http: host and port of the HTTP server, or None for none.
        state: path of the file with which groups outlive the daemon, or None.
        access: who may connect over TCP.
        allow_uids: users, besides the daemon's own and root, whose trainers on this host share memory with it.
        each_second: called once a second with this object.
        reloader: knows whether the feeds' code has changed, or None.

    Attributes:
        renewing: whether another daemon is to take its place when it has ended.
        endpoint: the address at which it listens; "" until workers are started.

    Raises:
        StartError: the state file cannot be used, or the limit of open files is too low.
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
        http: tuple[str, int] | None = None,
        access: Access,
        allow_uids: Collection[int] = (),
        each_second: Callable[[Daemon], None] = lambda daemon: None,
        reloader: Reloader | None = None,
    ) -> None:
        self._access = access
        self._allow_uids = allow_uids
        self._reloader = reloader
        self.renewing = False
        self.endpoint = ""
        self._environment = environment
        self._each_second = each_second
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
        self._id = secrets.token_hex(8)
        """Tells daemons apart: the process id may be that of another, in the same process or in another container."""
        self._bugs = Bugs()
        self._group_file: GroupFile | None = None
        self._log = RateLimitedLog(log)
        self._status_text = status.Text(self.status)
        self._history = History()
        self._memory = WorkerMemory(
            lambda: [worker.pid for worker in self._supervisor.workers.values() if worker.pid is not None],
            lambda: self._sessions.status_fresh(),
            self._bugs,
        )
        self._http = None if http is None else http_server.server(*http, self._watched())

    async def run(self, until_stdin_closes: bool = False) -> None:
        """Serve until SIGTERM, SIGINT, a stop request, or (if asked for) the end of standard input.

        After the first signal the current epochs go on to their ends. A second one ends the daemon at once. SIGTTIN
        adds a worker, and SIGTTOU removes one.

        Raises:
            StartError: the address cannot be bound, or a feed cannot be served at all.
            PenstockError: a feed cannot be served for another reason.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        self._router = Router(self._bind, self._frame, self._connection_ended, self._access.keys)
        self._access.say(self._router.endpoint)
        try:
            self._listener = Listener(
                self._datagram,
                self._peer_ended,
                descriptors.for_local(descriptors.limit(), self._workers),
                self._allow_uids,
            )
            self._connect()
            if self._http is not None:
                log.info("HTTP server: %s", await self._http.start(), extra={"event": "listening"})
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, self.drain)
            loop.add_signal_handler(signal.SIGTTIN, self._scaling.scale_by, 1)
            loop.add_signal_handler(signal.SIGTTOU, self._scaling.scale_by, -1)
            if self._access.keys is not None:
                loop.add_signal_handler(signal.SIGHUP, self._access.read_again, self._sessions, self._router)
            if until_stdin_closes:
                loop.add_reader(0, self._stdin)
            self.endpoint = self._router.endpoint
            self._supervisor.start()
            clock = self._clock()
            clock.start()
            self._looks.start()
            await self._stopped.wait()
            clock.stop()
            self._looks.stop()
            if until_stdin_closes:
                loop.remove_reader(0)
            self._sessions.stop(self._error or DaemonStopped("the daemon was stopped"))
            await self._slots.stop()
            await self._supervisor.stop(codec.encode(m.Shutdown()))
            self._listener.close()
        finally:
            if self._http is not None:
                await self._http.stop()
            self._router.close()
            if self._state is not None:
                self._state.close()
        if self._error is not None:
            raise self._error
        if not (until_stdin_closes or self.renewing):  # then the trainer knows, or another daemon takes its place
            log.info("stopped", extra={"event": "stopped"})

    def stop(self) -> None:
        """Stop serving: consumers are told, workers end."""
        self._stopped.set()
        if self._state is not None:
            self._dispatch.halt()  # consumers will tell the next daemon what they do from now on

    def drain(self) -> None:
        """Stop when the current epochs have ended, or at once if this is called for the second time."""
        if self._draining and not self.renewing:
            self.stop()
            return
        self.renewing = False
        reading = len(self._coordinator.streams)
        self._begin_to_drain("the daemon was stopped")
        if not self._stopped.is_set():
            text = "stopping when the epochs that are being read have ended (streams: %d); a second signal stops now"
            log.info(text, reading, extra={"event": "draining"})

    def renew(self) -> None:
        """Stop when the current epochs have ended, so that another daemon can take its place with new code."""
        if not self._draining:
            log.info("going over to the new code", extra={"event": "renewing"})
            self.renewing = True
            self._begin_to_drain("the daemon is restarted with new code")

    def _begin_to_drain(self, why: str) -> None:
        if not self._draining:
            self._draining = True
            self._dispatch.tell(on.Stop(DaemonStopped(why)))

    def _stop_asked(self, now: bool) -> None:
        if now:
            self.renewing = False
            self.stop()
        elif self.renewing or not self._draining:
            self.drain()

    @property
    def ready(self) -> bool:
        """Whether all feeds can be consumed."""
        return len(self._coordinator.feeds) == len(self._feeds)

    @property
    def draining(self) -> bool:
        """Whether it stops when the epochs that are being read have ended."""
        return self._draining

    @property
    def http(self) -> tuple[str, int] | None:
        """Host and port of the HTTP server; None if there is none."""
        return None if self._http is None else self._http.address

    @property
    def between_epochs(self) -> bool:
        """Whether no consumer reads an epoch that has an end."""
        read = self._coordinator.stream_read_by
        consumers = self._coordinator.consumers.values()
        return not any(consumer.reading and not read(consumer).feed.plan.endless for consumer in consumers)

    def status(self) -> dict[str, object]:
        """The answer to `penstock status`, as JSON types."""
        return self._history.described(self._counts())

    def _counts(self) -> dict[str, Any]:
        """Return what there is now, and what there was since the start."""
        now = time.monotonic() - self._started
        coordinator, sessions = self._coordinator, self._sessions
        return {
            **status.of_process(self._id, self._router.endpoint, self._listener.name, now),
            **status.of_service(coordinator, sessions, self._bugs, ready=self.ready, draining=self._draining),
            "memory": status.of_memory(coordinator, self._arena, sessions.opening.greeted),
            "feeds": [
                status.of_feed(
                    feed,
                    self._url(feed.name),
                    coordinator.streams.values(),
                    self._from_workers.caches,
                    self._looks.of_feed(feed.name),
                )
                for feed in coordinator.feeds.values()
            ],
            "workers": [
                status.of_worker(
                    worker,
                    leaving=worker.number in coordinator.workers.leaving,
                    memory=self._memory.of(worker.pid),
                )
                for worker in self._supervisor.workers.values()
            ],
            **status.of_streams(sessions.table, coordinator, self._router.unsent, self._looks.of),
        }

    # --- parts ---

    def _connect(self) -> None:
        """Make the parts that tell the coordinator what happens, and the parts that carry out its commands."""
        self._dispatch = dispatch = Dispatch(
            self._coordinator,
            bugs=self._bugs,
            feed_ready=self._feed_ready,
            accepted=lambda worker: self._from_workers.accepted(worker),
            rejected=lambda worker: self._from_workers.rejected(worker),
            skipped=lambda said: self._from_workers.skipped(said),
            fail_start=self._fail,
            idle=self._idle,
        )
        self._sessions = Sessions(
            self._coordinator,
            self._tell_of_consumer,
            self._router,
            self._listener.name,
            ready=lambda: self.ready,
            status=self._status_text.get,
            fresh=self._memory.fresh,
            stop=self._stop_asked,
            scale=lambda workers, now: self._scaling.scale(workers, now),
            stacks=lambda: self._supervisor.stacks(),
            bugs=self._bugs,
        )
        self._looks = Looks(self._coordinator, self._sessions.table, self._router.unsent)
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
            stale=lambda: self._reloader is not None and self._reloader.stale(),
        )
        self._scaling = Scaling(self._coordinator, dispatch.tell, self._supervisor, self._to_workers)
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

    def _tell_of_consumer(self, event: on.Event) -> None:
        if isinstance(event, on.Begin) and self._reloader is not None and self._reloader.pending:
            self.renew()  # before the epoch begins
        self._dispatch.tell(event)

    def _watched(self) -> Watched:
        """What the HTTP server may look at. Most of it is made by `_connect`, before that server starts."""
        coordinator = self._coordinator

        def feed_of(run: int) -> str:
            stream = coordinator.streams.get(run // m.IDS_PER_STREAM)
            return "" if stream is None or len(self._feeds) == 1 else stream.feed.name

        return Watched(
            status=self.status,
            status_text=self._status_text.get,
            waits=lambda feed: self._looks.of_feed(feed),
            seconds=lambda: time.monotonic() - self._started,
            feeds=coordinator.feeds,
            workers=lambda: self._supervisor.workers.values(),
            memory=self._memory,
            feed_of=feed_of,
            look_at_slabs=lambda look: self._sessions.look_at_slabs(look),
            bugs=self._bugs,
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

    def _clock(self) -> Clock:
        parts: list[Callable[[int], None]] = [
            self._say_what_is_not_ready,
            lambda _: self._status_text.another_second(),
            lambda _: self._sessions.look_at_the_clock(),
            lambda _: self._listener.look_at_the_clock(time.monotonic()),
            lambda _: self._log.look_at_the_clock(time.monotonic()),
            self._look_at_the_group_file,
            self._remember_status,
            lambda _: self._each_second(self),
        ]
        if self._http is not None:
            parts.append(self._http.another_second)
        return Clock(parts, self._bugs, lambda error: self._broken_by("the clock stopped", error))

    def _say_what_is_not_ready(self, seconds: int) -> None:
        failing = self._coordinator.starting.failing
        if seconds % SAY_AGAIN == 0:
            self._from_workers.say_what_fails(failing)
        if seconds % 10 == 0 and not self.ready and not failing:
            text = "not ready after %d s: importing, listing splits, or waiting for a first sample"
            log.info(text, seconds, extra={"event": "starting"})

    def _remember_status(self, seconds: int) -> None:
        if seconds % (1 + len(self._supervisor.workers) // 32) == 0:  # each worker takes some 70 us
            self._history.add(self._counts())

    def _look_at_the_group_file(self, _: int) -> None:
        if self._group_file is not None and not self._stopped.is_set():
            self._group_file.look_at_the_clock(time.monotonic())

    def _idle(self) -> None:
        """All commands are carried out."""
        if self._draining and self._coordinator.stopped:
            self.stop()

    def _memfd_gone(self, memfd: Memfd) -> None:
        self._sessions.memfd_gone(memfd)
        self._to_workers.forget_memfd(memfd)

    # --- starting ---

    def _feed_ready(self, name: str, splits: int) -> None:
        feed = self._coordinator.feeds[name]
        fields = {"event": "feed_ready", "feed": name}
        log.info("feed %s: %s, slots of %s", name, feed.info.spec, size(feed.slot_nbytes), extra=fields)
        if splits:
            for text in (
                mixing_warning(feed.plan, splits, feed.info.pool),
                workers_warning(feed.plan, splits, self._workers),
            ):
                if text:
                    self._warn_once(text)
        self._on_ready(self._url(name))
        if self.ready:
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
        self._broken_by(context.get("message", "unexpected"), context.get("exception"))

    def _broken_by(self, what: str, error: BaseException | None) -> None:
        """End the daemon after an unexpected error, and log its traceback. Otherwise consumers would wait forever."""
        log.critical("%s", what, exc_info=error, extra={"event": "internal_error"})
        self._fail(PenstockError(f"the daemon failed: {error!r}; please report this as a bug"))

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text, extra={"event": "feed_warning"})


def _slots(feeds: int, workers: int) -> int:
    """Return the number of slots for which there are file descriptors.

    Raises:
        StartError: they are too few for one stream of each feed.
    """
    limit, least = descriptors.limit(), feeds * least_slots(1)
    slots = descriptors.for_slots(limit, workers)
    if slots < least:
        raise StartError(
            f"--workers {workers} needs {descriptors.needed(least, workers)} open files with these feeds, and the "
            f"daemon may have {limit}: {descriptors.HOW_TO_RAISE}, or run fewer workers"
        )
    return slots
