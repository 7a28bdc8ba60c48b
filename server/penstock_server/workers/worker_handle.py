"""The supervisor's handle of a worker: its current process, its connection and its activity page."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import mmap
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from penstock_proto.messages import Doing, TimeSpent

from ..machine import process_stat
from ..machine.caught_signals import catches
from ..net.peer import Peer
from ..worker_state import activity, stacks
from ..worker_state.activity import Activity, Spent
from .process import Process

LONG_IMPORT = 10.0
"""Seconds after which the status says at which line an import is. This is also the time between two looks."""

_MOST_LINE = 300
"""Most characters of that."""


class WorkerHandle:
    """One worker, which keeps its number while its processes come and go.

    When a process ends, the connection to its successor is there at once: messages wait in it until the successor runs.

    Attributes:
        process: the running process, or None.
        starting: identifies the start in progress, or None.
        ready: whether the process has imported the user's modules.
        restarts: how often the process was replaced.
        given_up: True if no further process will be started.
        leaving: whether it was retired.
        failures_in_a_row: deaths since a process last lived long enough.
        starts_without_ready: starts since a process was last ready.
        started: when the last start began, in monotonic seconds.
        timer: starts the next process, or kills a leaving one.
        killed: how it ended, in words, if the supervisor killed it; "" otherwise.
        again: whether the process is being restarted, so that its end does not count as a death.
        warned: whether the log already says that this process does not read its messages.
        import_line: where the import of the user's modules is, if it takes long: "FILE:LINE in FUNCTION", or "".
        shown: the memfds and lists of splits that the process, or the next one if there is none, was shown.
        peer: the connection to the process, or to the next one if there is none.
    """

    def __init__(self, number: int, on_data: Callable[[int, bytes, int | None], None]) -> None:
        self.number = number
        self.process: Process | None = None
        self.starting: object | None = None
        self.ready = False
        self.restarts = 0
        self.given_up = False
        self.leaving = False
        self.failures_in_a_row = 0
        self.starts_without_ready = 0
        self.started = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.killed = ""
        self.again = False
        self.warned = False
        self.import_line = ""
        self._asked_at = 0.0
        self.shown: set[tuple[str, int]] = set()
        self._unread_since: float | None = None
        self._next: tuple[Peer, socket.socket] | None = None
        """The connection to the next process, made in advance: when a process dies, no file descriptors might be
        left."""
        self._on_data = on_data
        self._page: mmap.mmap | None = None
        self._page_fd = self._stacks = -1
        self.peer, self._theirs = self._connection()

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if there is none."""
        return None if self.process is None else self.process.pid

    @property
    def doing(self) -> Doing | None:
        """For status: what it imports or works on, the samples read so far if that is a split, and the seconds since
        its last progress; None if it has no work."""
        now = self.look()
        if now is None and self.starting is not None and self.pid is None:  # the fork server has not forked it yet
            since = time.monotonic() - self.started
            return Doing(what="importing libraries", split=None, samples=0, seconds=round(since, 1))
        if now is None or (now.run < 0 and not now.importing) or now.waits:
            return None
        at = f", at {self.import_line[:_MOST_LINE]}" if now.importing and self.import_line else ""
        return Doing(
            what=f"{now.split}{at}",
            split=now.split if now.number >= 0 else None,
            samples=now.samples,
            seconds=round(now.since_seconds, 1),
        )

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process. SIGCONT would continue it."""
        return self.pid is not None and process_stat.fields(self.pid)[:1] == ["T"]

    def unread(self, last: Activity) -> float:
        """Return how many seconds a message has lain unread, as far as the calls of this method have seen.

        `last`: the worker's activity page; a change there shows that the worker reads.
        """
        now = time.monotonic()
        if not self.peer.unread:
            self._unread_since = None
        elif self._unread_since is None or last.since_seconds < now - self._unread_since:
            self._unread_since = now
        return 0.0 if self._unread_since is None else now - self._unread_since

    @property
    def spent(self) -> TimeSpent | None:
        """For status: where the process's time went since it was ready, and how long it had, or waited for, a CPU."""
        spent, pid = self.time_spent(), self.pid
        if spent is None or pid is None:
            return None
        had, wanted = _cpu_seconds(pid)
        return TimeSpent(**dataclasses.asdict(spent), cpu_seconds=had, cpu_wait_seconds=wanted)

    @property
    def stacks(self) -> tuple[int, int] | None:
        """The id of the process and the fd of its stacks file, if it is ready."""
        return None if self.pid is None or not self.ready else (self.pid, self._stacks)

    def time_spent(self) -> Spent | None:
        """Read where the process's time went, from its activity page."""
        return None if self._page is None else activity.spent(self._page)

    def look(self) -> Activity | None:
        """Read the process's activity page."""
        return None if self._page is None else activity.read(self._page)

    def call(self) -> tuple[int, float]:
        """Return the run that the process works on, and the seconds of its present call of user code; see
        `activity.call`."""
        return (-1, 0.0) if self._page is None else activity.call(self._page)

    def prepare(self) -> list[int]:
        """Create the files of the next process.

        Returns:
            The fds of its connection, its activity page, and its stacks file.

        Raises:
            OSError: they cannot be made. The attempt leaves nothing behind.
        """
        self.started = time.monotonic()
        self.starting = object()
        try:
            if self._next is None:
                self._next = self._connection()
            self._page_fd = os.memfd_create("penstock-activity", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._page_fd, activity.NBYTES)
            fcntl.fcntl(self._page_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._page = mmap.mmap(self._page_fd, activity.NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
            self._stacks = stacks.create()
        except OSError:
            self.forget()
            raise
        return [self._theirs.fileno(), self._page_fd, self._stacks]

    def begin(self, process: Process) -> None:
        """Note that the process has started, with the files that `prepare` made."""
        self.process, self.starting = process, None
        os.close(self._page_fd)
        self._page_fd = -1
        self._theirs.close()

    def forget(self) -> None:
        """Release the process, which is killed if it still runs, and its files."""
        if self.process is not None:
            self.process.forget()
        for fd in (self._page_fd, self._stacks):
            if fd >= 0:
                os.close(fd)
        if self._page is not None:
            self._page.close()
        self.process, self.starting, self._page = None, None, None
        self._page_fd = self._stacks = -1
        self.ready, self.killed, self.warned, self._unread_since = False, "", False, None
        self.import_line, self._asked_at = "", 0.0

    def ask_where(self) -> None:
        """Make the process write its stack."""
        if self.process is not None:
            stacks.rewind(self._stacks)
            self.process.send_signal(signal.SIGUSR2)

    def look_at_import(self) -> bool:
        """If the user's modules are being imported and that takes long, find out at which line, in two calls: the
        process writes its stack meanwhile. Return whether it takes long."""
        now = self.look()
        if self.ready or now is None or not now.importing or now.since_seconds < LONG_IMPORT:
            return False
        if self._asked_at and (line := activity.where(self.stack())):
            self.import_line = line
        since = time.monotonic() - self._asked_at
        if since >= LONG_IMPORT and self.pid is not None and catches(self.pid, signal.SIGUSR2):
            self._asked_at = time.monotonic()
            self.ask_where()
        return True

    def stack(self) -> bytes:
        """Return as much of its stack as the process has written."""
        return b"" if self._stacks < 0 else stacks.dumped(self._stacks)

    def renew(self) -> None:
        """Replace the connection to the last process with one to the next, in which nothing was sent yet."""
        self.shown.clear()
        following, self._next = self._next, None
        if following is None:  # no process ever got this one: no descriptors were left to start it
            self.peer.unsay()
            _empty(self._theirs)
            return
        self.close()
        self.peer, self._theirs = following

    def close(self) -> None:
        """Close the connection and cancel the timer."""
        self.shown.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        for peer, theirs in ((self.peer, self._theirs), *([self._next] if self._next else [])):
            peer.close()
            theirs.close()
        self._next = None

    def _connection(self) -> tuple[Peer, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return Peer(ours, self._data, lambda: None), theirs

    def _data(self, data: bytes, fd: int | None) -> None:
        if not self.leaving:
            self._on_data(self.number, data, fd)
        elif fd is not None:
            os.close(fd)


def _empty(connection: socket.socket) -> None:
    """Discard its unread messages."""
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1, socket.MSG_DONTWAIT):
            pass


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Return the seconds that a process had a CPU, and that its main thread waited for one; 0 if unknown."""
    had, wanted = process_stat.cpu_seconds(pid) or 0.0, 0.0
    with contextlib.suppress(OSError, IndexError):  # it has ended
        wanted = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9  # a kernel may be built without it
    return had, wanted
