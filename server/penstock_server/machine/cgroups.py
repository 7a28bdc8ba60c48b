"""The limits that cgroups (versions 1 and 2) set for this process: CPU time, memory, and the number of processes.

Only this file knows where cgroups are mounted. `penstock check` shows the limits, cpus.py computes how much CPU time
the quotas leave, and memory_limits.py how much memory is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Version 1 shows a limit of memory that is not set as a larger number: the largest multiple of the page size below
2**63."""


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


@dataclass(frozen=True, slots=True)
class Quota:
    """A cgroup's limit on CPU time.

    Attributes:
        cpus: CPUs' worth of time in each period.
        used: CPU seconds that its processes have used; None if unknown.
        periods: periods in which they wanted to run.
        throttled: how many of those periods stopped them because the time was used up.
    """

    cpus: float
    used: float | None
    periods: int
    throttled: int


def limits(root: Path = CGROUPS, own: Path = OWN) -> Limits:
    """Read the limits.

    Args:
        root: where cgroups are mounted.
        own: the file that names this process's cgroups.
    """
    memory: list[int] = []
    processes: list[int] = []
    for folder, version in of_process("memory", root, own):
        if version == 2:
            memory += _number(_text(folder / "memory.max"))
        else:
            memory += [number for number in _number(_text(folder / "memory.limit_in_bytes")) if number < UNLIMITED]
    for folder, _ in of_process("pids", root, own):
        processes += _number(_text(folder / "pids.max"))
    cpus = [quota.cpus for quota in quotas(root, own).values()]
    return Limits(min(cpus, default=None), min(memory, default=None), min(processes, default=None))


def quotas(root: Path = CGROUPS, own: Path = OWN) -> dict[Path, Quota]:
    """Read the CPU quotas of this process's cgroup and those above it, by folder. Arguments: as for `limits`."""
    found = {}
    # In version 1, another hierarchy may count the CPU time, and this process may be in another cgroup there.
    accounts = {_within(folder, root): folder for folder, version in of_process("cpuacct", root, own) if version == 1}
    for folder, version in of_process("cpu", root, own):
        stat = dict(line.split() for line in _text(folder / "cpu.stat").splitlines())
        if version == 2:
            cpus = _cpus(_text(folder / "cpu.max").split())
            used = [number / 1e6 for number in _number(stat.get("usage_usec", ""))]
        else:
            cpus = _cpus([_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")])
            account = accounts.get(_within(folder, root))
            used = [] if account is None else [number / 1e9 for number in _number(_text(account / "cpuacct.usage"))]
        if cpus is not None:
            periods, throttled = (sum(_number(stat.get(name, ""))) for name in ("nr_periods", "nr_throttled"))
            found[folder] = Quota(cpus, used[0] if used else None, periods, throttled)
    return found


def of_process(controller: str, root: Path = CGROUPS, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each cgroup of this process that has `controller`, then the folders above it, each with the
    version of cgroups (1 or 2). In a container the root is often the cgroup itself."""
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        controllers = names.split(",")
        if not names:
            place, version = root, 2
        elif controller in controllers:
            joined = root / ",".join(controllers)
            place, version = (joined if joined.exists() else root / controller), 1
        else:
            continue
        own_folder = place / path.lstrip("/")
        for folder in [own_folder, *own_folder.parents]:
            yield folder, version
            if folder == place:
                break


def _within(folder: Path, root: Path) -> tuple[str, ...]:
    """Return the path of a cgroup of version 1 within its hierarchy."""
    return folder.relative_to(root).parts[1:]


def _cpus(parts: list[str]) -> float | None:
    """Return how many CPUs a quota and its period allow, or None if they are not numbers."""
    numbers = [number for part in parts for number in _number(part) if number]
    return numbers[0] / numbers[1] if len(numbers) == 2 else None


def _number(text: str) -> list[int]:
    """Return the number in `text`; none if the text is not a number ("max", "-1")."""
    return [int(text)] if text.isdigit() else []


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
