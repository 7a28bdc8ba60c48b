"""Starts the worker processes, replaces those that die, and kills those that hang.

The fork server forks them. If it cannot, the supervisor starts each as a new interpreter. The supervisor talks to them
over inherited socketpairs and does not know the messages. It restarts a worker 0.1 s after its death, and doubles this
pause with each further death up to 5 s (0.5 s if the worker was ready), until one has lived for a minute. It gives up a
place when five processes in a row die in it before they are ready. Each process has an activity page (activity.py) that
outlives it, so that the supervisor can read what the process was doing when it died. With a hang timeout it kills
workers that make no progress (hang_detection.py). Processes that user code has started do not outlive their worker
(orphans.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Protocol

from penstock_proto.messages import Environment
from penstock_proto.world import interpreter

from ..machine import orphans
from ..machine.descriptors import scarce
from ..machine.environment import of_workers
from ..worker_state import activity
from ..worker_state.activity import Activity
from ..worker_state.process_ends import CUT_OFF, ended_how
from . import hang_detection
from .fork_server import ForkServer
from .process import Process
from .worker_config import WorkerConfig
from .worker_handle import WorkerHandle

log = logging.getLogger(__name__)

MOST_EARLY_DEATHS = 5
"""The supervisor gives up a place when this many processes in a row have died in it before they were ready."""

FAREWELL_SECONDS = 5.0
"""Seconds that a retired worker has to end before it is killed."""

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Seconds from a worker's death to the next start in its place: the first pause, and the longest after doubling."""

LAST_PAUSE_READY = 0.5
"""The longest pause after a process that was ready: it may be the only one, and something outside may have killed
it."""

_LIVED = 60.0
"""Seconds of life after which the pauses begin at `FIRST_PAUSE` again."""

_SWEEP_SECONDS = 0.02
"""Seconds between two looks for processes that workers have left behind, until there are none."""

_LAST_SWEEP = 1.0
"""Most seconds that a stop waits until they have ended."""

_DUMP_SECONDS = 0.5
"""Seconds that a hung worker has to write its stack."""


class Reports(Protocol):
    """Takes what happens to workers."""

    def heard(self, worker: int, data: bytes, fd: int | None) -> None:
        """Handle a datagram from a worker, perhaps with a file descriptor."""

    def died(self, worker: int, how: str, doing: Activity | None) -> None:
        """Handle the end of a worker's process, after its last datagram: how it ended, and its last activity."""

    def given_up(self, worker: int, how: str) -> None:
        """Handle a worker that died too often: no further process is started in its place. It stays in
        `Supervisor.workers` until it is retired."""


