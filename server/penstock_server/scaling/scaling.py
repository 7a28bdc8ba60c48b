"""Changes the number of workers while streams are read. Those with the highest numbers leave first."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..coordinator import CoordinatorView
from ..coordinator.model import events as on
from ..machine import descriptors
from ..workers.supervisor import Supervisor

log = logging.getLogger(__name__)


class Scaling:
    """Starts and retires workers until there are as many as are wanted.

    Args:
        coordinator: makes the decisions.
        tell: tells the coordinator of an event.
        supervisor: starts the worker processes.
        scaled: called when the number of workers has changed.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        tell: Callable[[on.Event], None],
        supervisor: Supervisor,
        scaled: Callable[[], None],
    ) -> None:
        self._coordinator = coordinator
        self._tell = tell
        self._supervisor = supervisor
        self._scaled = scaled

    def scale(self, workers: int, now: bool = False, *, why: str = "") -> tuple[int, int]:
        """Run `workers` workers that make batches on this host from now on, as far as there are file descriptors.
        Surplus workers leave when their lanes come to a border, or at once if `now`. One stays, unless this host has
        idle workers. Workers of other hosts do not count. The log gets the reason `why`.

        Returns:
            The old and the new number of workers.
        """
        there = self._coordinator.workers
        staying = there.scaled
        before, workers = len(staying), max(0 if there.idle else 1, workers)
        most = descriptors.most_workers(descriptors.limit(), self._coordinator.budget.slots_reserved) - len(there.idle)
        if workers > max(before, most):
            text = "there are file descriptors for only %d workers: %s"
            log.error(text, max(before, most), descriptors.HOW_TO_RAISE, extra={"event": "scale_limited"})
            workers = max(before, most)
        for _ in range(before, workers):
            try:
                number = self._supervisor.add()
            except OSError as error:
                text = "no worker can be added (%s): %s"
                log.error(text, error, descriptors.HOW_TO_RAISE, extra={"event": "scale_limited"})
                workers = len(there.scaled)
                break
            self._tell(on.WorkerAdded(number))
        if staying[workers:]:
            self._tell(on.RetireWorkers(tuple(staying[workers:]), now))
        self._tell(on.SlotsAllowed(descriptors.for_slots(descriptors.limit(), len(there.own))))
        log.info("workers: %d, now %d%s", before, workers, why and f": {why}", extra={"event": "scaled"})
        self._scaled()
        return before, workers
