"""The daemon's current status, gathered from all parts, with averages over the last seconds."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from msgspec.structs import replace

from penstock_proto.messages import VERSION
from penstock_proto.status.figures import Figures
from penstock_proto.status.span import Key
from penstock_proto.status.status_history import History
from penstock_proto.status.status_shape import HostEngine, Status
from penstock_proto.status.worker_status import Worker

from ..consumers.malformed import Malformed
from ..consumers.session_table import SessionTable
from ..consumers.starting_feeds import StartingFeeds
from ..coordinator import CoordinatorView
from ..hosts.joined_host import JoinedHost
from ..logs.bugs import Bugs
from ..machine import cpus
from ..machine.free_cpus import FreeCpus
from ..net.network import Router
from ..shared_memory.arena import Arena
from ..worker_state.cache_usage import CacheUsages
from ..workers.dropped_samples import DroppedSamples
from ..workers.spot_checks import SpotChecks
from ..workers.supervisor import Supervisor
from ..workers.worker_memory import WorkerMemory
from . import status
from .phase import phase
from .waits import Looks


class Drains(Protocol):
    """The daemon."""

    @property
    def draining(self) -> bool: ...


class Adjusts(Protocol):
    """Automatic scaling."""

    @property
    def on(self) -> bool: ...


class CurrentStatus:
    """Describes the daemon to users. The arguments are the parts that it reads.

    Args:
        daemon: knows whether it stops when the epochs that are being read have ended.
        scaling: knows whether the number of workers follows the load.
        engine: returns the description of the engine that runs hosts, or None without one.
        caches: the use of the feeds' caches.
        dropped: how many samples feeds have dropped.
        spot_checks: the samples that are made again.
        unix: the address of the listener for consumers on this host.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        *,
        daemon: Drains,
        scaling: Adjusts,
        engine: Callable[[], HostEngine | None],
        feeds: StartingFeeds,
        table: SessionTable,
        malformed: Malformed,
        looks: Looks,
        supervisor: Supervisor,
        hosts: Iterable[JoinedHost],
        caches: CacheUsages,
        dropped: DroppedSamples,
        spot_checks: SpotChecks,
        memory: WorkerMemory,
        arena: Arena,
        router: Router,
        unix: str,
        bugs: Bugs,
    ) -> None:
        self._coordinator = coordinator
        self._daemon = daemon
        self._scaling = scaling
        self._engine = engine
        self._feeds = feeds
        self._table = table
        self._malformed = malformed
        self._looks = looks
        self._supervisor = supervisor
        self._hosts = hosts
        self._caches = caches
        self._dropped = dropped
        self._spot_checks = spot_checks
        self._memory = memory
        self._arena = arena
        self._router = router
        self._unix = unix
        self._bugs = bugs
        self._id = secrets.token_hex(8)
        """Distinguishes daemons. A process id does not: another daemon can have the same one, in the same process or in
        another container."""
        self._started = time.monotonic()
        self._history = History()
        self._cpus = FreeCpus()
        self._text = status.Text(self.shown)

    @property
    def seconds(self) -> float:
        """Seconds since the daemon was started."""
        return time.monotonic() - self._started

    def described(self) -> Status:
        """Return the status, with averages."""
        return self._history.described(self._counts())

    def shown(self) -> Status:
        """Return the same for others than this process: a large cluster's is shortened."""
        return self._history.described(status.shortened(self._counts()))

    def text(self) -> str:
        """Return that as JSON text. Frequent calls get a recent copy."""
        return self._text.get()

    def figures(self, since: float, least: float) -> dict[Key, Figures]:
        """Return the figures of each stream that was read, measured since `since` (see `seconds`). Return none if that
        is less than `least` seconds, or if a worker that makes batches has not run for the whole time."""
        return self._history.figures(since, least)

    def look_at_the_clock(self, seconds: int) -> None:
        """Keep the status for the averages. Called once a second, with the seconds since the clock was started."""
        self._text.another_second()
        if seconds % (1 + len(self._supervisor.workers) // 32) == 0:  # each worker takes some 70 us
            self._history.add(self._counts())

    def _counts(self) -> Status:
        """Return the current state, and the totals since the start."""
        state = self._without_phase()
        return replace(state, phase=phase(state))

    def _without_phase(self) -> Status:
        coordinator, table = self._coordinator, self._table
        streams, more_streams = status.of_streams(table, coordinator, self._looks.of)
        return Status(
            id=self._id,
            pid=os.getpid(),
            version=VERSION,
            endpoint=self._router.endpoint,
            unix=self._unix,
            seconds=round(self.seconds, 3),
            cpus=cpus.usable(),
            cpu_seconds=time.process_time(),
            machine=self._cpus.now(),
            ready=self._feeds.ready,
            malformed=self._malformed.count,
            greeted=len(table.greeted),
            internal_errors=self._bugs.count,
            draining=self._daemon.draining,
            failing=status.of_failing(coordinator),
            adjusts_workers=self._scaling.on,
            engine=self._engine(),
            memory=status.of_memory(coordinator, self._arena, table.greeted),
            feeds=[
                status.of_feed(
                    feed,
                    self._feeds.url(feed.name),
                    coordinator.streams.values(),
                    self._caches,
                    self._dropped,
                    self._looks.of_feed(feed.name),
                    self._spot_checks.figures(feed.name),
                )
                for feed in coordinator.feeds.values()
            ],
            workers=[*self._own_workers(), *self._workers_of_hosts()],
            hosts=[status.of_host(host, coordinator.streams.values()) for host in self._hosts],
            streams=streams,
            more_streams=more_streams,
        )

    def _own_workers(self) -> Iterator[Worker]:
        workers = self._coordinator.workers
        for worker in self._supervisor.workers.values():
            yield status.of_worker(
                worker,
                leaving=worker.number in workers.leaving,
                makes_batches=worker.number not in workers.idle,
                memory=self._memory.of(worker.pid),
                awaited=self._looks.of_worker(worker.number),
                awaited_at=self._looks.awaited_at(worker.number),
            )

    def _workers_of_hosts(self) -> Iterator[Worker]:
        for host in self._hosts:
            yield from status.of_workers_of(host, self._coordinator.workers.leaving, self._looks)
