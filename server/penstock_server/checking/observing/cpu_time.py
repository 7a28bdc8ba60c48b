"""Measures the CPU time of user code, with that of the processes that it starts, and what others leave of the CPUs."""

from __future__ import annotations

import os
import resource
import time
from typing import NamedTuple

from ...machine import cpus, orphans

_LEAST_SECONDS = 0.3
"""The system counts in steps of 0.01 s for each CPU, so shorter times show nothing about others."""


class CpuUse(NamedTuple):
    """The use of the CPUs during some time.

    Attributes:
        helpers: CPU seconds of the processes that this one has started.
        others: how many CPUs processes of others have used, on average.
    """

    helpers: float
    others: float


class CpuWatch:
    """Watches the CPUs from its construction on."""

    def __init__(self) -> None:
        self._began = cpus.read(time.monotonic())
        self._own, self._helpers = time.process_time(), _seconds_of_helpers()

    def used(self) -> CpuUse:
        """Return the use since then."""
        now = cpus.read(time.monotonic())
        seconds = now.seconds - self._began.seconds
        helpers = max(0.0, _seconds_of_helpers() - self._helpers)
        if seconds < _LEAST_SECONDS:
            return CpuUse(helpers, 0.0)
        ours = (time.process_time() - self._own + helpers) / seconds
        return CpuUse(helpers, max(0.0, cpus.usable() - cpus.idle(self._began, now) - ours))


def _seconds_of_helpers() -> float:
    """Return the CPU seconds of all processes that this one has started, so far."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(map(_seconds_of, orphans.descendants(os.getpid())))


def _seconds_of(pid: int) -> float:
    """Return the CPU seconds of a process, and of those of its own that have ended; 0 if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
