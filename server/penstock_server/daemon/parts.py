"""The parts of a daemon: some turn what happens into events for the coordinator, others carry out its commands. This
file makes and connects them. The daemon starts and stops them (daemon.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..consumers.fetching import Fetching
from ..consumers.local_requests import LocalRequests
from ..consumers.profiles import Profiles
from ..consumers.session_table import SessionTable
from ..consumers.sessions import Sessions
from ..consumers.starting_feeds import StartingFeeds
from ..consumers.to_consumers import ToConsumers
from ..coordinator import Coordinator
from ..coordinator.vocabulary import events as on
from ..hosts import agreement
from ..hosts.host_table import HostTable
from ..hosts.hosts import Hosts
from ..http.watched import Watched
from ..logs.bugs import Bugs
from ..net.local import Listener
from ..net.network import Router
from ..scaling.auto_scaling import AutoScaling
from ..scaling.host_scaling import Engine, HostScaling
from ..scaling.scaling import Scaling
from ..shared_memory.arena import Arena, Memfd
from ..shared_memory.kept import KeptBatches
from ..shared_memory.slots import Slots
from ..status.current_status import CurrentStatus
from ..status.waits import Looks
from ..workers.standing import Standing
from ..workers.supervisor import Supervisor
from ..workers.to_workers import ToWorkers
from ..workers.worker_memory import WorkerMemory
from .causes import Causes
from .config import DaemonConfig
from .dispatch import Dispatch
from .from_workers import FromWorkers
from .group_file import GroupFile

if TYPE_CHECKING:
    from ..state_file.statefile import StateFile


class Lifecycle(Protocol):
    """The daemon, as the parts see it."""

    @property
    def draining(self) -> bool: ...

    def epoch_begins(self) -> None: ...

    def idle(self) -> None: ...

    def stop_asked(self, now: bool) -> None: ...

    def fail(self, error: PenstockError) -> None: ...


class Parts:
    """All parts of one daemon, connected.

    Args:
        lifecycle: the daemon.
        coordinator: makes the decisions.
        router: the listener for consumers over TCP.
        listener: the listener for consumers on this host.
        config: the daemon's options.
        workers: number of worker processes at the start.
        engine: runs hosts that join, or None.
        on_ready: called with the URL of each feed once it can be consumed.
        state: the file that keeps the positions of groups when the daemon ends, or None.
        may_join: raises an error unless the peer over TCP with this id may join as a host.
        stale: returns whether the feeds' code has changed since the daemon was started, if it watches for that.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        coordinator: Coordinator,
        router: Router,
        listener: Listener,
        config: DaemonConfig,
        *,
        workers: int,
        engine: Engine | None,
        on_ready: Callable[[str], None],
        state: StateFile | None,
        may_join: Callable[[bytes], None],
        stale: Callable[[], bool],
    ) -> None:
        self._lifecycle = lifecycle
        self._coordinator = coordinator
        self.bugs = Bugs()
        self.feeds = StartingFeeds(
            coordinator,
            feeds=len(config.feeds),
            endpoint=router.endpoint,
            advertise=config.advertise,
            on_ready=on_ready,
            all_ready=self._all_ready,
        )
        self.dispatch = dispatch = Dispatch(
            coordinator,
            bugs=self.bugs,
            feed_ready=self.feeds.feed_ready,
            accepted=lambda worker: self.from_workers.accepted(worker),
            rejected=lambda worker: self.from_workers.rejected(worker),
            skipped=lambda said: self.from_workers.skipped(said),
            fail_start=lifecycle.fail,
            idle=lifecycle.idle,
        )
        self.supervisor = Supervisor(config, workers)
        self.standing = Standing(self.supervisor.workers, coordinator.streams, self._tell_of_standing)
        self.kept = KeptBatches()
        self.joined = joined = HostTable()
        self.to_workers = ToWorkers(self.supervisor, range(workers), joined)
        self.causes = Causes(
            lambda: dict(zip(self.from_workers.names, config.feeds, strict=False)),
            config.environment,
            lambda: [worker.pid for worker in self.supervisor.workers.values() if worker.pid is not None],
            self.feeds.warn_once,
        )
        self.from_workers = FromWorkers(
            coordinator,
            dispatch,
            supervisor=self.supervisor,
            to_workers=self.to_workers,
            feeds=self.feeds,
            fail=lifecycle.fail,
            name_of=joined.name_of,
            stale=stale,
            find_cause=self.causes.find,
        )
        self.scaling = Scaling(
            coordinator,
            dispatch.tell,
            self.supervisor,
            self.to_workers,
            self.feeds.look_at_workers,
            by_hand=self.scaled_by_hand,
        )
        self.memory = WorkerMemory(
            lambda: [worker.pid for worker in self.supervisor.workers.values() if worker.pid is not None],
            lambda: self.sessions.status_fresh(),
            self.bugs,
            lambda: [host.view for host in joined],
        )
        self.profiles = Profiles(self.supervisor.stacks, joined, agreement.folder(config.feeds))
        table = SessionTable()
        out = ToConsumers(coordinator, dispatch.tell, router, self.kept)
        fetching = Fetching(coordinator, table, out, joined)
        self.hosts = Hosts(
            config.feeds,
            coordinator,
            dispatch.tell,
            router,
            joined,
            may_join=may_join,
            list_of=self.to_workers.list_of,
            from_workers=self.from_workers,
            feeds=self.feeds,
            consumers=fetching,
            profiles=self.profiles,
            kept=self.kept,
            bugs=self.bugs,
        )
        self.sessions = Sessions(
            coordinator,
            self._tell_of_consumer,
            table,
            out,
            fetching,
            unix=listener.name,
            ready=lambda: self.feeds.ready,
            status=lambda: self.status.text(),
            fresh=self.memory.fresh,
            requests=LocalRequests(lifecycle.stop_asked, self._scale, self.profiles),
            join=self.hosts.join,
            bugs=self.bugs,
        )
        self.looks = Looks(coordinator, table, router.unsent_bytes, joined.unfetched, joined.awaited)
        arena = Arena()
        self.slots = Slots(
            arena,
            reserved=lambda: (coordinator.budget.reserved, coordinator.budget.slots_reserved),
            found=lambda ticket: dispatch.tell(on.SlotFound(ticket)),
            copied=lambda ticket: dispatch.tell(on.Copied(ticket)),
            refused=lambda ticket, error: dispatch.tell(on.NoSlot(ticket, error)),
            gone=self._memfd_gone,
        )
        self.group_file = (
            None
            if state is None
            else GroupFile(state, coordinator, self.sessions, tell=dispatch.tell, fail=lifecycle.fail)
        )
        self.status = CurrentStatus(
            coordinator,
            draining=lambda: lifecycle.draining,
            adjusting=lambda: self.auto_scaling is not None and self.auto_scaling.on,
            engine=lambda: self.host_scaling.described(),
            feeds=self.feeds,
            sessions=self.sessions,
            looks=self.looks,
            supervisor=self.supervisor,
            hosts=joined,
            caches=self.from_workers.caches,
            spot_checks=self.from_workers.spot_checks,
            memory=self.memory,
            arena=arena,
            router=router,
            unix=listener.name,
            bugs=self.bugs,
        )
        follows_load = config.workers == "auto"
        self.auto_scaling = AutoScaling(self.scaling, self.status, coordinator.workers) if follows_load else None
        self.host_scaling = HostScaling(engine, self.status, coordinator.workers, joined)
        dispatch.connect(
            slots=self.slots,
            sessions=self.sessions,
            to_workers=self.to_workers,
            kept=self.kept,
            group_file=self.group_file,
        )

    def watched(self) -> Watched:
        """Return the parts that the HTTP server may read."""
        return Watched(
            status=self.status.shown,
            status_text=self.status.text,
            waits=self.looks.of_feed,
            seconds=lambda: self.status.seconds,
            feeds=self._coordinator.feeds,
            workers=self.supervisor.workers.values,
            hosts=self.joined,
            memory=self.memory,
            feed_of=self._feed_of,
            look_at_slabs=self.sessions.look_at_slabs,
            bugs=self.bugs,
        )

    def _scale(self, request: m.ScaleRequest | m.ScaleHostsRequest) -> tuple[int, int]:
        """Handle a user's request for a number of workers or hosts."""
        if isinstance(request, m.ScaleHostsRequest):
            return self.host_scaling.scale(request.hosts)
        if request.host:
            scaled = self.hosts.scale(request.host, request.workers, request.now)
            self.host_scaling.off()
            return scaled
        return self.scaling.scale(request.workers, request.now)

    def scaled_by_hand(self) -> None:
        """Turn automatic scaling off, because a user has asked for a number of workers."""
        if self.auto_scaling is not None:
            self.auto_scaling.off()

    def _tell_of_consumer(self, event: on.Event) -> None:
        if isinstance(event, on.Begin):
            self._lifecycle.epoch_begins()
        self.dispatch.tell(event)

    def _tell_of_standing(self, event: on.WorkerStands | on.WorkerGoesOn) -> None:
        if isinstance(event, on.WorkerStands):
            self.from_workers.spot_checks.stands(event.worker)
        self.dispatch.tell(event)

    def _all_ready(self) -> None:
        self.sessions.feeds_ready()
        self.hosts.feeds_ready()

    def _memfd_gone(self, memfd: Memfd) -> None:
        self.sessions.memfd_gone(memfd)
        self.to_workers.forget_memfd(memfd)

    def _feed_of(self, run: int) -> str:
        stream = self._coordinator.streams.get(run // m.IDS_PER_STREAM)
        return "" if stream is None or self.feeds.count == 1 else stream.feed.name
