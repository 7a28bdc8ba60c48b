"""Measures how many CPUs this process may use, and how many are idle: on this host, and within its cgroups' quotas."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from .cgroups import CGROUPS, OWN, Quota, quotas

STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL = 4, 5, 8
"""Columns of a line of /proc/stat; see proc(5)."""


@dataclass(frozen=True, slots=True)
class CpuReading:
    """The counters at one moment.

    Attributes:
        seconds: the time of the reading, on any clock that only goes forward.
        count: how many CPUs this process may run on.
        idle: idle seconds of these CPUs, added up.
        stolen: seconds that the hypervisor has given to other hosts, likewise.
        quotas: its cgroups' quotas, by folder.
    """

    seconds: float
    count: int
    idle: float
    stolen: float
    quotas: dict[Path, Quota]


def usable(root: Path = CGROUPS, own: Path = OWN) -> int:
    """Return how many CPUs this process may use at once: those that it may run on, but no more than the quotas of its
    cgroups allow, rounded up. Arguments: as for `cgroups.limits`."""
    allowed = [math.ceil(quota.cpus) for quota in quotas(root, own).values()]
    return min([len(os.sched_getaffinity(0)), *allowed])


def read(seconds: float, root: Path = CGROUPS, own: Path = OWN, stat: Path = STAT) -> CpuReading:
    """Read the counters at the time `seconds`. `stat`: the statistics of the system; the rest is as for
    `cgroups.limits`."""
    own_cpus = os.sched_getaffinity(0)
    return CpuReading(seconds, len(own_cpus), *_idle_and_stolen(stat, seconds, own_cpus), quotas(root, own))


def idle(before: CpuReading, after: CpuReading) -> float:
    """Return how many CPUs could have done more for this process between two readings, on average.

    For a quota, that is the CPU time that its cgroup has not used, scaled down by the share of periods that used it up
    early. If nobody knows what the cgroup has used, only that share counts.
    """
    seconds = after.seconds - before.seconds
    left = [(after.idle - before.idle) / seconds]
    for folder in before.quotas.keys() & after.quotas.keys():
        first, last = before.quotas[folder], after.quotas[folder]
        periods, throttled = last.periods - first.periods, last.throttled - first.throttled
        used = 0.0 if first.used is None or last.used is None else (last.used - first.used) / seconds
        unused = last.cpus - used
        left.append(unused * (1 - throttled / periods if periods > 0 else 1))
    return max(0.0, min(left))


def _idle_and_stolen(stat: Path, seconds: float, own: Collection[int]) -> tuple[float, float]:
    """Return the idle seconds of these CPUs, and those that the hypervisor gave to others. Waiting for a disk counts as
    idle. If the statistics cannot be read, all CPUs count as idle."""
    names = {f"cpu{number}" for number in own}
    try:
        rows = {words[0]: words for line in stat.read_text().splitlines() if (words := line.split())}
    except OSError:
        return seconds * len(names), 0.0
    found = [rows[name] for name in names if name in rows] or [rows["cpu"]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (
        sum(int(row[_IDLE]) + int(row[_IOWAIT]) for row in found) / ticks,
        sum(int(row[_STEAL]) for row in found if len(row) > _STEAL) / ticks,
    )
