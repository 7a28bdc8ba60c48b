"""Sends the coordinator's commands to the workers of this host, and to those of joined hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock_proto import messages as m
from penstock_proto.spec import Spec
from penstock_proto.transport import codec

from ..coordinator import wire
from ..coordinator.vocabulary import commands as do
from ..coordinator.vocabulary.workers import REMOTE
from ..shared_memory.arena import Memfd
from .local_workers import LocalWorkers
from .supervisor import Supervisor


class OtherHosts(Protocol):
    """Sends messages to workers of other hosts (hosts/host_table.py)."""

    def say(self, worker: int, message: m.Message) -> None: ...

    def fill(self, command: do.Fill, memfd: Memfd) -> None: ...

    def measure_rows(self, command: do.MeasureRows) -> None: ...

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None: ...

    def start_run(self, command: do.StartRun, spec: Spec) -> None: ...

    def forget_list(self, splits: int) -> None: ...

    def accepted(self, worker: int) -> None: ...

    def retire(self, worker: int) -> None: ...

    def kill(self, worker: int) -> None: ...


class ToWorkers:
    """Sends messages to the workers of `supervisor`, whose numbers at the start are `numbers`, and to those of
    `others`."""

    def __init__(self, supervisor: Supervisor, numbers: Iterable[int], others: OtherHosts) -> None:
        self._supervisor = supervisor
        self._here = LocalWorkers(supervisor, numbers)
        self._others = others
        self._last_list = 0
        self.list_of = self._here.list_of
        self.forget_memfd = self._here.forget_memfd

    def new_process(self, number: int) -> None:
        """Handle a worker's new process, which has no memfds and lists yet."""
        if number < REMOTE:
            self._here.new_process(number)

    def gone(self, number: int) -> None:
        """Handle a worker that has left: send it nothing more."""
        self._here.gone(number)

    def say(self, worker: int, message: m.Message) -> None:
        """Send a message that names no memfd and no list."""
        if worker < REMOTE:
            self._here.say(worker, message)
        else:
            self._others.say(worker, message)

    def fill(self, command: do.Fill, memfd: Memfd) -> None:
        """Tell a worker to fill a turn, or a part of it, into `memfd`."""
        if command.worker < REMOTE:
            self._here.show_memfd(command.worker, memfd)
            self._here.say(command.worker, wire.fill(command, memfd.number, memfd.nbytes))
        else:
            self._others.fill(command, memfd)

    def measure_rows(self, command: do.MeasureRows) -> None:
        """Tell a worker to measure leftover rows."""
        if command.worker < REMOTE:
            self._here.say(command.worker, wire.measure_rows(command))
        else:
            self._others.measure_rows(command)

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None:
        """Tell a worker to write leftover rows into `memfd`."""
        if command.worker < REMOTE:
            self._here.show_memfd(command.worker, memfd)
            self._here.say(command.worker, wire.write_rows(command, memfd.number, memfd.nbytes))
        else:
            self._others.write_rows(command, memfd)

    def pool_rows(self, command: do.PoolRows, memfd: Memfd, sources: Sequence[Memfd], spec: Spec) -> None:
        """Tell a worker of this host to copy rows of the visits in `sources` into `memfd`, for a feed with this
        spec."""
        for shown in (memfd, *sources):
            self._here.show_memfd(command.worker, shown)
        numbers = [source.number for source in sources]
        self._here.say(command.worker, wire.pool_rows(command, memfd.number, memfd.nbytes, numbers, spec))

    def start_run(self, command: do.StartRun, spec: Spec) -> None:
        """Tell a worker to start a run of a feed with this spec."""
        if command.worker < REMOTE:
            self._here.show_list(command.worker, command.splits)
            self._here.say(command.worker, wire.start_run(command, spec))
        else:
            self._others.start_run(command, spec)

    def compare(self, command: do.Compare) -> None:
        """Tell a worker of this host to make a feed's first sample again, and to compare it."""
        self._here.show_list(command.worker, command.splits)
        self._here.say(command.worker, wire.compare(command))

    def check(self, worker: int, check: m.SpotCheck) -> bool:
        """Tell a worker of this host to make samples again. Return False if their list of splits is forgotten."""
        if check.splits and not self._here.has_list(check.splits):
            return False
        self._here.show_list(worker, check.splits)
        self._here.say(worker, check)
        return True

    def accepted(self, worker: int) -> None:
        """Note that the worker serves the same feeds as the others, and may get work."""
        if worker < REMOTE:
            self._supervisor.ready(worker)
        else:
            self._others.accepted(worker)

    def retire(self, worker: int) -> None:
        """End a worker that has no work left."""
        if worker < REMOTE:
            self._here.gone(worker)
            self._supervisor.retire(worker, codec.encode(m.Shutdown()))
        else:
            self._others.retire(worker)

    def kill(self, worker: int) -> None:
        """Kill the worker's process. Unless the worker was retired, another one takes its place."""
        if worker < REMOTE:
            self._supervisor.kill(worker)
        else:
            self._others.kill(worker)

    def keep_list(self, fd: int, nbytes: int) -> int:
        """Take over the fd of a list of splits with this many bytes, and return its number."""
        self._last_list += 1
        self._here.keep_list(self._last_list, fd, nbytes)
        return self._last_list

    def forget_list(self, number: int) -> None:
        """Forget a list of splits that no message will name again."""
        self._here.forget_list(number)
        self._others.forget_list(number)
