"""A worker's place: the process that fills it now, its connection, and what it says of itself."""

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

from .. import activity
from ..activity import Activity
from .peer import Peer
from .process import Process

_MOST_DUMP = 256 * 1024


class WorkerHandle:
    """One worker's place: the process that fills it now, and how often it had to be filled.

    The connection to the next process is made as soon as one has ended: what is said before the new one is there waits
    in it.
    """

    def __init__(self, number: int, on_data: Callable[[int, bytes, int | None], None]) -> None:
        self.number = number
        self.process: Process | None = None
        self.starting: object | None = None
        """The start that is under way, if one is."""
        self.ready = False
        """Whether this process has imported the user's modules."""
        self.restarts = 0
        self.given_up = False
        self.leaving = False
        self.failures_in_a_row = 0
        self.starts_without_ready = 0
        self.started = 0.0
        self.timer: asyncio.TimerHandle | None = None
        """When the next process is started, or a leaving one is killed."""
        self.hung = ""
        """Why it was killed, where it was for standing still."""
        self.warned = False
        """Whether it was told that this process does not read."""
        self._unread_since: float | None = None
        self._next: tuple[Peer, socket.socket] | None = None
        """The connection to the process after the next one: a death must not want for descriptors."""
        self._on_data = on_data
        self._page: mmap.mmap | None = None
        self._page_fd = self._dump = -1
        self.peer, self._theirs = self._connection()

    @property
    def pid(self) -> int | None:
        """The process's id, or None where none runs."""
        return None if self.process is None else self.process.pid

    @property
    def doing(self) -> dict[str, object] | None:
        """For status: what it works on, if that is a split the samples it had made of it, and how many seconds ago that
        was; None where it has nothing to do."""
        now = self.look()
        if now is None or now.run < 0 or now.waits:
            return None
        return {
            "what": now.split,
            "split": now.split if now.number >= 0 else None,
            "samples": now.samples,
            "seconds": round(now.since_seconds, 1),
        }

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped the process: it goes on at SIGCONT."""
        return self.pid is not None and _fields(self.pid)[:1] == ["T"]

    def unread(self, last: Activity) -> float:
        """For how many seconds something that it was sent lies there unread, as far as that was looked at.

        `last`: what its page says; what it does shows that it reads.
        """
        now = time.monotonic()
        if not self.peer.unread:
            self._unread_since = None
        elif self._unread_since is None or last.since_seconds < now - self._unread_since:
            self._unread_since = now
        return 0.0 if self._unread_since is None else now - self._unread_since

    @property
    def spent(self) -> dict[str, float] | None:
        """For status: where the process's time has gone since it was ready, and how long it had a CPU or lacked one."""
        page, pid = self._page, self.pid
        spent = None if page is None else activity.spent(page)
        if spent is None or pid is None:
            return None
        had, wanted = _cpu_seconds(pid)
        return {**dataclasses.asdict(spent), "cpu_seconds": had, "cpu_wait_seconds": wanted}

    def look(self) -> Activity | None:
        """What the process's status page says."""
        return None if self._page is None else activity.read(self._page)

    def prepare(self) -> list[int]:
        """Make what the next process is given: its connection, its status page, and where its stack goes.

        Raises:
            OSError: it cannot be made; nothing is left of the attempt.
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
            self._dump = os.memfd_create("penstock-dump", os.MFD_CLOEXEC)
        except OSError:
            self.forget()
            raise
        return [self._theirs.fileno(), self._page_fd, self._dump]

    def begin(self, process: Process) -> None:
        """The process has started, and has what `prepare` made."""
        self.process, self.starting = process, None
        os.close(self._page_fd)
        self._page_fd = -1
        self._theirs.close()

    def forget(self) -> None:
        """Let go of the process, which is killed if it still runs, and of all that was its own."""
        if self.process is not None:
            self.process.forget()
        for fd in (self._page_fd, self._dump):
            if fd >= 0:
                os.close(fd)
        if self._page is not None:
            self._page.close()
        self.process, self.starting, self._page = None, None, None
        self._page_fd = self._dump = -1
        self.ready, self.hung, self.warned, self._unread_since = False, "", False, None

    def ask_where(self) -> None:
        """Have the process write its stack."""
        if self.process is not None:
            os.ftruncate(self._dump, 0)
            os.lseek(self._dump, 0, os.SEEK_SET)  # its fd shares the position
            self.process.send_signal(signal.SIGUSR2)

    def stack(self) -> bytes:
        """What it has written of its stack."""
        return b"" if self._dump < 0 else os.pread(self._dump, _MOST_DUMP, 0)

    def renew(self) -> None:
        """Have a connection to the next process in place of the last one's, in which nothing was said yet."""
        following, self._next = self._next, None
        if following is None:  # no process was given this one: there were no descriptors to start it
            self.peer.unsay()
            _empty(self._theirs)
            return
        self.close()
        self.peer, self._theirs = following

    def close(self) -> None:
        """Close the connection, and wait for nothing any more."""
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
    """Read away what lies in it unread."""
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1, socket.MSG_DONTWAIT):
            pass


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """How long a process has had a CPU, and how long its main thread could have run and had none. 0 if unknown."""
    had = wanted = 0.0
    with contextlib.suppress(OSError, IndexError):  # it has ended
        fields = _fields(pid)
        had = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, see proc(5)
        wanted = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9  # a kernel may be built without it
    return had, wanted


def _fields(pid: int) -> list[str]:
    """The fields of its /proc/PID/stat from its state on, see proc(5); none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []
