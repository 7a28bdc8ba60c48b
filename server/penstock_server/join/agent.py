"""The process of `penstock join`: starts this host's workers, joins the head with them, and joins again after a lost
connection.

The workers import the feeds at once, so that a mistake shows before the head is asked. When the connection ends, the
agent replaces their processes: their unfinished batches belong to a stream that goes on without them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from penstock_proto import DaemonStopped, PenstockError, ProtocolError, StartError, Unreachable
from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..hosts import agreement
from ..hosts.joined_host import SILENT
from ..machine import descriptors, orphans
from ..targets import saved_sources
from ..targets.sources import Contents, Sources, digests
from ..to_daemon import control
from ..worker_state.activity import Activity
from ..worker_state.process_ends import ENDED, INVALID
from ..workers.local_workers import LocalWorkers
from ..workers.supervisor import Supervisor
from .config import JoinConfig
from .listeners import Listeners
from .membership import Membership
from .to_head import CONNECTING, ToHead, connect

log = logging.getLogger(__name__)

AGAIN = 1.0
"""Seconds between two attempts to connect."""

SAY_EVERY = 10
"""Seconds after which the log says, again and again, what this host waits for before it can work."""


class Agent:
    """Owns the worker processes, and one membership after another.

    Args:
        config: this host's options.

    Attributes:
        plans: the feeds as they were imported here, by name.
    """

    def __init__(self, config: JoinConfig) -> None:
        self._config = config
        self._count = config.workers
        host, port = config.head
        self._head = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._listeners = Listeners(config.fetch_port, config.keys, config.allow_uids)
        self._ending: asyncio.Task[None] | None = None
        self._process = secrets.token_bytes(16)
        self._imported: dict[int, bytes] = {}
        """The encoded Imported message of each ready worker."""
        self.plans: dict[str, m.FeedPlan] = {}
        self._link: ToHead | None = None
        self._membership: Membership | None = None
        self._ever = False
        self._heard = 0.0
        self._leaving = False
        self._stopped = asyncio.Event()
        self._disconnected = asyncio.Event()
        self._error: PenstockError | None = None
        self._saying: asyncio.Task[None] | None = None
        self._sources = Sources(config.feeds)
        self._code: Contents = {}
        """What the workers import."""
        self._supervisor = Supervisor(config, self._count)
        self._workers = LocalWorkers(self._supervisor)

    async def run(self) -> None:
        """Work until the head stops, or this host is told to leave.

        Raises:
            PenstockError: the feeds cannot be served here, the head refuses this host, or the head is gone for too
                long.
        """
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self.leave)
        if self._config.until_stdin_closes:
            loop.add_reader(0, self._stdin)
        agreement.sources(self._config.feeds)  # raises if there is no such module
        self._save_code(self._sources.texts())
        self._supervisor.start(self)
        tasks = [loop.create_task(work) for work in (self._stopped.wait(), self._keep_joined(), self._each_second())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        if self._config.until_stdin_closes:
            loop.remove_reader(0)
        if self._link is not None:
            self._link.drop()
        await self._supervisor.stop(codec.encode(m.Shutdown()))
        if self._link is not None:
            self._link.close()
        self._listeners.close()
        for task in done:
            task.result()
        if self._error is not None:
            raise self._error
        log.info("stopped", extra={"event": "stopped"})

    def leave(self) -> None:
        """Hand over the workers' work, then end. A second call ends at once."""
        if self._leaving or self._membership is None:
            self._stopped.set()
            return
        self._leaving = True
        log.info("leaving: the others take over within %.0f s", self._config.grace, extra={"event": "host_leaves"})
        self._membership.leave()
        asyncio.get_running_loop().call_later(self._config.grace, self._stopped.set)

    def _stdin(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(0, 4096):
                asyncio.get_running_loop().remove_reader(0)
                self._stopped.set()

    def fail(self, error: PenstockError) -> None:
        """End with this error, or with an earlier one if there was one."""
        if self._error is None:
            self._error = error
        self._stopped.set()

    # --- the head ---

    async def _keep_joined(self) -> None:
        """Connect to the head and join it, again after each lost connection.

        Raises:
            PenstockError: the head is gone, or refuses the connection.
        """
        since = time.monotonic()
        while True:
            try:
                await self._connect()
            except (OSError, TimeoutError) as error:
                if time.monotonic() - since > self._config.patience:
                    raise self._gone(error) from None
                await asyncio.sleep(AGAIN)
                continue
            await self._disconnected.wait()
            since = time.monotonic()
            await asyncio.sleep(AGAIN)

    def _gone(self, error: OSError) -> PenstockError:
        what = "is gone, and did not come back" if self._ever else "does not answer"
        patience = self._config.patience
        return Unreachable(f"the head at {self._head} {what} within {patience:.0f} s ({error.strerror or error})")

    async def _connect(self) -> None:
        self._disconnected.clear()
        self._renew_code()
        self._link = await connect(
            *self._config.head,
            self._config.keys,
            on_message=self._message,
            place=self._second_frame,
            on_end=self._ended,
        )
        self._heard = time.monotonic()
        join = m.Join(
            version=m.VERSION,
            host=self._config.host_name[:128] or "host",
            process=self._process,
            workers=self._count,
            memory=self._config.memory,
            sources=agreement.sources(self._config.feeds),
            fetch_port=self._listeners.listen(self._link.own_address),
            unix=self._listeners.unix,
            **agreement.versions(),
        )
        self._link.send(codec.encode(join))

    def _message(self, data: bytes) -> None:
        self._heard = time.monotonic()
        try:
            message = codec.from_head(data)
            match message:
                case m.Failed():
                    self._refused(message.error.error())
                case m.Joined() if self._membership is None:
                    self._joined(message)
                case m.AdmitClients():
                    self._listeners.admit(message)
                case m.Joined():
                    raise ProtocolError("Joined, although this host has joined already")
                case _ if self._membership is not None:
                    self._membership.take(message)
        except ProtocolError as error:
            self.fail(ProtocolError(f"the head sent an invalid message: {error.message}"))

    def _second_frame(self, data: bytes) -> memoryview:
        if self._membership is None:
            raise ProtocolError("a second frame before Joined")
        return self._membership.place(data)

    def _joined(self, message: m.Joined) -> None:
        assert self._link is not None
        self._ever = True
        self._membership = Membership(
            self._link,
            message,
            self,
            self._supervisor,
            self._workers,
            memory=self._config.memory,
            folder=agreement.folder(self._config.feeds),
            memory_gone=self._listeners.gone,
        )
        self._listeners.serve(self._membership.slots)
        log.info("joined the head at %s", self._head, extra={"event": "host_joins"})
        for worker, data in self._imported.items():
            self._membership.on_said(worker, codec.from_worker(data), data)

    def _refused(self, error: PenstockError) -> None:
        if isinstance(error, DaemonStopped):
            log.info("the head was stopped", extra={"event": "head_stopped"})
            self._stopped.set()
        else:
            self.fail(error)

    def _ended(self, why: str) -> None:
        """Handle the end of the connection to the head."""
        if self._stopped.is_set():
            return
        text = "the connection to the head at %s has ended%s; joining again"
        log.warning(text, self._head, f" ({why})" if why else "", extra={"event": "head_lost"})
        if self._leaving:
            self._stopped.set()
        self._link = None
        if self._membership is not None:
            self._membership.end()
            self._membership = None
            self._listeners.serve(None)
            for worker in list(self._supervisor.workers):
                self._supervisor.kill(worker)
            if not self._leaving:
                self._number_again()
        self._disconnected.set()

    def _number_again(self) -> None:
        """Run as many workers as the head asked for last, with the numbers from 0 on."""
        for worker in [worker for worker in self._supervisor.workers if worker >= self._count]:
            self._imported.pop(worker, None)
            self._supervisor.retire(worker, codec.encode(m.Shutdown()))
        for worker in range(self._count):
            if worker not in self._supervisor.workers:
                try:
                    self._supervisor.add(worker)
                except OSError as error:
                    text = "no more than %d workers can be started (%s): %s"
                    fields = {"event": "scale_limited"}
                    log.error(text, worker, error, descriptors.HOW_TO_RAISE, extra=fields)
                    self._count = max(1, worker)
                    return

    def scaled(self, workers: int) -> None:
        """Note that the head has asked for this number of workers."""
        log.info("workers: %d, now %d", self._count, workers, extra={"event": "scaled"})
        self._count = workers

    def retired(self, worker: int) -> None:
        """Handle a worker that the head has retired. This host has left after the last one."""
        self._imported.pop(worker, None)
        if not self._supervisor.workers:
            self._ending = asyncio.get_running_loop().create_task(self._stop_when_sent())

    async def _stop_when_sent(self) -> None:
        """End when the head has everything that the workers have made."""
        while self._link is not None and self._link.unsent_bytes:
            await asyncio.sleep(0.05)
        self._stopped.set()

    async def _each_second(self) -> None:
        for seconds in itertools.count(1):
            await asyncio.sleep(1)
            if seconds % SAY_EVERY == 0:
                self._saying = asyncio.get_running_loop().create_task(self._say_what_is_missing(seconds))
            self._listeners.another_second()
            if self._link is None:
                continue
            self._link.tick()
            if self._membership is not None:
                self._membership.report(self._listeners.unsent_bytes, self._listeners.lent_bytes)
                if time.monotonic() - self._heard > SILENT:
                    self._link.close()

    async def _say_what_is_missing(self, seconds: int) -> None:
        """Log what this host waits for: its own imports, or the head's feeds."""
        if not self._imported:
            doing = next(filter(None, (worker.doing for worker in self._supervisor.workers.values())), None)
            what = f"{doing.what} ({doing.seconds:.0f} s)" if doing is not None else "starting workers"
            log.info("no worker is ready after %d s: %s", seconds, what, extra={"event": "starting"})
        elif self._link is not None and self._membership is None:
            ask = functools.partial(control.status, self._head, CONNECTING, self._config.keys)
            with contextlib.suppress(PenstockError):
                state = await asyncio.get_running_loop().run_in_executor(None, ask)
                if state.phase:
                    log.info("waiting for the head at %s: %s", self._head, state.phase, extra={"event": "host_waits"})

    # --- workers ---

    def _renew_code(self) -> None:
        """If somebody has edited the feeds' modules, start the workers again: a head that starts now has the new
        code."""
        texts = self._sources.texts()
        if digests(texts) != self._code:
            log.info("the code has changed: workers start again", extra={"event": "restart"})
            self._save_code(texts)
            self._imported.clear()
            self._supervisor.start_again()

    def _save_code(self, texts: Mapping[Path, bytes]) -> None:
        saved_sources.keep(texts)
        self._code = digests(texts)

    def heard(self, worker: int, data: bytes, fd: int | None) -> None:
        """Handle a worker's message. Kill the worker if it breaks the protocol."""
        if fd is not None:
            os.close(fd)
        try:
            message = codec.from_worker(data)
        except ProtocolError as error:
            text = "worker %d is killed, because it sent an invalid message: %s"
            log.error(text, worker, error.message, extra={"event": "worker_killed", "worker": worker})
            self._supervisor.kill(worker, INVALID)
            return
        match message:
            case m.Imported():
                self._is_ready(worker, message, data)
            case m.EnvironmentWanted():
                if not self._supervisor.use_environment(worker, message.variables):
                    self.fail(StartError("the feeds' env= differs each time they are imported"))
                return
            case m.StartFailed() if not self._ever:
                self.fail(message.error.error())
                return
        if self._membership is not None:
            self._membership.on_said(worker, message, data)

    def _is_ready(self, worker: int, message: m.Imported, data: bytes) -> None:
        self._imported[worker] = data
        self.plans = {plan.name: plan for plan in message.feeds}
        self._supervisor.ready(worker)
        if any(plan.on_error == "retry" for plan in message.feeds):
            self._supervisor.give_nobody_up()
        text = "worker %d is ready: its imports took %.2f s"
        log.info(text, worker, message.imports_seconds, extra={"event": "worker_ready", "worker": worker})

    def died(self, worker: int, how: str, doing: Activity | None) -> None:
        """Handle the end of a worker's process."""
        self._imported.pop(worker, None)
        if self._membership is not None:
            text = "worker %d %s; other workers take over its work"
            level = logging.INFO if how == ENDED else logging.ERROR
            event = "worker_ended" if how == ENDED else "worker_died"
            log.log(level, text, worker, how, extra={"event": event, "worker": worker})
            self._membership.on_worker_ended(worker, how, doing)

    def given_up(self, worker: int, how: str) -> None:
        """Handle a worker that the supervisor does not start again."""
        if self._membership is not None:
            self._membership.given_up(worker, how)
        if all(handle.given_up for handle in self._supervisor.workers.values()):
            self.fail(StartError(f"no worker can start here: the last one {how}; see its output above"))


def join(config: JoinConfig) -> None:
    """Run an `Agent` on uvloop until it ends. Call it on the main thread.

    Raises:
        PenstockError: this host cannot join, or the head is gone; the message says why.
    """
    import uvloop

    descriptors.raise_limit()
    orphans.adopt()

    async def run() -> None:
        await Agent(config).run()

    uvloop.run(run())
