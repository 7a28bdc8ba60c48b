"""What is the worker's own, and no user code's: its connection to the daemon, its status page, its mapped slots.

User code runs in the same process and may fork or close any file. So when it has returned, and before it says anything,
the worker makes sure that it still is the worker, and that its connection is still there. A process that user code
forks loses all of this at once; should it come back out of user code, it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Callable
from typing import NoReturn

from ..activity import ActivityPage

CUT_OFF = 1
"""The exit status of a worker whose connection was closed by user code; its status page says why it ended."""


class ProcessGuard:
    """See the file's head. One for each worker process.

    Args:
        connection: to the daemon.
        page: where the worker says what it does.
    """

    def __init__(self, connection: socket.socket, page: ActivityPage) -> None:
        self._pid = os.getpid()
        self._fd = connection.fileno()
        self._identity = self._look()
        self._page = page
        self._on_fork: list[Callable[[], None]] = []
        page.on_leave = self.check
        os.register_at_fork(after_in_child=self._let_go)

    def on_fork(self, let_go: Callable[[], None]) -> None:
        """Call `let_go` in each process that user code forks."""
        self._on_fork.append(let_go)

    def check(self) -> None:
        """User code has returned: end the process if it is not the worker, or has no connection any longer."""
        if os.getpid() != self._pid:
            self._end(
                "a process that user code has forked came back from it, where only the worker can go on: it ends here. "
                "Let such a process end with os._exit()"
            )
        if self._look() != self._identity:
            self._page.cut_off()
            self._end(
                "user code has closed or replaced the worker's connection to the daemon (os.closerange, or a library "
                "that makes itself a daemon): the worker ends. Close only what you have opened"
            )

    def _look(self) -> tuple[int, int]:
        try:
            seen = os.fstat(self._fd)
        except OSError:
            return -1, -1
        return seen.st_dev, seen.st_ino

    def _let_go(self) -> None:
        """In a child: it has no part in what is the worker's."""
        self._page.detach()
        for let_go in self._on_fork:
            let_go()
        if self._look() == self._identity:
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._fd, inheritable=False)
            os.close(null)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if _target(fd).startswith("/memfd:penstock"):
                os.close(fd)

    def _end(self, why: str) -> NoReturn:
        with contextlib.suppress(OSError):  # closed as well
            os.write(2, f"{why}\n".encode())
        os._exit(CUT_OFF)


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:  # that of the listing itself
        return ""


def above_standard(fd: int) -> int:
    """`fd`, or in its place one that nothing which is printed can get into.

    A descriptor below 3 that comes to the worker means that user code has closed standard input, output or error. Then
    all three are opened again, on nothing.
    """
    if fd > 2:
        return fd
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    return copy