class Supervisor:
    """Keeps workers running, at first `count` of them.

    Args:
        config: the feeds, and what workers get.
        count: how many workers.
    """

    def __init__(self, config: WorkerConfig, count: int) -> None:
        self.workers = {number: WorkerHandle(number, self._heard) for number in range(count)}
        self._leaving: set[WorkerHandle] = set()
        self._config = config
        self._reports: Reports
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._watch_timer: asyncio.TimerHandle | None = None
        self._orphans = orphans.OfWorkers()
        self._sweep_timer: asyncio.TimerHandle | None = None
        self._watched = self._awake = 0.0
        """When the workers were last checked, and since when they have been checked without a break."""
        self._inquiries: dict[WorkerHandle, asyncio.Task[None]] = {}
        self._patient = False
        self._of_feeds: Environment | None = None
        """The variables that feeds want; None until they have said so."""
        self._forking = True
        self._fork_server: ForkServer | None = None

    def start(self, reports: Reports) -> None:
        """Start all workers, and report what happens to them. Must be called on the main thread: a worker dies with the
        thread that started it."""
        self._reports = reports
        for worker in self.workers.values():
            self._spawn(worker)
        self._watched = self._awake = time.monotonic()
        self._watch()

    def send(self, number: int, data: bytes, fd: int | None = None) -> None:
        """Send a message to a worker, or to the process that will replace it."""
        self.workers[number].peer.send(data, fd)

    def add(self, number: int | None = None) -> int:
        """Add a place and start a worker in it.

        Args:
            number: the worker's number, which must be free; None: the smallest free one.

        Returns:
            Its number.

        Raises:
            OSError: no file descriptors are left for it.
        """
        if number is None:
            number = next(number for number in range(len(self.workers) + 1) if number not in self.workers)
        worker = self.workers[number] = WorkerHandle(number, self._heard)
        self._spawn(worker)
        return number

    def retire(self, number: int, farewell: bytes) -> None:
        """Send `farewell` to a worker that has no work left, and remove its place. Nothing more is reported of it.

        If the process has not ended after `FAREWELL_SECONDS`, it is killed.
        """
        worker = self.workers.pop(number)
        worker.leaving = True
        if worker.process is None:
            worker.forget()
            worker.close()
            return
        self._leaving.add(worker)
        worker.peer.send(farewell)
        worker.timer = self._loop.call_later(FAREWELL_SECONDS, worker.process.kill)

    def kill(self, number: int, how: str = "") -> None:
        """Kill a worker's process now, if there is one. It is reported and replaced, as after any death. `how`: what to
        report in place of the signal."""
        worker = self.workers[number]
        if worker.process is not None:
            worker.killed = how
            worker.process.kill()
        elif worker.starting is not None:
            self._not_started(worker, "was killed before it started")

    def pids(self) -> list[int]:
        """Return the process ids of the workers that have a process."""
        return [worker.pid for worker in self.workers.values() if worker.pid is not None]

    def stacks(self) -> list[tuple[int, int, int]]:
        """Return the number, the process id and the fd of the stacks file of each worker that is ready."""
        found = ((worker.number, worker.stacks) for worker in self.workers.values())
        return [(number, *of_process) for number, of_process in found if of_process is not None]

    def ready(self, number: int) -> None:
        """Note that a worker's process has imported the user's modules."""
        worker = self.workers[number]
        worker.ready = True
        worker.again = False
        worker.starts_without_ready = 0

    def use_environment(self, number: int, variables: Environment) -> bool:
        """Restart a worker because its feeds want these environment variables. The first such call restarts all
        workers.

        Returns:
            True if it is done; False if the workers were already restarted with other variables.
        """
        if self._of_feeds not in (None, variables):
            return False
        if self._of_feeds is None:
            self._of_feeds = variables
            text, fields = "workers start again, with environment variables of their feeds: %s", {"event": "restart"}
            log.info(text, ", ".join(variables), extra=fields)
            self.start_again()
        else:
            _start_again(self.workers[number])
        return True

    def start_again(self) -> None:
        """Replace all processes of workers, and report nothing of those that end. Nothing was sent to them yet."""
        if self._fork_server is not None:
            self._fork_server.replace()
        for worker in self.workers.values():
            if worker.process is not None:
                _start_again(worker)

    def give_nobody_up(self) -> None:
        """Never give up a place, no matter how often its processes die before they are ready."""
        self._patient = True

    async def stop(self, farewell: bytes, patience: float = 1.0) -> None:
        """Send `farewell` to all workers, wait `patience` seconds for them to end, then kill the others."""
        self._stopping = True
        for timer in (self._watch_timer, self._sweep_timer):
            if timer is not None:
                timer.cancel()
        for inquiry in list(self._inquiries.values()):
            inquiry.cancel()
        for worker in self._all():
            if not worker.leaving:
                worker.peer.send(farewell)
        processes = [worker.process for worker in self._all() if worker.process is not None]
        deadline = time.monotonic() + patience
        while any(process.running() for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for process in processes:
            process.kill()  # all at once, then wait for each
        for worker in self._all():
            worker.forget()
            worker.close()
        if self._fork_server is not None:
            self._fork_server.stop()
        self._leaving.clear()
        deadline = time.monotonic() + _LAST_SWEEP
        while not self._orphans.kill(()) and time.monotonic() < deadline:
            await asyncio.sleep(_SWEEP_SECONDS)

    def _heard(self, number: int, data: bytes, fd: int | None) -> None:
        self._reports.heard(number, data, fd)

    def _sweep(self) -> None:
        """Kill the processes that workers have left to this process."""
        self._sweep_timer = None
        processes = [worker.process for worker in self._all()]
        keep = {process.pid for process in processes if process is not None}
        if self._fork_server is not None:
            keep.add(self._fork_server.pid)
        if not self._orphans.kill(keep):
            self._sweep_timer = self._loop.call_later(_SWEEP_SECONDS, self._sweep)

    def _all(self) -> list[WorkerHandle]:
        return [*self.workers.values(), *self._leaving]

    def _spawn(self, worker: WorkerHandle) -> None:
        worker.timer = None
        if self._stopping or worker.process is not None or worker.starting is not None:
            return
        worker.starts_without_ready += 1
        fork_server = self._forks()
        try:
            fds = worker.prepare()
            if fork_server is None:
                self._spawn_afresh(worker, fds)
            else:
                fork_server.fork(worker.number, fds, functools.partial(self._forked, worker, worker.starting, fds))
        except OSError as error:
            self._not_started(worker, f"could not be started ({error})", counts=not scarce(error))

    def _forks(self) -> ForkServer | None:
        """Return the fork server. Replace one that has died, unless it was never ready."""
        before = self._fork_server
        if before is not None and not before.gone:
            return before
        if before is not None:
            before.stop()
            self._fork_server = None
        if not self._forking or (before is not None and not before.ready):
            self._forking = False
            return None
        try:
            self._fork_server = ForkServer(self._config.start_arguments(), self._variables("none"))
        except OSError as error:
            self._forking = scarce(error)
            log.warning("the fork server cannot be started (%s)", error, extra={"event": "fork_server_died"})
        return self._fork_server

    def _forked(self, worker: WorkerHandle, start: object, fds: list[int], result: Process | OSError | None) -> None:
        if worker.starting is not start or self._stopping:  # the worker has left, or was killed
            if isinstance(result, Process):
                result.forget()
        elif isinstance(result, Process):
            self._begin(worker, result)
        elif result is not None:
            self._not_started(worker, f"could not be started ({result})", counts=not scarce(result))
        else:
            try:
                self._spawn_afresh(worker, fds)
            except OSError as error:
                self._not_started(worker, f"could not be started ({error})", counts=not scarce(error))

    def _spawn_afresh(self, worker: WorkerHandle, fds: list[int]) -> None:
        command = [*interpreter(), "-m", "penstock_server.worker", "--number", str(worker.number)]
        for option, fd in zip(("--fd", "--activity-fd", "--stacks-fd"), fds, strict=True):
            command += [option, str(fd)]
        command += self._config.start_arguments().words()
        self._begin(worker, Process.started(command, self._variables(str(worker.number)), fds))

    def _variables(self, number: str) -> dict[str, str]:
        """Return the environment of worker `number`."""
        result = of_workers(self._of_feeds or {}, self._config.environment)
        result["PYTHONHASHSEED"] = "0"
        result["PENSTOCK_WORKER"] = number  # the client does not start daemons in a worker
        return result

    def _begin(self, worker: WorkerHandle, process: Process) -> None:
        worker.begin(process)
        process.watch(functools.partial(self._died, worker))

    def _not_started(self, worker: WorkerHandle, why: str, *, counts: bool = True) -> None:
        """Handle a failed start. It `counts` as a death unless descriptors or memory were lacking, which may pass."""
        worker.starts_without_ready -= not counts
        worker.forget()
        self._loop.call_soon(self._ended, worker, why, None)

    def _died(self, worker: WorkerHandle, status: int | None) -> None:
        if self._stopping:
            return
        worker.peer.drain()
        if self._stopping:
            return
        last = worker.look()
        how = worker.killed or (CUT_OFF if last is not None and last.cut_off else ended_how(status))
        worker.forget()
        if worker.leaving:
            self._leaving.discard(worker)
            worker.close()
        elif worker.again:  # nothing was sent to it yet
            worker.again = False
            worker.starts_without_ready = 0
            worker.renew()
            self._spawn(worker)
        else:
            self._ended(worker, how, last)

    def _ended(self, worker: WorkerHandle, how: str, last: Activity | None) -> None:
        if self._stopping or worker.leaving:
            return
        number = worker.number
        worker.given_up = worker.starts_without_ready >= MOST_EARLY_DEATHS and not self._patient
        if worker.given_up:
            worker.close()
        else:
            worker.renew()
            if time.monotonic() - worker.started > _LIVED:
                worker.failures_in_a_row = 0
            longest = LAST_PAUSE if worker.starts_without_ready else LAST_PAUSE_READY
            delay = min(longest, FIRST_PAUSE * 2**worker.failures_in_a_row)
            worker.failures_in_a_row += 1
            worker.restarts += 1
            worker.timer = self._loop.call_later(delay, self._spawn, worker)
        self._reports.died(number, how, last)
        if worker.given_up and not worker.leaving:
            times = f"died {worker.starts_without_ready} times in a row before it was ready"
            text = f"{times}, and will not be started again: it {how}"
            log.error("worker %d %s", number, text, extra={"event": "worker_given_up", "worker": number})
            self._reports.given_up(number, text)

    # --- workers that hang ---

    def _watch(self) -> None:
        now, timeout = time.monotonic(), self._config.hang_timeout
        every = 1.0 if timeout is None else min(1.0, timeout / 4)
        if now - self._watched > every + (timeout or hang_detection.OUTSIDE_USER_CODE) / 2:
            self._awake = now  # this process did not run for a while, and perhaps the workers did not either
        self._watched = now
        for worker in self.workers.values():
            if timeout is None:
                self._warn(worker)
            elif worker not in self._inquiries and self._stands_still(worker, timeout):
                self._inquiries[worker] = self._loop.create_task(self._inquire(worker, timeout))
        any(worker.look_at_import() for worker in self.workers.values())  # one of them tells enough
        if self._sweep_timer is None:
            self._sweep()
        self._watch_timer = self._loop.call_later(every, self._watch)

    def _warn(self, worker: WorkerHandle) -> None:
        """Log once that a worker does not read its messages. Without a hang timeout, nothing else is done about it."""
        last = worker.look() if worker.ready and worker.peer.unread else None
        if (
            last is not None
            and not worker.warned
            and last.waits
            and worker.unread(last) >= hang_detection.OUTSIDE_USER_CODE
        ):
            worker.warned = True
            why = f": a signal has stopped it, `kill -CONT {worker.pid}` continues it" if worker.stopped else ""
            log.warning(
                "worker %d has not read its messages for %g s%s",
                worker.number,
                hang_detection.OUTSIDE_USER_CODE,
                why,
                extra={"event": "worker_stalled", "worker": worker.number},
            )

    def _stands_still(self, worker: WorkerHandle, timeout: float) -> str:
        last = worker.look()
        still = functools.partial(
            hang_detection.stands_still,
            last,
            unread=0.0 if last is None else worker.unread(last),
            awake=time.monotonic() - self._awake,
            timeout=timeout,
        )
        return still(stopped=worker.stopped) if still(stopped=True) else ""

    async def _inquire(self, worker: WorkerHandle, timeout: float) -> None:
        """Ask a worker for its stack, then kill it, unless it makes progress meanwhile."""
        process, stack = worker.process, b""
        try:
            worker.ask_where()
            deadline = time.monotonic() + _DUMP_SECONDS
            while time.monotonic() < deadline and worker.process is process:
                await asyncio.sleep(0.05)
                before, stack = stack, worker.stack()
                if stack and stack == before:
                    break
            if process is not None and worker.process is process and (still := self._stands_still(worker, timeout)):
                where = activity.where(stack)
                worker.killed = f"{still} and was killed{where and '; it was at '}{where}"
                process.kill()
        finally:
            del self._inquiries[worker]


def _start_again(worker: WorkerHandle) -> None:
    worker.again = True
    if worker.process is not None:
        worker.process.kill()
