"""Fork servers of forked daemons, and processes of a forked `penstock check`: they are forked, too.

`python -m penstock_server.worker.process.fork_server` takes 0.15 s of CPU, most of it for imports. A forked daemon
(forked.py) has done these imports already. So it forks a process that waits, and becomes the daemon's first fork server
when the daemon starts one. This process runs the same module as `__main__`, with the same arguments, environment and
file descriptors. Later fork servers, and those with environment variables that imports would read, are started as users
start them.

`penstock check` has one thread, so it forks each process that runs user code when it starts one, except those with
another hash seed.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import penstock_server.checking.observing.process
import penstock_server.worker.process.fork_server  # the daemon does not import it, and its own imports take long
from penstock_server.machine.environment import DEFAULTS
from penstock_server.workers.process import Process
from tests.processes.forked import exit_after

MODULE = penstock_server.worker.process.fork_server.__name__
CHECK_MODULE = penstock_server.checking.observing.process.__name__


class _Child:
    """A forked process, with the part of `subprocess.Popen` that `Process` and `checking.runs.Run` use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        self._wait(0)
        assert self.returncode is not None
        return self.returncode

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def prepare() -> None:
    """Fork the process that becomes this daemon's first fork server. It exits if it is not needed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become(theirs)
    theirs.close()
    start_afresh = Process.started

    def started(command: list[str], environment: dict[str, str], fds: list[int]) -> Process:
        if ours.fileno() < 0 or command[1:3] != ["-m", MODULE] or not _fits(environment):
            return start_afresh(command, environment, fds)
        with ours:
            words = json.dumps([command[3:], environment, os.getcwd(), fds]).encode()
            socket.send_fds(ours, [words], fds)
        return Process(pid, os.pidfd_open(pid), _Child(pid))  # type: ignore[arg-type]

    Process.started = started  # type: ignore[method-assign, assignment]


def prepare_check() -> None:
    """Have this `penstock check` fork its processes."""
    start_afresh = subprocess.Popen

    def started(command: Sequence[str], **options: Any) -> Any:
        if list(command[1:3]) != ["-m", CHECK_MODULE] or options["stdin"] is None or not _fits(options["env"]):
            return start_afresh(command, **options)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            output = options["stdout"].fileno()
            os.dup2(output, 1)
            os.dup2(output, 2)
            kept = sorted(options["pass_fds"])
            for first, last in zip([2, *kept], [*kept, 1 << 16], strict=True):
                os.closerange(first + 1, last)
            _run(CHECK_MODULE, command[3:], options["env"])
        return _Child(pid)

    subprocess.Popen = started  # type: ignore[misc, assignment]


def _fits(environment: dict[str, str]) -> bool:
    """Return whether imports under these variables would have the same effects as those that were done."""
    own = {name for name in environment if name.startswith("PENSTOCK_")}
    usual = {**os.environ, **DEFAULTS, "PYTHONHASHSEED": "0"}
    return all(environment.get(name) == usual.get(name) for name in (environment.keys() | usual.keys()) - own)


def _become(requests: socket.socket) -> NoReturn:
    data, received, _, _ = socket.recv_fds(requests, 1 << 20, 8)
    requests.close()
    if not data:
        os._exit(0)
    arguments, environment, folder, fds = json.loads(data)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    for fd, number in zip(received, fds, strict=True):
        if fd != number:
            os.dup2(fd, number)
            os.close(fd)
        os.set_inheritable(number, True)
    os.chdir(folder)
    _run(MODULE, arguments, environment)


def _run(module: str, arguments: Sequence[str], environment: dict[str, str]) -> NoReturn:
    """Run a module in the working directory, and end the process."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = os.getcwd()
    sys.argv[1:] = arguments
    del sys.modules[module]
    exit_after(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
