"""Processes that are forked from a process that has done their imports: trainers, consumers and daemons.

Importing TensorFlow takes 5 s of CPU, and imports are half of the cost of starting and stopping a daemon. A forked
process runs its script as `__main__`, in its main thread. It ends as any interpreter does, or as the processes of
`multiprocessing` do: after its exit handlers, without the finalization of the interpreter. For a daemon and two workers
that saves 70 ms of 180 ms, most of them spent on copying memory that the processes share until then.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[2]


class Forked:
    """A forked process, with the methods and attributes of `subprocess.Popen`."""

    def __init__(self, pid: int, status: int, stdin: TextIO | None, stdout: TextIO, stderr: TextIO) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait up to `timeout` seconds for the process to end, and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            self.returncode = int(os.read(self._status, 16))
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # the process has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the process to end, and return the rest of its stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds. Its output is lost.
        """
        deadline = time.monotonic() + timeout
        said = ["", ""]
        threads = [
            threading.Thread(target=lambda at=at, pipe=pipe: said.__setitem__(at, pipe.read()), daemon=True)
            for at, pipe in enumerate((self.stdout, self.stderr))
        ]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():  # a child of the process still holds its pipes
                raise subprocess.TimeoutExpired("a forked process", timeout)
        return said[0], said[1]

    def close(self) -> None:
        """Kill it if it still runs."""
        self.kill()
        self.wait(60)
        if self.stdin is not None:
            self.stdin.close()
        self.stdout.close()
        self.stderr.close()


def children(recursive: bool = False) -> list[psutil.Process]:
    """Return the processes that this one has started, except launchers and the processes that they forked."""
    found = psutil.Process().children()
    launchers = [child for child in found if _launches(child)]
    if recursive:
        others = [child for child in found if child not in launchers]
        return [*others, *(one for child in others for one in child.children(recursive=True))]
    return [child for child in found if child not in launchers]


def _launches(process: psutil.Process) -> bool:
    try:
        return any(word == __name__ for word in process.cmdline())
    except psutil.Error:  # the process has ended
        return False


class Launcher:
    """A process that has imported `modules`, and forks others. `close` ends it.

    Args:
        hash_seed: PYTHONHASHSEED of this process and all that it forks. They do not see the variable itself.
        finalizes: whether the interpreters of the forked processes are finalized at their end.
    """

    def __init__(self, *modules: str, hash_seed: str = "random", finalizes: bool = True) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), str(int(finalizes)), *modules]
            environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, cwd=ROOT
            )

    def start(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: bool = False,
        stderr: int | None = None,
        network: str = "",
        fds: Sequence[int] = (),
    ) -> Forked:
        """Fork a process that runs `code`, with `arguments` in `sys.argv[1:]`.

        Args:
            env: variables to add to its environment.
            folder: its working directory; None: that of this process.
            stdin: whether its stdin is a pipe. Otherwise it is the null device.
            stderr: an open file for its stderr; None: a pipe.
            network: the network namespace in which it runs; "": that of this process.
            fds: open files that it inherits, under the same numbers. Up to 4.
        """
        (status, their_status), (out, their_out), (err, their_err) = (os.pipe() for _ in range(3))
        request = {
            "code": code,
            "arguments": arguments,
            "env": dict(env or {}),
            "folder": str(folder or Path.cwd()),
            "network": network,
            "fds": list(fds),
        }
        given = None
        if stdin:
            their_in, own_in = os.pipe()
            given = os.fdopen(own_in, "w")
        else:
            their_in = os.open(os.devnull, os.O_RDONLY)
        standard = [their_in, their_out, their_err if stderr is None else stderr]
        socket.send_fds(self._socket, [json.dumps(request).encode()], [their_status, *standard, *fds])
        for fd in (their_status, their_in, their_out, their_err):
            os.close(fd)
        pid = int(self._socket.recv(16))
        return Forked(pid, status, given, os.fdopen(out, errors="replace"), os.fdopen(err, errors="replace"))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def exit_after(run: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process without finalizing the interpreter."""
    status = 0
    try:
        run()
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            raise  # the interpreter prints it
        status = error.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def enter_network(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace that `ip netns` has made.

    Raises:
        OSError: the namespace does not exist, or the process may not enter it.
    """
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def fork_for_each(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the child, and None in the parent when no more requests can come."""
    running: dict[int, int] = {}  # pid to the pipe for the exit status
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(waker)
    while True:
        readable, _, _ = select.select([requests, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(running[pid], str(os.waitstatus_to_exitcode(status)).encode())
                    os.close(running.pop(pid))
        if requests not in readable:
            continue
        data, fds, _, _ = socket.recv_fds(requests, 1 << 16, 8)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            request = dict(json.loads(data))
            numbers = [0, 1, 2, *request["fds"]]
            moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(numbers) + 1) for fd in fds[1:]]
            requests.close()
            for fd in (wake, waker, *fds, *running.values()):
                os.close(fd)
            for number, fd in zip(numbers, moved, strict=True):
                os.dup2(fd, number)
                os.close(fd)
            return request
        running[pid] = fds[0]
        for fd in fds[1:]:
            os.close(fd)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # a thread that NumPy starts would be missing after a fork
    for module in sys.argv[3:]:
        importlib.import_module(module)
    del os.environ["OPENBLAS_NUM_THREADS"], os.environ["PYTHONHASHSEED"]
    gc.collect()
    gc.freeze()  # so a collection in a forked process copies none of the shared pages
    request = fork_for_each(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        if request["network"]:
            enter_network(request["network"])
        os.chdir(request["folder"])
        os.environ |= request["env"]
        sys.path[0] = request["folder"]
        finalizes = int(sys.argv[2])
        sys.argv[1:] = request["arguments"]
        program = compile(request["code"], "<forked>", "exec", dont_inherit=True)
        if finalizes:
            exec(program, globals())
        else:
            exit_after(lambda: exec(program, globals()))
