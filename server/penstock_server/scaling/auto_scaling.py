"""Adjusts the number of workers while feeds are read (`serve --workers auto`), as auto_workers.py decides."""

from __future__ import annotations

import logging

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
        if self._workers.leaving:
            self._decides.changed(now)
            return
        before, seen = len(self._workers.scaled), status.figures(self._decides.since, LOOKED)
        decision = self._decides.decide(now, before, seen)
        if decision is not None:
            _, after = self._scaling.scale(decision.workers, why=decision.why)
            self._decides.changed(now)
            if after < decision.workers:
                self._decides.limit(after)
