"""Measures how much memory this machine and this process's cgroups have left for the arena.

The pages of a memfd count as shared memory of the cgroup that first touches them. In a full cgroup the kernel kills
processes instead of returning an error. So the arena asks here before it grows.
"""

from __future__ import annotations

import os
from pathlib import Path

from .cgroups import CGROUPS, OWN, UNLIMITED, of_process

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By cgroups version: the files with the limit and the use, and the part of memory.stat that the kernel can reclaim."""


def available() -> int:
    """Return the bytes that can be allocated before this machine or one of our cgroups is full."""
    return min([_machine(), *_cgroups()])


def default_memory() -> int:
    """Return the default of `--memory`: a quarter of what is available, at most 8 GiB, at least 64 MiB."""
    return max(64 << 20, min(available() // 4, 8 << 30))


def _machine(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the bytes that the machine has left. `meminfo`: if it cannot be read, what the kernel could reclaim does
    not count."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroups(root: Path = CGROUPS, own: Path = OWN) -> list[int]:
    """Return the bytes left below the limit of each cgroup that has one, from ours up to the root (in a container,
    ours). Arguments: as for `cgroups.limits`."""
    left = []
    for folder, version in of_process("memory", root, own):
        limit_file, usage_file, reclaimable = _FILES[version]
        try:
            limit = (folder / limit_file).read_text().strip()
            if limit == "max" or int(limit) >= UNLIMITED:
                continue  # before memory.stat is read: the kernel first adds up the counters of all CPUs for it
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        left.append(max(0, int(limit) - usage + int(stat.get(reclaimable, 0))))
    return left
