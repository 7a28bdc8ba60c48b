"""Whether a process catches a signal."""

from __future__ import annotations

import contextlib
from pathlib import Path


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal. Otherwise most signals would end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.partition(":")[2], 16) >> (number - 1) & 1)
    return False
