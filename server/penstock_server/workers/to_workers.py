"""The ways to all workers: those of this host, and those of joined hosts."""

from __future__ import annotations

from typing import Protocol

from penstock_proto import messages as m
from penstock_proto.spec import Spec

from ..coordinator.model import commands as do
from ..coordinator.model.workers import REMOTE
from ..shared_memory.arena import Memfd


class WayToWorkers(Protocol):
    """The way to the workers of one host: own_workers.py, and hosts/joined_host.py."""

    def say(self, worker: int, message: m.Message) -> None:
        """Send a message that names no memfd and no list."""

    def fill(self, command: do.Fill, memfd: Memfd) -> None:
        """Tell a worker to fill a turn, or a part of it, into `memfd`."""

    def measure_rows(self, command: do.MeasureRows) -> None:
        """Tell a worker to measure leftover rows."""

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None:
        """Tell a worker to write leftover rows into `memfd`."""

    def start_run(self, command: do.StartRun, spec: Spec) -> None:
        """Tell a worker to start a run of a feed with this spec."""

    def forget_list(self, splits: int) -> None:
        """Forget a list of splits that no message will name again."""

    def accepted(self, worker: int) -> None:
        """Note that the worker serves the same feeds as the others, and may get work."""

    def reject(self, worker: int, why: str) -> None:
        """End a worker that may get no work. Another one takes its place. `why` says what it did, for errors."""

    def retire(self, worker: int) -> None:
        """End a worker that has no work left."""

    def kill(self, worker: int) -> None:
        """Kill the worker's process. Unless the worker was retired, another one takes its place."""


class JoinedHosts(Protocol):
    """The joined hosts (hosts/host_table.py)."""

    def way(self, worker: int) -> WayToWorkers: ...

    def forget_list(self, splits: int) -> None: ...


class ToWorkers:
    """The ways to all workers.

    Args:
        own: the way to the workers of this host.
        hosts: the ways to those of joined hosts.
    """

    def __init__(self, own: WayToWorkers, hosts: JoinedHosts) -> None:
        self._own = own
        self._hosts = hosts

    def way(self, worker: int) -> WayToWorkers:
        """Return the way to a worker."""
        return self._own if worker < REMOTE else self._hosts.way(worker)

    def forget_list(self, splits: int) -> None:
        """Forget a list of splits that no message will name again."""
        self._own.forget_list(splits)
        self._hosts.forget_list(splits)
