"""The joined hosts: finds each by its connection, or by one of its workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from penstock_proto import messages as m
from penstock_proto.spec import Spec

from ..coordinator.model import commands as do
from ..shared_memory.arena import Memfd
from ..workers.to_workers import WayToWorkers
from .joined_host import JoinedHost


class HostTable:
    """All joined hosts.

    Attributes:
        by_peer: the hosts, by the id of their connection.
        by_worker: the hosts, by the number of each of their workers.
    """

    def __init__(self) -> None:
        self.by_peer: dict[bytes, JoinedHost] = {}
        self.by_worker: dict[int, JoinedHost] = {}

    def __iter__(self) -> Iterator[JoinedHost]:
        return iter(self.by_peer.values())

    def add(self, peer: bytes, host: JoinedHost) -> None:
        """Add a host with its first workers."""
        self.by_peer[peer] = host
        self.add_workers(host, host.numbers)

    def add_workers(self, host: JoinedHost, numbers: Iterable[int]) -> None:
        """Add further workers of a host."""
        self.by_worker.update(dict.fromkeys(numbers, host))

    def remove(self, peer: bytes) -> None:
        """Remove a host and its workers."""
        for worker in self.by_peer.pop(peer).numbers:
            del self.by_worker[worker]

    def name_of(self, worker: int) -> str:
        """Return the name of a worker, for the log: "worker 3", or "worker 3 of host b"."""
        host = self.by_worker.get(worker)
        return f"worker {worker}" if host is None else f"worker {host.numbers[worker]} of host {host.name}"

    def addresses(self) -> list[m.HostAt]:
        """Return where consumers can fetch."""
        return [host.where for host in self if host.fetchable]

    def unfetched(self, number: int) -> int:
        """Return how many bytes wait at host `number` until the connections of consumers take them."""
        reports = (host.report for host in self if host.number == number)
        return sum(report.unfetched for report in reports if report is not None)

    def awaited(self, worker: int, seconds: float) -> None:
        """Note that a consumer has waited `seconds` for batches of this worker."""
        if (host := self.by_worker.get(worker)) is not None:
            host.awaited += seconds

    def way(self, worker: int) -> WayToWorkers:
        """Return the way to a worker. If its host is lost, it leads nowhere: others will do the work."""
        return self.by_worker.get(worker, _NOWHERE)

    def forget_list(self, splits: int) -> None:
        """Forget a list of splits that no message will name again."""
        for host in self:
            host.forget_list(splits)


class _Nowhere:
    """The way to a worker whose host is lost."""

    def say(self, worker: int, message: m.Message) -> None: ...

    def fill(self, command: do.Fill, memfd: Memfd) -> None: ...

    def measure_rows(self, command: do.MeasureRows) -> None: ...

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None: ...

    def start_run(self, command: do.StartRun, spec: Spec) -> None: ...

    def forget_list(self, splits: int) -> None: ...

    def accepted(self, worker: int) -> None: ...

    def reject(self, worker: int, why: str) -> None: ...

    def retire(self, worker: int) -> None: ...

    def kill(self, worker: int) -> None: ...


_NOWHERE = _Nowhere()
