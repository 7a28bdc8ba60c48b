"""The worker processes: started in parallel from the main thread, watched by pidfd, replaced when they die.

Speaks to them over an inherited socketpair and knows nothing of what is said. A worker that dies is started again after
0.1 s, doubled each time up to 5 s, until one has lived for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from .peer import Peer

_ONE_THREAD = dict.fromkeys(
    (
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "MKL_NUM_THREADS",
        "BLIS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "NUMEXPR_NUM_THREADS",
    ),
    "1",
)


class Worker:
    """One worker's place: the process that fills it now, and how often it had to be filled.

    The connection to the next process is made as soon as one has ended: what is said before the new one is there waits
    in it.
    """

    def __init__(self, number: int, on_data: Callable[[int, bytes, int | None], None]) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.peer, self.theirs = self._connection(on_data)
        self.pidfd = -1
        self.restarts = 0
        self.failures_in_a_row = 0
        self.started = 0.0

    def renew(self, on_data: Callable[[int, bytes, int | None], None]) -> None:
        """Make the connection to the next process in place of the last one's."""
        self.close()
        self.peer, self.theirs = self._connection(on_data)

    def close(self) -> None:
        """Close the connection."""
        self.peer.close()
        self.theirs.close()

    def _connection(self, on_data: Callable[[int, bytes, int | None], None]) -> tuple[Peer, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Peer(ours, lambda data, fd: on_data(self.number, data, fd), lambda: None), theirs


class Supervisor:
    """Keeps `count` workers running.

    Args:
        feeds: the MODULE:ATTR arguments.
        count: how many workers.
        on_data: called with (worker number, datagram, fd).
        on_death: called with (worker number, how it ended), after its last datagram.
    """

    def __init__(
        self,
        feeds: list[str],
        count: int,
        on_data: Callable[[int, bytes, int | None], None],
        on_death: Callable[[int, str], None],
    ) -> None:
        self.workers = [Worker(number, on_data) for number in range(count)]
        self._feeds = feeds
        self._on_data = on_data
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    def start(self) -> None:
        """Start all workers. Call it on the main thread: a worker dies with the thread that started it."""
        for worker in self.workers:
            self._spawn(worker)

    def send(self, number: int, data: bytes, fd: int | None = None) -> None:
        """Send a message to a worker, or to the process that will take its place."""
        self.workers[number].peer.send(data, fd)

    async def stop(self, farewell: bytes, patience: float = 1.0) -> None:
        """Say farewell to all workers, wait `patience` seconds for them to end, then kill those that have not."""
        self._stopping = True
        processes = [worker.process for worker in self.workers if worker.process is not None]
        for worker in self.workers:
            if worker.pidfd >= 0:
                self._loop.remove_reader(worker.pidfd)
            worker.peer.send(farewell)
        deadline = time.monotonic() + patience
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        for worker in self.workers:
            self._forget(worker)
            worker.close()

    def _spawn(self, worker: Worker) -> None:
        if self._stopping or worker.process is not None:
            return
        fd = worker.theirs.fileno()
        command = [sys.executable, "-m", "penstock_server.worker", "--fd", str(fd)]
        command += ["--number", str(worker.number), *self._feeds]
        environment = {**_ONE_THREAD, "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", **os.environ}
        environment["PYTHONHASHSEED"] = "0"
        environment["PENSTOCK_WORKER"] = str(worker.number)  # in which the client starts no daemon
        worker.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), env=environment, pass_fds=[fd]
        )
        worker.theirs.close()
        worker.started = time.monotonic()
        worker.pidfd = os.pidfd_open(worker.process.pid)
        self._loop.add_reader(worker.pidfd, self._died, worker)

    def _died(self, worker: Worker) -> None:
        process = worker.process
        if process is None or self._stopping:
            return
        code = process.wait()
        worker.peer.drain()
        self._forget(worker)
        worker.renew(self._on_data)
        if self._stopping:
            return
        self._on_death(worker.number, _how(code))
        if time.monotonic() - worker.started > 60:
            worker.failures_in_a_row = 0
        delay = min(5.0, 0.1 * 2**worker.failures_in_a_row)
        worker.failures_in_a_row += 1
        worker.restarts += 1
        self._loop.call_later(delay, self._spawn, worker)

    def _forget(self, worker: Worker) -> None:
        if worker.pidfd >= 0:
            self._loop.remove_reader(worker.pidfd)
            os.close(worker.pidfd)
        worker.process, worker.pidfd = None, -1


def _how(code: int) -> str:
    """How a process with this exit status ended, in words."""
    if code >= 0:
        return f"exited with status {code}"
    name = str(-code)
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    hint = " (the kernel's out-of-memory killer sends it too)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
