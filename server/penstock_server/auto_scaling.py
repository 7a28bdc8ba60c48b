"""Adjusts the number of workers while feeds are read (`serve --workers auto`), as auto_workers.py decides."""

from __future__ import annotations

import logging
import os
from collections import deque

from penstock_proto.status_history import WINDOW

from .auto_workers import LOOKED, AutoWorkers
from .coordinator.workers import Workers
from .current_status import CurrentStatus
from .scaling import Scaling

log = logging.getLogger(__name__)


class AutoScaling:
    """See the file's head.

    Args:
        scaling: changes the number.
        status: knows the figures of the last seconds.
        workers: the workers that there are.

    Attributes:
        on: False from when a user has asked for a number.
    """

    def __init__(self, scaling: Scaling, status: CurrentStatus, workers: Workers) -> None:
        self.on = True
        self._scaling = scaling
        self._status = status
        self._workers = workers
        self._decides = AutoWorkers(len(os.sched_getaffinity(0)))
        self._idle: deque[tuple[float, float]] = deque(maxlen=1 + round(WINDOW))  # one reading a second

    def off(self) -> None:
        """Leave the number alone from now on."""
        if self.on:
            self.on = False
            log.info("the number of workers is no longer adjusted", extra={"event": "auto_scaling_off"})

    def another_second(self) -> None:
        """Look, and perhaps change the number."""
        if not self.on:
            return
        now = self._status.seconds
        self._idle.append((now, _idle_cpu_seconds()))
        if self._workers.leaving:
            self._decides.changed(now)
            return
        before, seen = len(self._workers.scaled), self._status.figures(self._decides.since, LOOKED)
        decision = self._decides.decide(now, before, seen, self._idle_cpus())
        if decision is not None:
            after = self._scaling.adjust(decision.workers, decision.why)
            self._decides.changed(now)
            if after < decision.workers:
                self._decides.limit(after)

    def _idle_cpus(self) -> float:
        """Return how many CPUs were idle, on average, in the time that the figures are of."""
        kept = [reading for reading in self._idle if reading[0] >= self._decides.since]
        if len(kept) < 2:
            return 0.0
        (began, before), (ended, after) = kept[0], kept[-1]
        return (after - before) / (ended - began)


def _idle_cpu_seconds() -> float:
    """Return for how long CPUs of this host have been idle, added up. Time in which they wait for a disk counts."""
    with open("/proc/stat", encoding="ascii") as file:
        fields = file.readline().split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
