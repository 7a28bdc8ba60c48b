"""Admits hosts, passes on their messages, and notices when they are lost."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from penstock_proto import DaemonStopped, MemoryBound, PenstockError, ProtocolError, StartError
from penstock_proto import messages as m
from penstock_proto.status.figures import size

from ..coordinator import CoordinatorView, a_bug
from ..coordinator.model import commands as do
from ..coordinator.model import events as on
from ..coordinator.model.workers import REMOTE
from ..coordinator.stream.budget import enough
from ..logs.bugs import Bugs
from ..net.keys import ClientKey
from ..net.network import Router
from ..net.version import check_version
from ..shared_memory.kept import KeptBatches
from ..worker_state.activity import Activity
from . import agreement
from .host_table import HostTable
from .joined_host import SILENT, JoinedHost

log = logging.getLogger(__name__)

MOST_WAITING = 256
"""Maximum number of hosts that may wait until the feeds are ready."""


class _Channel(NamedTuple):
    """The connection to a host; see joined_host.Channel."""

    router: Router
    peer: bytes

    def send(self, message: m.Message) -> bool:
        """Send a message."""
        return self.router.send(self.peer, message)

    def send_piece(self, message: m.Message, body: memoryview) -> bool:
        """Send a message with a second frame."""
        return self.router.send_piece(self.peer, message, body)

    @property
    def piece(self) -> int:
        """Bytes that a second frame may have."""
        return self.router.piece(self.peer)


class FromWorkers(Protocol):
    """Takes what happens to workers (daemon/from_workers.py)."""

    def take(self, worker: int, message: m.FromWorker) -> None: ...

    def died(self, worker: int, how: str, doing: Activity | None) -> None: ...

    def given_up(self, worker: int, how: str) -> None: ...


class Feeds(Protocol):
    """Knows which feeds can be read, and whether they suit the number of workers (consumers/starting_feeds.py)."""

    @property
    def ready(self) -> bool: ...

    def look_at_workers(self) -> None: ...


class Consumers(Protocol):
    """Knows which consumers can fetch batches from which hosts (consumers/fetching.py)."""

    def reach(self, stream: int, reader: int | None, host: int) -> bool: ...

    def host_at(self, where: m.HostAt) -> None: ...


class Profiles(Protocol):
    """Takes hosts' samples of their workers' stacks (consumers/profiles.py)."""

    def host_works(self, host: JoinedHost) -> None: ...

    def host_lost(self, host: JoinedHost, how: str) -> None: ...

    def sampled(self, host: JoinedHost, message: m.StacksSampled | m.SamplingEnded) -> None: ...


class Hosts:
    """Admits hosts to the table, and takes what they say. It also implements joined_host.Head.

    Args:
        targets: MODULE:ATTR of each feed.
        coordinator: makes the decisions.
        tell: passes an event to the coordinator.
        router: the connections.
        table: the joined hosts.
        may_join: raises an error unless the peer with this id may join.
        list_of: returns the fd and the size of a list of splits.
        from_workers: takes what happens to workers.
        feeds: knows which feeds can be read.
        consumers: knows which consumers can fetch from hosts.
        profiles: takes samples of workers' stacks.
        kept: the batches that hosts keep.
        bugs: notes unexpected errors.
    """

    def __init__(
        self,
        targets: Sequence[str],
        coordinator: CoordinatorView,
        tell: Callable[[on.Event], None],
        router: Router,
        table: HostTable,
        *,
        may_join: Callable[[bytes], None],
        list_of: Callable[[int], tuple[int, int]],
        from_workers: FromWorkers,
        feeds: Feeds,
        consumers: Consumers,
        profiles: Profiles,
        kept: KeptBatches,
        bugs: Bugs,
    ) -> None:
        self.kept = kept
        self.said = from_workers.take
        self.died = from_workers.died
        self.given_up = from_workers.given_up
        self.sampled = profiles.sampled
        self.list_of = list_of
        self._sources = _sources(targets)
        self._coordinator = coordinator
        self._tell = tell
        self._router = router
        self._table = table
        self._may_join = may_join
        self._feeds = feeds
        self._consumers = consumers
        self._profiles = profiles
        self._bugs = bugs
        self._next = REMOTE
        self._last = 0
        self._waiting: dict[bytes, m.Join] = {}
        self._stopping = False

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._table.by_peer

    def admit(self, admitted: Mapping[bytes, ClientKey]) -> None:
        """Let only clients with these keys fetch from hosts from now on."""
        for host in self._table:
            host.admit(admitted)

    # --- joining ---

    def join(self, peer: bytes, join: m.Join) -> None:
        """Let a host join, or wait until the feeds are ready.

        Raises:
            PenstockError: the host may not join, or does not fit the head.
        """
        check_version(join.version)
        self._may_join(peer)
        if peer in self._waiting:
            raise ProtocolError("a second Join")
        if not self._feeds.ready:
            if len(self._waiting) == MOST_WAITING:
                raise StartError("the head is not ready, and too many hosts wait for it already")
            self._waiting[peer] = join
            log.info("host %s waits until the feeds are ready", join.host, extra={"event": "host_waits"})
            return
        differs = agreement.differences(join, agreement.versions(), self._sources)
        differs = differs or self._too_small(join)
        if differs:
            fields = {"event": "host_refused", "host": join.host}
            log.error("host %s at %s cannot join: %s", join.host, self._router.address(peer), differs, extra=fields)
            raise StartError(f"host {join.host} cannot join: {differs}")
        for old_peer, old in list(self._table.by_peer.items()):
            if old.join.process == join.process:  # it noticed before us that its connection broke
                self._lose(old_peer, "has joined again")
        numbers = self._new_numbers(join.workers)
        self._last += 1
        host = JoinedHost(
            join,
            self._last,
            name=self._new_name(join.host),
            address=self._router.address(peer),
            machine=self._router.machine(peer),
            numbers=numbers,
            channel=_Channel(self._router, peer),
            key=b"" if (key := self._router.key(peer)) is None else key.public,
            head=self,
        )
        self._table.add(peer, host)
        self._router.receive_into(peer, lambda data: self._place(peer, data))
        host.joined()
        host.admit(self._router.admitted)
        text = "host %s at %s joins with %d workers"
        log.info(text, host.name, host.address, join.workers, extra={"event": "host_joins", "host": host.name})

    def _too_small(self, join: m.Join) -> str:
        """Return an error text if the host allows less memory than a slot takes; "" if it allows enough."""
        largest = max(self._coordinator.feeds.values(), key=lambda feed: feed.slot_nbytes)
        if join.memory >= largest.slot_nbytes:
            return ""
        needed = enough(2 * join.workers * largest.slot_nbytes)
        return (
            f"it allows {size(join.memory)} for batches, and a slot of feed {largest.name} takes "
            f"{size(largest.slot_nbytes)}: give --memory {needed}, which is two slots for each worker"
        )

    def feeds_ready(self) -> None:
        """Admit the hosts that came early, now that all feeds can be served."""
        waiting, self._waiting = self._waiting, {}
        for peer, join in waiting.items():
            try:
                self.join(peer, join)
            except Exception as error:
                self._router.send(peer, m.Failed(m.ErrorReport.of(self._reason(error))))
                self._router.drop(peer)

    def stop(self, error: PenstockError | None, *, again: bool) -> None:
        """Tell the hosts that the daemon ends, also those that wait until its feeds are ready. `again`: tell them
        nothing, as another daemon takes its place, which they can join."""
        self._stopping = True
        if again:
            return
        why = error or DaemonStopped("the head was stopped")
        for host in self._table:
            host.refuse(why)
        for peer in self._waiting:
            self._router.send(peer, m.Failed(m.ErrorReport.of(why)))

    def scale(self, name: str, workers: int, now: bool) -> tuple[int, int]:
        """Make host `name` run `workers` workers from now on. Surplus workers leave when their lanes come to a border,
        or at once if `now`.

        Returns:
            The number of workers before, and from now on.

        Raises:
            StartError: there is no such host, or it is leaving.
        """
        host = next((host for host in self._table if host.name == name), None)
        if host is None:
            names = ", ".join(sorted(host.name for host in self._table))
            there = f"there are: {names}" if names else "no host has joined: `penstock join` on a host lets it join"
            raise StartError(f"no host {name!r} has joined this daemon; {there}")
        if host.leaving:
            raise StartError(f"host {name} is leaving, and gets no workers")
        staying = sorted(
            host.workers - self._coordinator.workers.leaving, key=lambda worker: (worker not in host.there, worker)
        )
        before = len(staying)
        new = self._new_numbers(max(0, workers - before))
        host.scale(workers, new)
        self._table.add_workers(host, new)
        surplus = set(staying[workers:])
        for worker in sorted(surplus - host.there):  # they have no work yet
            host.retire(worker)
        if busy := tuple(sorted(surplus & host.there)):
            self._tell(on.RetireWorkers(busy, now))
        log.info("host %s: workers: %d, now %d", name, before, workers, extra=_about(host, "scaled"))
        return before, workers

    # --- what hosts say ---

    def heard(self, peer: bytes, data: bytes) -> None:
        """Handle a message from a host."""
        host = self._table.by_peer[peer]
        worked = host.working
        try:
            host.take(data)
        except Exception as error:
            self._refuse(peer, host, self._reason(error))
            return
        if host.working and not worked:
            text = "host %s works: its files, code and first samples match the head's"
            log.info(text, host.name, extra={"event": "host_works", "host": host.name})
            self._feeds.look_at_workers()
            self._profiles.host_works(host)
            if host.fetchable:
                self._consumers.host_at(host.where)

    def ended(self, peer: bytes) -> bool:
        """Handle the end of a connection. Return whether it was a host's."""
        if self._waiting.pop(peer, None) is not None:
            return True
        if peer not in self:
            return False
        self._lose(peer, "has ended, or its connection has")
        return True

    def another_second(self) -> None:
        """Send each host a sign of life, and drop the hosts that have sent none for too long."""
        now = time.monotonic()
        for peer, host in list(self._table.by_peer.items()):
            if now - host.heard > SILENT:
                self._lose(peer, f"was silent for {SILENT:.0f} s")
            else:
                host.beat()

    def _place(self, peer: bytes, data: bytes) -> memoryview:
        try:
            return self._table.by_peer[peer].place(data)
        except Exception as error:
            raise ProtocolError(f"its batch cannot be received: {self._reason(error).message}") from None

    def _reason(self, error: Exception) -> PenstockError:
        """Return the error to send to the host. An unexpected error is a bug, which costs only this host."""
        if isinstance(error, PenstockError):
            return error
        if isinstance(error, OSError):  # no descriptors or memory are left
            return MemoryBound(f"the head cannot take it: {error.strerror or error}")
        self._bugs.note(error)
        return a_bug(error)

    def _refuse(self, peer: bytes, host: JoinedHost, error: PenstockError) -> None:
        log.error("host %s is refused: %s", host.name, error.message, extra=_about(host, "host_refused"))
        host.refuse(error)
        self._drop(peer, host, "was refused")

    def _lose(self, peer: bytes, how: str) -> None:
        if self._stopping:
            return
        host = self._table.by_peer[peer]
        if host.leaving and not host.there:
            log.info("host %s has left", host.name, extra=_about(host, "host_lost"))
        else:
            text = "host %s %s; other workers take over its work"
            log.error(text, host.name, how, extra=_about(host, "host_lost"))
        self._drop(peer, host, how)

    def _drop(self, peer: bytes, host: JoinedHost, how: str) -> None:
        self._table.remove(peer)
        self._router.drop(peer)
        there = tuple(sorted(host.there))
        host.lost()
        self._profiles.host_lost(host, how)
        if there:
            self._tell(on.WorkersLost(there, f"of host {host.name}, which {how}"))
        if lost := self.kept.lost(host):
            self._tell(on.BytesLost(lost))

    # --- what a joined host needs of the head ---

    @property
    def plans(self) -> tuple[m.FeedPlan, ...]:
        """The feeds that are served."""
        return tuple(feed.plan for feed in self._coordinator.feeds.values())

    @property
    def first_samples(self) -> Mapping[str, do.Compare]:
        """The commands to compare the feeds' first samples."""
        return self._coordinator.starting.first_samples

    def came(self, worker: int, message: m.Imported) -> None:
        """Handle a worker that has imported the feeds."""
        if worker not in self._coordinator.workers.numbers:
            self._tell(on.WorkerAdded(worker, self._table.by_worker[worker].machine))
        self.said(worker, message)
        if (host := self._table.by_worker[worker]).working and host.there == host.workers:
            self._feeds.look_at_workers()

    def keeps(self, host: JoinedHost, ticket: int, reader: int | None) -> bool:
        """Return whether the host should keep the batches that it makes for the ticket."""
        return not host.leaving and self._consumers.reach(ticket // m.IDS_PER_STREAM, reader, host.number)

    def leaves(self, host: JoinedHost) -> None:
        """Retire the workers of a host that wants to leave. They hand over their lanes as soon as others can take
        them."""
        log.info("host %s leaves", host.name, extra=_about(host, "host_leaves"))
        for worker in host.workers - host.there:  # they have no work yet
            host.retire(worker)
        self._tell(on.RetireWorkers(tuple(sorted(host.there))))

    def _new_numbers(self, count: int) -> range:
        numbers = range(self._next, self._next + count)
        self._next = numbers.stop
        return numbers

    def _new_name(self, wanted: str) -> str:
        taken = {host.name for host in self._table}
        names = itertools.chain([wanted], (f"{wanted}-{number}" for number in itertools.count(2)))
        return next(name for name in names if name not in taken)


def _sources(feeds: Sequence[str]) -> tuple[m.Source, ...]:
    """Return the digests of the feeds' files, as workers import them."""
    try:
        return agreement.sources(feeds)
    except StartError:  # the workers will report it, which ends the start
        return ()


def _about(host: JoinedHost, event: str) -> dict[str, object]:
    return {"event": event, "host": host.name}
