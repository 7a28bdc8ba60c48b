"""CPU time and memory of a process and its descendants, without counting shared pages twice."""

import re
from contextlib import suppress
from pathlib import Path

import psutil

PSS = re.compile(r"^Pss_(?:Anon|Shmem): +(\d+) kB", re.MULTILINE)


def started(pid: int | None = None) -> list[psutil.Process]:
    """Return the processes below a process (None: this one), at any depth."""
    return psutil.Process(pid).children(recursive=True)


def cpu_seconds(pid: int | None = None) -> float:
    """Return the CPU time, user and system, of all threads of the processes below a process (None: this one)."""
    total = 0.0
    for process in started(pid):
        with suppress(psutil.NoSuchProcess):  # the process ended after it was listed
            total += sum(process.cpu_times()[:4])  # the last two are those of children that it has waited for
    return total


def memory_bytes() -> int:
    """Return the anonymous and shared memory of this process and all below it, in proportional shares (PSS).

    A page that n processes have mapped counts 1/n for each, and so once in all. Pages of files, such as libraries, do
    not count: their cost depends on which other processes have them mapped.
    """
    total = 0
    for process in (psutil.Process(), *started()):
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            total += sum(map(int, PSS.findall(text))) * 1024
    return total
