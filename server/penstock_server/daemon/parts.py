"""The parts of a daemon: some turn what happens into events for the coordinator, others carry out its commands. This
file makes them. The daemon starts and stops them (daemon.py).

They are made bottom to top: each gets only objects that are there already, and names beside it, as a Protocol, what it
asks of a part of a room above it. Two circles remain, because each worker and the coordinator is both told and heard.
There the lower part learns at its start who hears it: `Supervisor.start` and `Dispatch.start`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock_proto import PenstockError
from penstock_proto import messages as m

from ..consumers.fetching import Fetching
from ..consumers.local_requests import LocalRequests
from ..consumers.malformed import Malformed
from ..consumers.profiles import Profiles
from ..consumers.session_table import SessionTable
from ..consumers.sessions import Sessions
from ..consumers.starting_feeds import StartingFeeds
from ..consumers.to_consumers import ToConsumers
from ..coordinator import Coordinator
from ..hosts import agreement
from ..hosts.host_table import HostTable
from ..hosts.hosts import Hosts
from ..http.watched import Watched
from ..logs.bugs import Bugs
from ..net.local import Listener
from ..net.network import Router
from ..scaling.auto_scaling import AutoScaling
from ..scaling.host_scaling import Engine, HostScaling
from ..scaling.scale_requests import ScaleRequests
from ..scaling.scaling import Scaling
from ..shared_memory.arena import Arena
from ..shared_memory.kept import KeptBatches
from ..shared_memory.slot_assignment import SlotAssignment
from ..status.current_status import CurrentStatus
from ..status.doing import split_of
from ..status.waits import Looks
from ..workers.long_calls import LongCalls
from ..workers.own_workers import OwnWorkers
from ..workers.supervisor import Supervisor
from ..workers.to_workers import ToWorkers
from ..workers.worker_memory import WorkerMemory
from .causes import Causes
from .command_executor import Executor
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

    def may_join(self, routing_id: bytes) -> None: ...

    def stale(self) -> bool: ...


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
        on_ready: called with the URL of each feed once it can be read.
        state: the file that keeps the positions of groups when the daemon ends, or None.
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
    ) -> None:
        self._coordinator = coordinator
        self.bugs = bugs = Bugs()
        self.dispatch = Dispatch(coordinator, bugs)
        tell = self.dispatch.tell
        self.feeds = feeds = StartingFeeds(
            coordinator,
            feeds=len(config.feeds),
            endpoint=router.endpoint,
            advertise=config.advertise,
            on_ready=on_ready,
        )
        # workers
        self.supervisor = supervisor = Supervisor(config, workers)
        self.joined = joined = HostTable()
        own = OwnWorkers(supervisor)
        to_workers = ToWorkers(own, joined)
        self.causes = Causes(config.feeds, config.environment, coordinator.starting, supervisor.pids, feeds.warn_once)
        self.from_workers = FromWorkers(
            coordinator,
            self.dispatch,
            supervisor=supervisor,
            own=own,
            to_workers=to_workers,
            feeds=feeds,
            fail=lifecycle.fail,
            name_of=joined.name_of,
            stale=lifecycle.stale,
            find_cause=self.causes.find,
        )
        spot_checks = self.from_workers.spot_checks
        self.standing = LongCalls(supervisor.workers, coordinator.streams, spot_checks, tell)
        self.memory = memory = WorkerMemory(supervisor.pids, bugs, joined)
        # hosts that join, and what they ask of consumers
        kept = KeptBatches()
        table = SessionTable()
        out = ToConsumers(coordinator, tell, router, kept)
        fetching = Fetching(coordinator, table, out, joined)
        profiles = Profiles(supervisor.stacks, joined, agreement.folder(config.feeds))
        self.hosts = Hosts(
            config.feeds,
            coordinator,
            tell,
            router,
            joined,
            may_join=lifecycle.may_join,
            list_of=own.list_of,
            from_workers=self.from_workers,
            feeds=feeds,
            consumers=fetching,
            profiles=profiles,
            kept=kept,
            bugs=bugs,
        )
        # numbers of workers and hosts
        scaling = Scaling(coordinator, tell, supervisor, feeds.look_at_workers)
        self.auto_scaling = AutoScaling(scaling, coordinator.workers, on=config.workers == "auto")
        self.host_scaling = HostScaling(engine, coordinator.workers, joined)
        self.scale_requests = ScaleRequests(
            scaling, self.auto_scaling, self.host_scaling, self.hosts, coordinator.workers
        )
        # status
        arena = Arena()
        malformed = Malformed()
        doing = partial(split_of, supervisor.workers, joined)
        self.looks = Looks(coordinator, table, joined.unfetched, joined.awaited, doing)
        self.status = CurrentStatus(
            coordinator,
            daemon=lifecycle,
            scaling=self.auto_scaling,
            engine=self.host_scaling.described,
            feeds=feeds,
            table=table,
            malformed=malformed,
            looks=self.looks,
            supervisor=supervisor,
            hosts=joined,
            caches=self.from_workers.caches,
            dropped=self.from_workers.dropped,
            spot_checks=spot_checks,
            memory=memory,
            arena=arena,
            router=router,
            unix=listener.name,
            bugs=bugs,
        )
        # consumers and their slots
        self.sessions = sessions = Sessions(
            coordinator,
            tell,
            table,
            out,
            fetching,
            unix=listener.name,
            feeds=feeds,
            status=self.status,
            memory=memory,
            requests=LocalRequests(lifecycle, self.scale_requests, profiles),
            malformed=malformed,
            join=self.hosts.join,
            epoch_begins=lifecycle.epoch_begins,
            bugs=bugs,
        )
        self.slots = SlotAssignment(arena, coordinator.budget, tell, (sessions, own))
        self.group_file = (
            None if state is None else GroupFile(state, coordinator, sessions, tell=tell, fail=lifecycle.fail)
        )
        executor = Executor(
            coordinator,
            feeds=feeds,
            from_workers=self.from_workers,
            own=own,
            to_workers=to_workers,
            slots=self.slots,
            sessions=sessions,
            hosts=self.hosts,
            kept=kept,
            group_file=self.group_file,
            fail=lifecycle.fail,
            all_done=lifecycle.idle,
            bugs=bugs,
        )
        self.dispatch.start(executor)

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

    def _feed_of(self, run: int) -> str:
        stream = self._coordinator.streams.get(run // m.IDS_PER_STREAM)
        return "" if stream is None or self.feeds.count == 1 else stream.feed.name
