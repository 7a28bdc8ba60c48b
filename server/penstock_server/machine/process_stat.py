"""Reads /proc/PID/stat: see proc(5)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_USER, _SYSTEM = 11, 12
"""The positions of its CPU times among the fields."""


def fields(pid: int) -> list[str]:
    """Return the fields of a process from its state on; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of all threads of a process; None if it has ended, or is not visible here (pid 0)."""
    found = fields(pid) if pid else []
    return (int(found[_USER]) + int(found[_SYSTEM])) / os.sysconf("SC_CLK_TCK") if found else None
