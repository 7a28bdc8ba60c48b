"""Runs work in a child process that may take only so much memory and time. Knows nothing of files.

A file can ask its reader for any amount of both. The child reports as it goes along, so that the parent has all that it
found before it was ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ...machine.process_limits import end_with_parent, limit_memory, own_memory
from ...machine.process_stat import cpu_seconds

_STEP = 0.1
"""Seconds between two looks at the child's CPU time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most that a child may take.

    Attributes:
        memory: bytes, beyond those of its parent.
        cpu: seconds of CPU time, which do not depend on how busy the machine is; None for no bound.
        wall: seconds, also those that it waits for a disk or a server; None for no bound.
    """

    memory: int
    cpu: float | None
    wall: float | None


class EndedError(Exception):
    """The child was ended, or ended by itself, before its work was done. The message says why, as a clause."""


def run(work: Callable[[Callable[[Any], None]], None], bounds: Bounds) -> Iterator[Any]:
    """Run `work(report)` in a child, and yield what it reports. Its exceptions are its own concern.

    Raises:
        EndedError: the child reached a bound of time, or a signal ended it.
    """
    here, there = multiprocessing.Pipe(duplex=False)
    # With "fork", the child has the formats and file systems that this process has registered.
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(work, there, here, bounds.memory))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where NumPy has started threads
        child.start()
    there.close()
    assert child.pid is not None
    try:
        yield from _reports(here, child.pid, bounds)
        child.join()
        if child.exitcode:
            raise EndedError(_how(child.exitcode))
    finally:
        here.close()
        child.kill()
        child.join()
        child.close()


def _reports(here: Connection, pid: int, bounds: Bounds) -> Iterator[Any]:
    began = time.monotonic()
    while True:
        if here.poll(_STEP):
            try:
                yield here.recv()
            except EOFError:
                return
        elif bounds.cpu is not None and (cpu_seconds(pid) or 0) > bounds.cpu:
            raise EndedError(f"took more than {bounds.cpu:g} s of CPU time")
        elif bounds.wall is not None and time.monotonic() - began > bounds.wall:
            raise EndedError(f"took more than {bounds.wall:g} s")


def _how(status: int) -> str:
    if status > 0:
        return f"ended its process with status {status}"
    short = " (the kernel sends it when memory is short)" if -status == signal.SIGKILL else ""
    return f"ended its process by {signal.Signals(-status).name}{short}"


def _in_child(work: Callable[[Callable[[Any], None]], None], there: Connection, here: Connection, memory: int) -> None:
    here.close()
    end_with_parent("penstock-peek")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process then
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # others reserve more than the limit at once
    limit_memory(own_memory() + memory)
    work(there.send)
