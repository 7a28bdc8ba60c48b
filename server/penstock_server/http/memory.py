"""The memory of processes, as Linux tells it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

_PSS = re.compile(rb"^Pss:\s+(\d+) kB", re.MULTILINE)


def pss_of(pids: Iterable[int]) -> dict[int, int]:
    """Return the proportional set size of each process in bytes: a page that n processes share counts 1/n in each.

    The kernel walks over the process's page tables, which takes milliseconds; so call it on a thread. A process that
    has ended, or whose memory may not be read, is left out. See proc_pid_smaps(5).
    """
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            if match := _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_bytes()):
                found[pid] = 1024 * int(match[1])
    return found
