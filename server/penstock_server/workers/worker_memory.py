"""Measures the memory of worker processes on request.

The kernel walks over the page tables of a process: 1 ms for a small worker, 10 ms for each 100 MB of a large one. So a
thread measures, at most every five seconds, for any number of requests. Joined hosts measure their workers at the same
time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ..logs.bugs import Bugs

EVERY = 5.0
"""Seconds for which the figures are fresh."""

PATIENCE = 1.0
"""Most seconds that an HTTP request waits for fresh figures."""

HOSTS_PATIENCE = 0.5
"""Most seconds that a measurement waits for the answers of hosts."""

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


class OfHost(Protocol):
    """A host that measures the memory of its workers."""

    @property
    def measuring(self) -> bool:
        """Whether the host was asked and has not answered yet."""

    def measure_memory(self) -> None:
        """Ask the host to measure."""


class Host(Protocol):
    """A joined host."""

    @property
    def view(self) -> OfHost:
        """What users see of its workers."""


class WorkerMemory:
    """The last measurement, and the requests that wait for the next. Its methods are called on the event loop.

    Args:
        pids: the process ids of the workers.
        bugs: counts and logs unexpected errors.
        hosts: the joined hosts, which measure their workers themselves.
    """

    def __init__(self, pids: Callable[[], Iterable[int]], bugs: Bugs, hosts: Iterable[Host] = ()) -> None:
        self._pids = pids
        self._hosts = hosts
        self._bugs = bugs
        self._found: dict[int, int] = {}
        self._at = -EVERY
        self._look: asyncio.Task[None] | None = None
        self._waiting: list[Callable[[], None]] = []

    def of(self, pid: int | None) -> int | None:
        """Return the bytes of a process according to the latest measurement, or None."""
        return None if pid is None else self._found.get(pid)

    def fresh(self, then: Callable[[], None] | None = None) -> bool:
        """Return whether the figures are fresh. If not, begin a measurement, unless one is in progress, and call `then`
        once after it, even if it was given several times."""
        if self._look is None and time.monotonic() - self._at >= EVERY:
            self._look = asyncio.get_running_loop().create_task(self._look_now())
        if self._look is not None and then is not None and then not in self._waiting:
            self._waiting.append(then)
        return self._look is None

    async def wait(self) -> None:
        """Wait until the figures are fresh, or for `PATIENCE` seconds."""
        if not self.fresh() and self._look is not None:
            await asyncio.wait([self._look], timeout=PATIENCE)

    async def _look_now(self) -> None:
        try:
            hosts = [host.view for host in self._hosts]
            for host in hosts:
                host.measure_memory()
            deadline = time.monotonic() + HOSTS_PATIENCE
            self._found = await asyncio.to_thread(pss_of, list(self._pids()))
            while any(host.measuring for host in hosts) and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            self._at, self._look = time.monotonic(), None
            waiting, self._waiting = self._waiting, []
            for then in waiting:
                then()
        except Exception as error:
            self._at, self._look = time.monotonic(), None
            self._bugs.note(error)


def pss_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the proportional set size of each process in bytes: a page that n processes share counts 1/n in each.

    A process that has ended, or whose memory may not be read, is left out. See proc_pid_smaps(5).
    """
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            if match := _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes()):
                found[pid] = 1024 * int(match[1])
    return found
