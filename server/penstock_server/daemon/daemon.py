"""The loader daemon: one process that serves feeds until it is stopped. This file starts, drains and ends it.

Everything runs on one event loop and one thread. (Other threads reserve the pages of new slots, copy slots, and do long
computations for the HTTP server; with keys, threads of libzmq encrypt.) Messages of workers (from_workers.py) and
consumers (sessions.py) become events for the coordinator. Its commands are carried out in order (dispatch.py).

Nothing that a peer does ends the daemon. The place of a failure decides what fails with it:

- a consumer's message: its session (sessions.py);
- a worker's message, or a command: the stream of its run, ticket or consumer (dispatch.py);
- a part that the clock calls: nothing; the clock goes on to the other parts (clock.py);
- a write to the state file: the stream of the group (group_file.py).

A stream fails with the PenstockError that was raised, or with MemoryBound if memory or file descriptors ran out
(OSError, MemoryError). Any other exception is a bug: it is logged with its traceback, and counted in the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock_proto import DaemonStopped, PenstockError, StartError
from penstock_proto import messages as m
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec

from .. import http as http_server
from ..coordinator import Coordinator
from ..coordinator.model import events as on
from ..coordinator.model.memory import least_slots
from ..machine import cpus, descriptors
from ..net.keys import may_join
from ..net.local import Listener, LocalPeer
from ..net.network import Router
from ..reloading.reloader import Reloader
from ..scaling.auto_workers import AutoWorkers
from ..scaling.host_scaling import Engine
from .clock import Clock
from .config import DaemonConfig
from .parts import Parts
from .peer_keys import PeerKeys

if TYPE_CHECKING:
    from ..http.service import HttpService
    from ..state_file.statefile import StateFile

log = logging.getLogger(__name__)

_NO_PROC = (
    "/proc is hidden: each worker imports all libraries itself, all CPUs count as idle, and the CPU time and memory of "
    "workers are unknown. If that is not meant, mount it (a proc file system, readable by this user)"
)

HOSTS_SECONDS = 60.0
"""Seconds for which a draining daemon waits for a host to join, if no worker makes batches. A host that has lost its
connection tries to join again for the same time (`penstock join --patience`)."""


class Daemon:
    """Serves feeds until it is stopped.

    Args:
        config: its options.
        on_ready: called with the URL of each feed once it can be read.
        each_second: called once a second with this object.
        engine: runs hosts that join, or None.
        reloader: knows whether the feeds' code has changed, or None.

    Attributes:
        renewing: whether another daemon takes its place when it has ended.
        endpoint: the address at which it listens; "" until workers are started.

    Raises:
        StartError: the keys or the state file cannot be used, or the limit of open files is too low.
    """

    def __init__(
        self,
        config: DaemonConfig,
        *,
        on_ready: Callable[[str], None],
        each_second: Callable[[Daemon], None] = lambda daemon: None,
        engine: Engine | None = None,
        reloader: Reloader | None = None,
    ) -> None:
        self._config = config
        self._peer_keys = PeerKeys(config.bind, config.keys)
        self._reloader = reloader
        self.renewing = False
        self.endpoint = ""
        self._each_second = each_second
        self._engine = engine
        self._on_ready = on_ready
        workers = AutoWorkers.first(cpus.usable()) if config.workers == "auto" else config.workers
        self._workers = max(1, workers)
        self._draining = False
        self._without_makers: float | None = None
        """The monotonic time since which it has drained without a worker that makes batches, or None."""
        slots = _slots(len(config.feeds), self._workers)
        self._state = None if config.state is None else _state_file(config.state)
        saved = None if self._state is None else self._state.load()
        self._coordinator = Coordinator(
            workers=self._workers, idle=not workers, memory=config.memory, saved=saved, slots=slots
        )
        self._stopped = asyncio.Event()
        self._error: PenstockError | None = None
        self._http: HttpService | None = None

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT, a stop request, or (`until_stdin_closes`) the end of standard input.

        After the first signal the current epochs run to their ends. A second one stops the daemon at once. SIGTTIN adds
        a worker, and SIGTTOU removes one.

        Raises:
            StartError: the address cannot be bound, or a feed cannot be served at all.
            PenstockError: a feed cannot be served for another reason.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        if not os.path.exists("/proc/self/stat"):
            log.warning("%s", _NO_PROC, extra={"event": "no_proc"})
        self._router = Router(self._config.bind, self._frame, self._connection_ended, self._peer_keys.keys)
        self._peer_keys.say(self._router.endpoint)
        try:
            listener = Listener(
                self._datagram,
                self._peer_ended,
                descriptors.for_local(descriptors.limit(), self._workers),
                self._config.allow_uids,
            )
            self._parts = parts = self._made(listener)
            if self._config.http is not None:
                self._http = http_server.server(*self._config.http, parts.watched())
                log.info("HTTP server: %s", await self._http.start(), extra={"event": "listening"})
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(name, self.drain)
            loop.add_signal_handler(signal.SIGTTIN, parts.scale_requests.scale_by, 1)
            loop.add_signal_handler(signal.SIGTTOU, parts.scale_requests.scale_by, -1)
            if self._peer_keys.keys is not None:
                loop.add_signal_handler(
                    signal.SIGHUP, self._peer_keys.read_again, parts.sessions, self._router, parts.hosts
                )
            if self._config.until_stdin_closes:
                loop.add_reader(0, self._stdin)
            self.endpoint = self._router.endpoint
            parts.supervisor.start(parts.from_workers)
            parts.standing.start()
            clock = self._clock(listener)
            clock.start()
            parts.looks.start()
            await self._stopped.wait()
            clock.stop()
            parts.looks.stop()
            if self._config.until_stdin_closes:
                loop.remove_reader(0)
            parts.hosts.stop(self._error, again=self.renewing)
            parts.sessions.stop(self._error or DaemonStopped("the daemon was stopped"))
            await parts.slots.stop()
            parts.causes.stop()
            parts.standing.stop()
            await parts.supervisor.stop(codec.encode(m.Shutdown()))
            listener.close()
        finally:
            if self._http is not None:
                await self._http.stop()
            self._router.close()
            if self._state is not None:
                self._state.close()
        if self._error is not None:
            raise self._error
        if not (self._config.until_stdin_closes or self.renewing):  # else the trainer knows, or another daemon goes on
            log.info("stopped", extra={"event": "stopped"})

    def stop(self) -> None:
        """Stop serving: tell consumers, and end workers."""
        self._stopped.set()
        if self._state is not None:
            self._parts.dispatch.halt()  # from now on consumers report to the next daemon

    def drain(self) -> None:
        """Stop when the current epochs have ended. On the second call, stop at once."""
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
            log.info("restarting with the new code", extra={"event": "renewing"})
            self.renewing = True
            self._begin_to_drain("the daemon is restarted with new code")

    def _begin_to_drain(self, why: str) -> None:
        if not self._draining:
            self._draining = True
            self._parts.dispatch.tell(on.Stop(DaemonStopped(why)))

    @property
    def ready(self) -> bool:
        """Whether all feeds can be read."""
        return self._parts.feeds.ready

    @property
    def draining(self) -> bool:
        """Whether it stops when the epochs that are being read have ended."""
        return self._draining

    @property
    def http(self) -> tuple[str, int] | None:
        """Host and port of the HTTP server, or None without one."""
        return None if self._http is None else self._http.address

    @property
    def between_epochs(self) -> bool:
        """Whether no consumer reads an epoch that has an end."""
        read = self._coordinator.stream_read_by
        consumers = self._coordinator.consumers.values()
        return not any(consumer.reading and not read(consumer).feed.plan.endless for consumer in consumers)

    def status(self) -> Status:
        """Return the status, with averages."""
        return self._parts.status.described()

    # --- called by the parts ---

    def epoch_begins(self) -> None:
        """Handle a consumer that is about to begin an epoch: renew the daemon if there is new code."""
        if self._reloader is not None and self._reloader.pending:
            self.renew()

    def idle(self) -> None:
        """Note that all commands are carried out: stop if the daemon has drained."""
        if self._draining and self._coordinator.stopped:
            self.stop()

    def stop_asked(self, now: bool) -> None:
        """Handle a stop request from this host: stop `now`, or when the current epochs have ended."""
        if now:
            self.renewing = False
            self.stop()
        elif self.renewing or not self._draining:
            self.drain()

    def fail(self, error: PenstockError) -> None:
        """Stop with this error, or with an earlier one if there was one."""
        if self._error is None:
            self._error = error
        self.stop()

    def may_join(self, routing_id: bytes) -> None:
        """Raise an error unless the peer over TCP with this id may join as a host."""
        may_join(self._router.key(routing_id), self._peer_keys.keys is not None)

    def stale(self) -> bool:
        """Return whether the feeds' code has changed since the daemon was started, if it watches for that."""
        return self._reloader is not None and self._reloader.stale()

    # --- internals ---

    def _made(self, listener: Listener) -> Parts:
        return Parts(
            self,
            self._coordinator,
            self._router,
            listener,
            self._config,
            workers=self._workers,
            engine=self._engine,
            on_ready=self._on_ready,
            state=self._state,
        )

    def _frame(self, routing_id: bytes, data: bytes) -> None:
        if routing_id in self._parts.hosts:
            self._parts.hosts.heard(routing_id, data)
        else:
            self._parts.sessions.frame(routing_id, data)

    def _datagram(self, peer: LocalPeer, data: bytes) -> None:
        self._parts.sessions.datagram(peer, data)

    def _peer_ended(self, peer: LocalPeer) -> None:
        self._parts.sessions.peer_ended(peer)

    def _connection_ended(self, routing_id: bytes) -> None:
        if not self._parts.hosts.ended(routing_id):
            self._parts.sessions.connection_ended(routing_id)

    def _stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                self.stop()

    def _clock(self, listener: Listener) -> Clock:
        parts = self._parts
        look: list[Callable[[int], None]] = [
            lambda seconds: parts.feeds.look_at_the_clock(seconds, lambda: parts.status.described().phase),
            parts.status.look_at_the_clock,
            lambda _: parts.sessions.look_at_the_clock(),
            lambda _: parts.hosts.another_second(),
            lambda _: listener.look_at_the_clock(time.monotonic()),
            lambda _: parts.from_workers.look_at_the_clock(time.monotonic()),
            self._look_at_the_group_file,
            lambda _: self._look_for_makers(time.monotonic()),
            lambda _: self._each_second(self),
            lambda _: parts.host_scaling.another_second(parts.status),
            lambda _: parts.auto_scaling.another_second(parts.status),
        ]
        if self._http is not None:
            look.append(self._http.another_second)
        return Clock(look, parts.bugs, lambda error: self._broken_by("the clock stopped", error))

    def _look_at_the_group_file(self, _: int) -> None:
        if self._parts.group_file is not None and not self._stopped.is_set():
            self._parts.group_file.look_at_the_clock(time.monotonic())

    def _look_for_makers(self, now: float) -> None:
        """While draining, stop waiting for epochs that cannot finish because no worker makes batches."""
        if self._coordinator.workers.makers or not self._draining or self._stopped.is_set():
            self._without_makers = None
        elif self._without_makers is None:
            self._without_makers = now
            text = (
                "no worker makes batches, so the epochs that are being read cannot end: run `penstock join` on a host. "
                "If none joins within %.0f s, the daemon stops; `penstock stop --now` stops it at once"
            )
            log.warning(text, HOSTS_SECONDS, extra={"event": "draining"})
        elif now - self._without_makers >= HOSTS_SECONDS:
            text = "stopping before the epochs that are being read have ended: no host has joined for %.0f s"
            log.error(text, HOSTS_SECONDS, extra={"event": "draining"})
            self.stop()

    def _broken(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._broken_by(context.get("message", "unexpected"), context.get("exception"))

    def _broken_by(self, what: str, error: BaseException | None) -> None:
        """End the daemon after an unexpected error, and log its traceback. Otherwise consumers would wait forever."""
        log.critical("%s", what, exc_info=error, extra={"event": "internal_error"})
        self.fail(PenstockError(f"the daemon failed: {error!r}; please report this as a bug"))


def _state_file(path: str) -> StateFile:
    from ..state_file.state_path import check_option
    from ..state_file.statefile import StateFile  # only --state needs SQLite

    check_option(path)
    return StateFile(path)


def _slots(feeds: int, workers: int) -> int:
    """Return the number of slots for which there are enough file descriptors.

    Raises:
        StartError: these slots are too few for one stream of each feed.
    """
    limit, least = descriptors.limit(), feeds * least_slots(1)
    slots = descriptors.for_slots(limit, workers)
    if slots < least:
        raise StartError(
            f"--workers {workers} needs {descriptors.needed(least, workers)} open files with these feeds, and the "
            f"daemon may have {limit}: {descriptors.HOW_TO_RAISE}, or run fewer workers"
        )
    return slots
