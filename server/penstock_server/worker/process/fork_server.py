"""The fork server: `python -m penstock_server.worker.process.fork_server --fd FD MODULE:ATTR ...`, run by the daemon.

It imports the libraries of the user's modules once (preload.py) and then forks each worker. N workers then start as
quickly as one, and share the memory of the libraries. Each worker runs the user's own modules itself, as a new process
would. Forking is safe if the process has one thread, and if no library holds an open file, writable shared memory or
random numbers that workers would repeat (forked_randomness.py). The fork server checks this after each import. If a
library breaks the rule, the fork server starts again without that library, and leaves it to the workers.

FD is a SOCK_SEQPACKET connection. The fork server first sends ForkServerReady. The daemon sends the fds of a worker,
each in a datagram of its own, and then Fork. Forked answers with a pidfd, and WorkerEnded follows when the worker has
ended. Then the fork server kills the processes that the worker has left behind (orphans.py). When the daemon is gone,
it kills all workers and their processes, and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

import msgspec

from penstock_proto.transport import seqpacket
from penstock_proto.world import interpreter

from ...machine import orphans
from ...targets import saved_sources, world
from ...worker_state.start_arguments import StartArguments
from ..isolation import import_seeding
from ..isolation.forked_randomness import ForkedRandomness
from . import start
from .fork_messages import CannotFork, Fork, Forked, ForkServerReady, FromForkServer, WorkerEnded
from .preload import ImportFailed, preload

_KNOWN = {*sys.stdlib_module_names, "penstock_server", "penstock_proto"}
"""Packages that the log need not mention."""

_SWEEP_MS = 10
"""Milliseconds between two looks for processes that a worker has left behind, until there are none."""

_LAST_SWEEP = 1.5
"""Seconds that these processes, and the workers, have to end when the daemon is gone."""

_Worker: TypeAlias = tuple[socket.socket, int, int, int]
"""What a forked worker starts with: its connection, its number, and the fds of its activity page and its stacks
file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fork server, and the worker in each process that it forks. Return the exit status."""
    parser = argparse.ArgumentParser(prog="penstock_server.worker.process.fork_server")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--without", action="append", default=[], type=_named, metavar="PACKAGE=WHY")
    StartArguments.add_to(parser)
    words = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args(words)
    of_workers = StartArguments.of(options)

    began = time.monotonic()
    connection = socket.socket(fileno=options.fd)
    connection.setblocking(True)
    connection.set_inheritable(False)
    start.end_with_the_daemon(connection, "penstock-forks")
    start.quiet()
    environment = dict(os.environb)
    saved_sources.use()
    served = not world.enter(of_workers.feeds)

    try:
        before = _shared()
    except OSError as error:
        _say(connection, CannotFork(f"without /proc nobody knows what the libraries share with a fork ({error})"))
        return 0
    if _threads() != 1:
        _say(connection, CannotFork("Python starts with several threads"))
        return 0
    imported: list[str] = []
    ends: list[str] = []
    randomness = ForkedRandomness()
    try:
        # A feed's own module may be an installed one.
        with import_seeding.seeded_imports(), randomness.watching():
            for name in preload(of_workers.feeds, dict(options.without), ends.append):
                if why := _unfit(before, randomness):
                    _again(connection, name, why, words, environment)
                if name.partition(".")[0] not in _KNOWN:
                    imported.append(name)
    except ImportFailed as failed:
        _again(connection, failed.args[0], "raises", words, environment)
    gc.collect()
    gc.freeze()  # a collection would write to this memory and so unshare it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a library that ignores it would hide how workers end
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # otherwise each worker would print it again
    _say(connection, ForkServerReady((*dict.fromkeys(imported),), (*options.without,), time.monotonic() - began))
    orphans.adopt()
    start.outlive_the_daemon()
    worker = _Server(connection, randomness).serve()
    world.leave_fd()
    # To move its import does not help a package that is left to the workers.
    until = "" if {"tensorflow", "keras"} & dict(options.without).keys() else "".join(ends)
    return start.serve(*worker, of_workers, served=served, shared_until=until)


def _named(word: str) -> tuple[str, str]:
    package, _, why = word.partition("=")
    return package, why


def _again(
    connection: socket.socket, name: str, why: str, words: Sequence[str], environment: Mapping[bytes, bytes]
) -> None:
    """Start again without the package of module `name`, and leave that to the workers."""
    connection.set_inheritable(True)
    command = [*interpreter(), "-m", "penstock_server.worker.process.fork_server"]
    os.execve(sys.executable, [*command, "--without", f"{name.partition('.')[0]}={why}", *words], environment)


class _Server:
    def __init__(self, connection: socket.socket, randomness: ForkedRandomness) -> None:
        self._connection = connection
        self._randomness = randomness
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._fds: list[int] = []
        self._workers: dict[int, tuple[int, int]] = {}
        """By pidfd: ticket and pid."""
        self._pid = os.getpid()
        self._of_libraries = orphans.children()
        """Processes that libraries have started for all workers."""
        self._swept = True
        """Whether no process is left that belonged to a worker."""

    def serve(self) -> _Worker:
        """Fork on request. Return only in the workers. When the daemon is gone, end all of them and the process."""
        while True:
            for fd, _ in self._poll.poll(None if self._swept else _SWEEP_MS):
                if fd in self._workers:
                    self._reap(fd)
                elif (worker := self._receive()) is not None:
                    return worker
            if not self._swept:
                self._swept = orphans.kill({*self._of_libraries, *(pid for _, pid in self._workers.values())})

    def _receive(self) -> _Worker | None:
        try:
            data, fd = seqpacket.receive(self._connection)
        except ConnectionError:
            data, fd = b"", None
        if not data:
            _end()
        if fd is not None:
            self._fds.append(fd)
            return None
        fds, self._fds = self._fds, []
        return self._fork(msgspec.msgpack.decode(data, type=Fork), fds)

    def _fork(self, asked: Fork, fds: list[int]) -> _Worker | None:
        try:
            pid = os.fork()
        except OSError as error:
            _say(self._connection, Forked(asked.ticket, 0, error.errno or 0))
            pid = -1
        if pid == 0:
            return self._become(asked, fds)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            try:
                pidfd = os.pidfd_open(pid)  # a zombie at worst: only this process waits for it
            except OSError as error:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                _say(self._connection, Forked(asked.ticket, 0, error.errno or 0))
                return None
            self._workers[pidfd] = asked.ticket, pid
            self._poll.register(pidfd, select.POLLIN)
            _say(self._connection, Forked(asked.ticket, pid), pidfd)
        return None

    def _become(self, asked: Fork, fds: list[int]) -> _Worker:
        """Make the child a worker: release the fork server's resources, and return what the worker starts with."""
        self._connection.close()
        for pidfd in self._workers:
            os.close(pidfd)
        connection = socket.socket(fileno=fds[0])
        start.end_with_the_daemon(connection, f"penstock-w{asked.number}")
        if os.getppid() != self._pid:  # the fork server died before our prctl could tie us to it
            os._exit(0)
        connection.setblocking(True)
        os.environ["PENSTOCK_WORKER"] = str(asked.number)
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # as `random` does on its own
        self._randomness.seed()
        return connection, asked.number, fds[1], fds[2]

    def _reap(self, pidfd: int) -> None:
        ticket, pid = self._workers.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        self._swept = False
        _say(self._connection, WorkerEnded(ticket, os.waitstatus_to_exitcode(status)))


