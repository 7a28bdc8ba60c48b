"""Changes how many hosts an engine runs (`serve --on ray`), on a user's request or as auto_workers.py decides."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

from penstock_proto import StartError
from penstock_proto.status.status_shape import HostEngine

from ..coordinator.view import WorkersView
from ..hosts.joined_host import JoinedHost
from ..status.current_status import CurrentStatus
from .auto_workers import LOOKED, AutoWorkers

log = logging.getLogger(__name__)


class Engine(Protocol):
    """Runs hosts: places them, starts them, and restarts them."""

    @property
    def name(self) -> str:
        """Its name. The names of its hosts begin with that and a hyphen."""

    @property
    def hosts(self) -> int:
        """The number of hosts that it is to run now."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most hosts. If they differ, the number of hosts follows the load."""

    @property
    def workers(self) -> int:
        """The number of workers of each host."""

    def scale(self, hosts: int) -> None:
        """Run this number of hosts from now on."""


class HostScaling:
    """Measures the hosts each second, and tells the engine how many to run.

    Args:
        engine: runs the hosts, or None.
        workers: the current workers.
        joined: the joined hosts.

    Attributes:
        on: whether the number of hosts follows the load. False once a user has asked for a number.
    """

    def __init__(self, engine: Engine | None, workers: WorkersView, joined: Iterable[JoinedHost]) -> None:
        self._engine = engine
        self._workers = workers
        self._joined = joined
        least, most = (1, 1) if engine is None else engine.bounds
        self.on = least < most
        per_host = 1 if engine is None else engine.workers
        self._decides = AutoWorkers(None, step=per_host, least=least * per_host, most=most * per_host)

    def scale(self, hosts: int) -> tuple[int, int]:
        """Tell the engine to run `hosts` hosts from now on, on a user's request. Surplus hosts hand over their lanes.

        Returns:
            The old and the new number of hosts that the engine is to run.

        Raises:
            StartError: there is no engine.
        """
        if self._engine is None:
            raise StartError(
                "this daemon was started without --on ray, so it does not start hosts itself: run `penstock join` on "
                "further hosts, or end it there with SIGTERM (on Kubernetes: kubectl scale deployment penstock-hosts "
                "--replicas N)"
            )
        self.off()
        return self._scale(self._engine, hosts), hosts

    def described(self) -> HostEngine | None:
        """Describe the engine for the status, or return None without one."""
        if self._engine is None:
            return None
        bounds = self._engine.bounds if self.on else None
        return HostEngine(name=self._engine.name, hosts=self._engine.hosts, adjusts=bounds)

    def off(self) -> None:
        """Stop adjusting the number of hosts."""
        if self.on:
            self.on = False
            log.info("the number of hosts is no longer adjusted", extra={"event": "auto_scaling_off"})

    def another_second(self, status: CurrentStatus) -> None:
        """Read the figures of the last seconds, and perhaps change the number of hosts. Called once a second."""
        engine = self._engine
        if engine is None or not self.on:
            return
        now, each = status.seconds, engine.workers
        hosts = [host for host in self._joined if host.name.startswith(f"{engine.name}-")]
        working = sum(host.working for host in hosts)
        if self._workers.leaving or working > engine.hosts:
            self._decides.changed(now)
            return
        seen = status.figures(self._decides.since, LOOKED)
        coming = engine.hosts - working
        decision = self._decides.decide(now, working * each, seen, coming * each)
        if decision is not None:
            self._scale(engine, decision.workers // each, f": {decision.why}")
            self._decides.changed(now)

    def _scale(self, engine: Engine, hosts: int, why: str = "") -> int:
        before = engine.hosts
        engine.scale(hosts)
        log.info("hosts: %d, now %d%s", before, hosts, why, extra={"event": "hosts_scaled"})
        return before
