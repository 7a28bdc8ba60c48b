"""Measures how many CPUs this process may use, and how many are idle: on this host, and within its cgroups' quotas."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from .cgroups import CGROUPS, OWN, Quota, quotas

STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """The counters at one moment.

    Attributes:
        seconds: the time of the reading, on any clock that only goes forward.
        idle: idle seconds of the CPUs that this process may run on, added up.
        quotas: its cgroups' quotas, by folder.
    """

    seconds: float
    idle: float
    quotas: dict[Path, Quota]


def usable(root: Path = CGROUPS, own: Path = OWN) -> int:
    """Return how many CPUs this process may use at once: those that it may run on, but no more than the quotas of its
    cgroups allow, rounded up. Arguments: as for `cgroups.limits`."""
    allowed = [math.ceil(quota.cpus) for quota in quotas(root, own).values()]
    return min([len(os.sched_getaffinity(0)), *allowed])


def read(seconds: float, root: Path = CGROUPS, own: Path = OWN, stat: Path = STAT) -> CpuReading:
    """Read the counters at the time `seconds`. `stat`: the statistics of the system; the rest is as for
    `cgroups.limits`."""
    return CpuReading(seconds, _idle_seconds(stat, seconds), quotas(root, own))


def idle(before: CpuReading, after: CpuReading) -> float:
    """Return how many CPUs could have done more for this process between two readings, on average.

    For a quota, that is the CPU time that its cgroup has not used, scaled down by the share of periods that used it up
    early.
    """
    seconds = after.seconds - before.seconds
    left = [(after.idle - before.idle) / seconds]
    for folder in before.quotas.keys() & after.quotas.keys():
        first, last = before.quotas[folder], after.quotas[folder]
        if first.used is None or last.used is None:
            continue
        periods, throttled = last.periods - first.periods, last.throttled - first.throttled
        unused = last.cpus - (last.used - first.used) / seconds
        left.append(unused * (1 - throttled / periods if periods > 0 else 1))
    return max(0.0, min(left))


def _idle_seconds(stat: Path, seconds: float) -> float:
    """Return the idle seconds of the CPUs that this process may run on. Waiting for a disk counts as idle. If the
    statistics cannot be read, all CPUs count as idle."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    try:
        rows = {words[0]: words for line in stat.read_text().splitlines() if (words := line.split())}
    except OSError:
        return seconds * len(names)
    found = [rows[name] for name in names if name in rows] or [rows["cpu"]]
    return sum(int(row[4]) + int(row[5]) for row in found) / os.sysconf("SC_CLK_TCK")
