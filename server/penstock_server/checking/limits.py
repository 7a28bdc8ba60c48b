"""The limits that cgroups (versions 1 and 2) set to this process: CPU time, memory, and the number of processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Limits:
    """The tightest limits of this process's cgroup and those above it.

    Attributes:
        cpus: CPUs' worth of time in each period; None: no limit.
        memory: bytes; None: no limit.
        processes: processes and threads; None: no limit.
    """

    cpus: float | None = None
    memory: int | None = None
    processes: int | None = None


def limits(root: Path = CGROUPS, own: Path = OWN) -> Limits:
    """Read the limits.

    Args:
        root: where cgroups are mounted.
        own: the file that names those of this process.
    """
    cpus: list[float] = []
    memory: list[int] = []
    processes: list[int] = []
    for controllers, path in _memberships(own):
        unified = not controllers
        if unified:
            for folder in _upwards(root, path):
                cpus += _quota(_text(folder / "cpu.max").split())
                memory += _number(_text(folder / "memory.max"))
                processes += _number(_text(folder / "pids.max"))
        if "cpu" in controllers:
            for folder in _upwards(_mounted(root, controllers), path):
                cpus += _quota([_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")])
        if "memory" in controllers:
            for folder in _upwards(root / "memory", path):
                memory += [number for number in _number(_text(folder / "memory.limit_in_bytes")) if number < 1 << 60]
        if "pids" in controllers:
            for folder in _upwards(root / "pids", path):
                processes += _number(_text(folder / "pids.max"))
    return Limits(min(cpus, default=None), min(memory, default=None), min(processes, default=None))


def _memberships(own: Path) -> Iterator[tuple[list[str], str]]:
    """Yield the controllers of each hierarchy, and the path in it; version 2 names no controllers."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        yield [name for name in controllers.split(",") if name], path


def _mounted(root: Path, controllers: list[str]) -> Path:
    """Return where a hierarchy of version 1 is: under one of its controllers' names, or all of them."""
    joined = root / ",".join(controllers)
    return joined if joined.exists() else root / "cpu"


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield a cgroup's folder and those above it. In a container the root is often the cgroup itself."""
    place = root / path.lstrip("/")
    for folder in [place, *place.parents]:
        yield folder
        if folder == root:
            return


def _quota(parts: list[str]) -> list[float]:
    """Return how many CPUs a quota and its period allow, if they are numbers."""
    numbers = [number for part in parts for number in _number(part) if number]
    return [numbers[0] / numbers[1]] if len(numbers) == 2 else []


def _number(text: str) -> list[int]:
    """Return the number in a text, if it is one: not "max", and not -1."""
    return [int(text)] if text.isdigit() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
