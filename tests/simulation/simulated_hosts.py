"""Hosts that join a simulated daemon, leave it, and are lost with all of their workers at once.

All messages of a host come over one connection. When it ends, the daemon still reads the messages that have arrived.
The rest is lost with the host. Until the daemon notices the end, it continues to give work to the host's workers.

A host may keep the bytes of the batches that it has made, if the coordinator allows it. Consumers over the network, or
the daemon, fetch them at any time. If the host is lost, these batches are lost with it, and made again.

The daemon believes a host's worker only what it was told to do (OpenTickets).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock_proto import messages as m
from penstock_server.coordinator.model import commands as do
from penstock_server.coordinator.model import events as on
from penstock_server.coordinator.model.workers import REMOTE
from penstock_server.hosts.open_tickets import OpenTickets

if TYPE_CHECKING:
    from tests.simulation.simulation import Fill, Slot, World


def machine_of(number: int) -> str:
    """Return the machine of a host or a consumer, by its number. There are two machines besides the daemon's."""
    return "ab"[number % 2]


@dataclass(eq=False)
class Host:
    """A host that has joined, with the numbers of its workers, and the tickets for which they are to answer."""

    workers: tuple[int, ...]
    leaving: bool = False
    lost: bool = False
    tickets: OpenTickets = field(default_factory=OpenTickets)


class Hosts:
    """The hosts of a world."""

    def __init__(self, world: World, size: int | None) -> None:
        self.there: list[Host] = []
        self._size = size
        self._joined = 0
        self._world = world
        self._next = REMOTE
        self._eager = world.random.random() < 0.3
        """Whether hosts send kept batches before anybody waits for them."""

    def choices(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """Yield the steps that are possible now."""
        for host in self.there:
            if host.lost:
                yield (id(host), "is lost"), partial(self._news, host)
            else:
                if host.leaving and not self._keeps(host):
                    yield (id(host), "ends"), partial(self._end, host)
                if self._eager and self._keeps(host):
                    yield (id(host), "sends"), partial(self._send, host)

    def late_choices(self) -> Iterator[tuple[object, Callable[[], object]]]:
        """Yield the steps that are taken only when no other step is possible."""
        for host in self.there:
            if not host.lost and self._keeps(host):
                yield (id(host), "sends"), partial(self._send, host)

    def join(self) -> None:
        """Let a host join. Its workers get numbers that were never used before."""
        count = self._size or self._world.random.randint(1, 3)
        host = Host(tuple(range(self._next, self._next + count)))
        self._next += count
        self.there.append(host)
        for number in host.workers:
            self._world.add_worker(number, machine_of(self._joined))
        self._joined += 1

    def leave(self) -> None:
        """Let one host, or all hosts, begin to leave."""
        for host in self._some([host for host in self.there if not (host.leaving or host.lost)]):
            if host in self.there:  # the daemon may have been killed meanwhile
                host.leaving = True
                self._world.handle(on.RetireWorkers(host.workers, now=self._world.random.random() < 0.2))
                self._world.carry_out()  # what the next host may be given, before it leaves too

    def lose(self) -> None:
        """Lose one host, or all hosts. The daemon does not know yet."""
        for host in self._some([host for host in self.there if not host.lost]):
            self._end(host)

    def leave_behind(self) -> int:
        """Forget all hosts, because the daemon was killed. Return how many of them will join the next daemon."""
        count = sum(not host.lost for host in self.there)
        self.there.clear()
        return count

    def is_lost(self, worker: int) -> bool:
        """Return whether the worker's host is lost."""
        return any(host.lost and worker in host.workers for host in self.there)

    def tell(self, command: do.Command) -> None:
        """Note a command to a host's worker, as JoinedHost does."""
        host = self._of(getattr(command, "worker", None))
        if host is None:
            return
        memfd: Any = object()
        match command:
            case do.StartRun():
                host.tickets.begin_run(command.run, command.worker)
            case do.DropRun():
                host.tickets.drop_run(command.run)
            case do.MeasureRows():
                host.tickets.open(command.worker, command.run, command.ticket, None)
            case do.Fill() | do.WriteRows():
                host.tickets.open(command.worker, command.run, command.ticket, memfd)

    def believes(self, worker: int, message: on.Event) -> bool:
        """Check what a worker says, as JoinedHost does. Return whether it is for the coordinator.

        Raises:
            ProtocolError: the worker may not say this.
        """
        host = self._of(worker)
        if host is None:
            return True
        tickets = host.tickets
        match message:
            case m.Made():
                tickets.check(worker, message.run, message.ticket, batches=message.batches)
                if message.last:
                    tickets.answered(worker, message.run, message.ticket)
            case m.NeedRoom():
                tickets.needs_room(worker, message.run, message.ticket)
            case m.RowsMeasured() | m.RowsWritten():
                tickets.answered(worker, message.run, message.ticket)
            case on.RunFailed():
                if not tickets.is_of(message.run, worker):
                    return False
                tickets.run_failed(message.run)
            case on.SplitSkipped():
                return tickets.is_of(message.run, worker)
        return True

    def ended(self, worker: int) -> None:
        """Note that the process of a worker has ended."""
        if (host := self._of(worker)) is not None:
            host.tickets.worker_ended(worker)

    def keep(self, worker: int, fill: Fill, places: range) -> None:
        """Record that the worker's host keeps these batches of a turn, if the slot still allows it."""
        host = self._of(worker)
        slot = fill.slot
        if host is not None and slot.ticket == fill.ticket and slot.stays:
            slot.kept.update((fill.base + place, host) for place in places)

    def _of(self, worker: int | None) -> Host | None:
        return next((host for host in self.there if worker in host.workers), None)

    def _keeps(self, host: Host) -> list[Slot]:
        return [slot for slot in self._world.arena.used.values() if host in slot.kept.values()]

    def _send(self, host: Host) -> None:
        """Let the host send its kept batches of one slot to the daemon."""
        slot = self._world.random.choice(self._keeps(host))
        slot.kept = {place: at for place, at in slot.kept.items() if at is not host}
        slot.stays = False

    def _some(self, hosts: list[Host]) -> list[Host]:
        if hosts and self._world.random.random() < 0.7:
            return [self._world.random.choice(hosts)]
        return hosts

    def _end(self, host: Host) -> None:
        host.lost = True
        for number in host.workers:
            worker = self._world.workers.get(number)
            if worker is not None:
                worker.alive = False
                worker.told.clear()
                while worker.answers and self._world.random.random() < 0.5:
                    worker.answers.pop()

    def _news(self, host: Host) -> None:
        self.there.remove(host)
        for number in host.workers:
            self._world.workers.pop(number, None)
        lost = self._keeps(host)
        for slot in lost:
            slot.lose(host)
        self._world.handle(on.WorkersLost(host.workers, "is lost"))
        if lost:
            self._world.handle(on.BytesLost(tuple(slot.ticket for slot in lost)))
