"""How much memory this machine, and the cgroup that we run in, still have for the arena.

memfd pages count as shared memory of the cgroup that first touches them, and a full cgroup means the kernel's OOM
killer, not an error. So the arena asks here before it grows.
"""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that can be taken before this machine or one of the cgroups above us is full."""
    return min([_machine(), *_cgroups()])


def default_memory() -> int:
    """The bound of the arena where none is given: a quarter of what is available, at most 8 GiB, at least 64 MiB."""
    return max(64 << 20, min(available() // 4, 8 << 30))


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def _cgroups() -> list[int]:
    rooms = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _up_from(_CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rooms += _up_from(
                _CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
    return rooms


def _up_from(root: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[int]:
    """The room below the limit of each cgroup from ours up to the root (in a container the root is ours)."""
    rooms = []
    place = root / path.lstrip("/")
    for folder in [place, *place.parents]:
        try:
            limit = (folder / limit_file).read_text().strip()
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            pass
        else:
            if limit != "max":
                rooms.append(max(0, int(limit) - usage + int(stat.get(reclaimable, 0))))
        if folder == root:
            break
    return rooms
