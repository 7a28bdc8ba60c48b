"""The fork server of a forked daemon, which is forked, too.

`python -m penstock_server.worker.fork_server` takes 0.15 s of CPU, most of it for imports. A forked daemon (forked.py)
has done these imports already. So it forks a process that waits, and becomes the daemon's first fork server when the
daemon starts one. This process runs the same module as `__main__`, with the same arguments, environment and file
descriptors. Later fork servers, and those with environment variables that imports would read, are started as users
start them.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
from typing import NoReturn

import penstock_server.worker.fork_server  # the daemon does not import it, and its own imports take long
from penstock_server.environment import DEFAULTS
from penstock_server.host.process import Process

MODULE = penstock_server.worker.fork_server.__name__


class _Child:
    """A forked process, with the part of `subprocess.Popen` that `Process` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


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
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv[1:] = arguments
    del sys.modules[MODULE]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    raise AssertionError("the module ends the process")
