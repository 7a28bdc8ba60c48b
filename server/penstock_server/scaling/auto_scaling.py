"""Adjusts the number of workers while feeds are read (`serve --workers auto`), as auto_workers.py decides."""

from __future__ import annotations

import logging
from collections import deque

from penstock_proto.status.status_history import WINDOW

from ..coordinator.view import WorkersView
from ..machine import cpus
from ..status.current_status import CurrentStatus
from .auto_workers import LOOKED, AutoWorkers
from .scaling import Scaling

log = logging.getLogger(__name__)


class AutoScaling:
    """Measures the workers each second, and carries out each decision.

    Args:
        scaling: changes the number of workers.
        workers: the current workers.
        on: whether to adjust their number.

    Attributes:
        on: whether the number follows the load. False once a user has asked for a number.
    """

    def __init__(self, scaling: Scaling, workers: WorkersView, *, on: bool) -> None:
        self.on = on
        self._scaling = scaling
        self._workers = workers
        self._decides = AutoWorkers(cpus.usable())
        self._readings: deque[cpus.CpuReading] = deque(maxlen=1 + round(WINDOW))  # one reading a second

    def off(self) -> None:
        """Stop adjusting the number of workers."""
        if self.on:
            self.on = False
            log.info("the number of workers is no longer adjusted", extra={"event": "auto_scaling_off"})

    def another_second(self, status: CurrentStatus) -> None:
        """Read the figures of the last seconds, and perhaps change the number of workers. Called once a second."""
        if not self.on:
            return
        now = status.seconds
        self._readings.append(cpus.read(now))
        if self._workers.leaving:
            self._decides.changed(now)
            return
        before, seen = len(self._workers.scaled), status.figures(self._decides.since, LOOKED)
        decision = self._decides.decide(now, before, seen, self._idle_cpus())
        if decision is not None:
            _, after = self._scaling.scale(decision.workers, why=decision.why)
            self._decides.changed(now)
            if after < decision.workers:
                self._decides.limit(after)

    def _idle_cpus(self) -> float:
        """Return how many CPUs were idle, on average, in the time that the figures cover."""
        kept = [reading for reading in self._readings if reading.seconds >= self._decides.since]
        return cpus.idle(kept[0], kept[-1]) if len(kept) >= 2 else 0.0
