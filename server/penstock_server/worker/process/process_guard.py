"""Keeps the worker's own resources from user code: its connection to the daemon, its activity page, its mapped slots.

User code runs in the same process and may fork or close any file. So after user code has returned, and before it sends
anything, the worker checks that this process is the worker and that its connection is still open. A process that user
code forks loses these resources at once, and if it returns from user code, it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
from collections.abc import Callable
from typing import NoReturn

from ...worker_state.activity import ActivityPage

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Each memfd of Penstock has these seals."""
_MOST_FDS = 65536
"""How many descriptors are looked at if nobody lists those that are open."""

CUT_OFF = 1
"""The exit status of a worker whose connection user code has closed; its activity page says why it ended."""


class ProcessGuard:
    """Guards one worker process.

    Args:
        connection: to the daemon.
        page: the worker's activity page.
    """

    def __init__(self, connection: socket.socket, page: ActivityPage) -> None:
        self._pid = os.getpid()
        self._fd = connection.fileno()
        self._identity = self._look()
        self._page = page
        self._on_fork: list[Callable[[], None]] = []
        page.on_leave = self.check
        os.register_at_fork(after_in_child=self._release)

    def on_fork(self, release: Callable[[], None]) -> None:
        """Call `release` in each process that user code forks."""
        self._on_fork.append(release)

    def check(self) -> None:
        """End the process if it is not the worker, or has lost its connection. Call this after user code."""
        if os.getpid() != self._pid:
            self._end(
                "a process that user code forked has returned from user code, and is ended: only the worker can go on "
                "here. Let a forked process end with os._exit()"
            )
        if self._look() != self._identity:
            self._page.cut_off()
            self._end(
                "user code has closed or replaced the worker's connection to the daemon (with os.closerange, or by a "
                "library that daemonizes): the worker ends. Close only files that you have opened"
            )

    def _look(self) -> tuple[int, int]:
        try:
            seen = os.fstat(self._fd)
        except OSError:
            return -1, -1
        return seen.st_dev, seen.st_ino

    def _release(self) -> None:
        """Release the worker's resources, in a forked process."""
        self._page.detach()
        for release in self._on_fork:
            release()
        if self._look() == self._identity:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._fd, inheritable=False)
            os.close(null)
        for fd in our_memfds():
            os.close(fd)

    def _end(self, why: str) -> NoReturn:
        with contextlib.suppress(OSError):  # closed as well
            os.write(2, f"{why}\n".encode())
        os._exit(CUT_OFF)


def our_memfds(proc: str = "/proc/self/fd") -> list[int]:
    """Return the descriptors of Penstock's memfds in this process."""
    try:
        return [int(name) for name in os.listdir(proc) if _target(f"{proc}/{name}").startswith("/memfd:penstock")]
    except OSError:  # without /proc their seals tell them from other files
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return [fd for fd in range(3, min(soft, _MOST_FDS)) if _is_sealed(fd)]


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # it is not open, or no memfd
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # the fd of the listing itself
        return ""


def above_standard(fd: int) -> int:
    """Return `fd`, or a copy of it above standard input, output and error, so that nothing is printed into it.

    A worker receives a descriptor below 3 only if user code has closed one of these three. Then the closed ones are
    opened again, on /dev/null.
    """
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    return copy
