"""Adds up how much CPU time this process and its children could have used beyond what they used."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock_proto.messages import Machine

from .cpus import CpuReading, idle, read


class FreeCpus:
    """The CPUs of this host, from the making of this object on.

    Args:
        clock: returns the time in seconds.
        read: returns the counters; see `read`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, read: Callable[[float], CpuReading] = read) -> None:
        self._clock = clock
        self._read = read
        self._sum = 0.0
        self._since = self._read(clock())
        self._first = self._since

    def now(self) -> Machine:
        """Return the CPUs of this host, and how much of them was left since this object was made."""
        reading = self._read(self._clock())
        seconds = reading.seconds - self._since.seconds
        free = self._sum + (idle(self._since, reading) * seconds if seconds > 0 else 0.0)
        if seconds >= 1:
            self._sum, self._since = free, reading
        return Machine(
            count=reading.count,
            idle_seconds=round(reading.idle - self._first.idle, 3),
            free_seconds=round(free, 3),
            stolen_seconds=round(reading.stolen - self._first.stolen, 3),
        )
