"""Carries out users' requests for a number of workers or hosts. From then on, that number does not follow the load."""

from __future__ import annotations

from penstock_proto import messages as m

from ..coordinator.view import WorkersView
from ..hosts.hosts import Hosts
from .auto_scaling import AutoScaling
from .host_scaling import HostScaling
from .scaling import Scaling


class ScaleRequests:
    """The one way to a number by hand: `penstock scale`, and signals.

    Args:
        scaling: changes the number of the daemon's own workers.
        automatic: adjusts that number, unless it is off.
        host_scaling: changes the number of hosts that an engine runs.
        hosts: changes the number of workers of a joined host.
        workers: the current workers.
    """

    def __init__(
        self,
        scaling: Scaling,
        automatic: AutoScaling,
        host_scaling: HostScaling,
        hosts: Hosts,
        workers: WorkersView,
    ) -> None:
        self._scaling = scaling
        self._automatic = automatic
        self._host_scaling = host_scaling
        self._hosts = hosts
        self._workers = workers

    def scale(self, request: m.ScaleRequest | m.ScaleHostsRequest) -> tuple[int, int]:
        """Carry out a request.

        Returns:
            The old and the new number.

        Raises:
            StartError: there is no such host, or no engine.
        """
        if isinstance(request, m.ScaleHostsRequest):
            return self._host_scaling.scale(request.hosts)
        if request.host:
            scaled = self._hosts.scale(request.host, request.workers, request.now)
            self._host_scaling.off()
            return scaled
        return self._scale(request.workers, request.now)

    def scale_by(self, more: int) -> None:
        """Add `more` workers, or remove some if it is negative."""
        self._scale(len(self._workers.scaled) + more, now=False)

    def _scale(self, workers: int, now: bool) -> tuple[int, int]:
        self._automatic.off()
        return self._scaling.scale(workers, now)
