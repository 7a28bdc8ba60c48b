"""Reads from /proc/stat how busy the CPUs of this host are with the work of all processes."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6)
"""user, nice, system, irq, softirq: see proc(5). Guests count as user."""
_STEAL = 7


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds since the host booted: used by all its processes, and given to other hosts by the hypervisor."""

    busy: float
    stolen: float


def cpu_times() -> CpuTimes | None:
    """Return the times of the CPUs that this process may use, or None if the system does not report them."""
    try:
        text = Path("/proc/stat").read_text()
    except OSError:
        return None
    return parse(text, os.sched_getaffinity(0), os.sysconf("SC_CLK_TCK"))


def parse(text: str, cpus: Collection[int], ticks: int) -> CpuTimes | None:
    """Read the times of `cpus` from /proc/stat, in units of 1/`ticks` s. Return None if some of them are missing."""
    names = {f"cpu{number}" for number in cpus}
    rows = [[int(word) for word in words[1:]] for line in text.splitlines() if (words := line.split())[0] in names]
    if len(rows) != len(names):
        return None
    busy = sum(row[place] for row in rows for place in _BUSY)
    return CpuTimes(busy / ticks, sum(row[_STEAL] for row in rows if len(row) > _STEAL) / ticks)