def _say(connection: socket.socket, message: FromForkServer, fd: int | None = None) -> None:
    try:
        seqpacket.send(connection, msgspec.msgpack.encode(message), fd)
    except ConnectionError:
        _end()


def _end() -> NoReturn:
    """End because the daemon is gone. First kill and reap the workers and their processes, as nobody else would."""
    orphans.kill_all(_LAST_SWEEP)
    os._exit(0)


def _unfit(before: set[str], randomness: ForkedRandomness) -> str:
    """Return what the last import has done that workers must not share, or ""."""
    if _threads() != 1:
        return "starts threads"
    if more := _shared() - before:
        return f"opens {min(more).partition(' ')[2] or 'shared memory'}"
    return "keeps random numbers" if randomness.must_be_left() else ""


def _threads() -> int:
    """Count the threads of this process that do not survive a fork. That of jemalloc, which pyarrow and so pandas
    bring, only returns memory to the system, and jemalloc does that itself in a forked process."""
    count = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has ended
            count += Path(f"/proc/self/task/{thread}/comm").read_text() != "jemalloc_bg_thd\n"
    return count


def _shared() -> set[str]:
    """List what forked processes would share besides copied memory: open files and writable shared memory."""
    shared = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the fd of the listing itself
            shared.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, mode, *_ = line.split()
        if mode[1] == "w" and mode[3] == "s":
            shared.add(place)
    return shared


if __name__ == "__main__":
    sys.exit(main())
