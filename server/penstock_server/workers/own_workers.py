"""Sends the coordinator's commands to the worker processes of this host."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_proto import messages as m
from penstock_proto.spec import Spec
from penstock_proto.transport import codec

from ..coordinator import worker_messages
from ..coordinator.model import commands as do
from ..shared_memory.arena import Memfd
from ..worker_state.process_ends import ENDED
from .local_workers import LocalWorkers


class OwnWorkers(LocalWorkers):
    """The way to the daemon's own workers, which get all kinds of work. It implements to_workers.WayToWorkers."""

    _last_list = 0

    def keep_new_list(self, fd: int, nbytes: int) -> int:
        """Take over the fd of a list of splits with this many bytes, and return its number."""
        self._last_list += 1
        self.keep_list(self._last_list, fd, nbytes)
        return self._last_list

    def fill(self, command: do.Fill, memfd: Memfd) -> None:
        """Tell a worker to fill a turn, or a part of it, into `memfd`."""
        self.show_memfd(command.worker, memfd)
        self.say(command.worker, worker_messages.fill(command, memfd.number, memfd.nbytes))

    def measure_rows(self, command: do.MeasureRows) -> None:
        """Tell a worker to measure leftover rows."""
        self.say(command.worker, worker_messages.measure_rows(command))

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None:
        """Tell a worker to write leftover rows into `memfd`."""
        self.show_memfd(command.worker, memfd)
        self.say(command.worker, worker_messages.write_rows(command, memfd.number, memfd.nbytes))

    def pool_rows(self, command: do.PoolRows, memfd: Memfd, sources: Sequence[Memfd], spec: Spec) -> None:
        """Tell a worker to copy rows of the visits in `sources` into `memfd`, for a feed with this spec."""
        for shown in (memfd, *sources):
            self.show_memfd(command.worker, shown)
        numbers = [source.number for source in sources]
        self.say(command.worker, worker_messages.pool_rows(command, memfd.number, memfd.nbytes, numbers, spec))

    def transform_rows(self, command: do.TransformRows, memfd: Memfd, spec: Spec) -> None:
        """Tell a worker to transform the merged batch in `memfd`, of a feed with this spec."""
        self.show_memfd(command.worker, memfd)
        self.say(command.worker, worker_messages.transform_rows(command, memfd.number, memfd.nbytes, spec))

    def start_run(self, command: do.StartRun, spec: Spec) -> None:
        """Tell a worker to start a run of a feed with this spec."""
        self.show_list(command.worker, command.splits)
        self.say(command.worker, worker_messages.start_run(command, spec))

    def compare(self, command: do.Compare) -> None:
        """Tell a worker to make a feed's first sample again, and to compare it."""
        self.show_list(command.worker, command.splits)
        self.say(command.worker, worker_messages.compare(command))

    def check(self, worker: int, check: m.SpotCheck) -> bool:
        """Tell a worker to make samples again. Return False if their list of splits is forgotten."""
        if check.splits and not self.has_list(check.splits):
            return False
        self.show_list(worker, check.splits)
        self.say(worker, check)
        return True

    def accepted(self, worker: int) -> None:
        """Note that the worker serves the same feeds as the others, and may get work."""
        self._supervisor.ready(worker)

    def reject(self, worker: int, why: str) -> None:
        """End a worker that may get no work. Another one takes its place."""
        self._supervisor.kill(worker, why)

    def retire(self, worker: int) -> None:
        """End a worker that has no work left."""
        self._supervisor.retire(worker, codec.encode(m.Shutdown()))

    def kill(self, worker: int) -> None:
        """Kill the worker's process. Another one takes its place."""
        self._supervisor.kill(worker, ENDED)
