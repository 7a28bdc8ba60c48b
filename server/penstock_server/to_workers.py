"""Sends messages to workers.

A worker's process is sent the file descriptor of a memfd or a list of splits once, before the first message that names
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from penstock_proto import codec
from penstock_proto import messages as m
from penstock_proto.spec import Spec

from . import wire
from .coordinator import commands as do
from .host.arena import Memfd
from .host.supervisor import Supervisor


class ToWorkers:
    """Speaks to the workers of `supervisor`, which have these numbers at first."""

    def __init__(self, supervisor: Supervisor, numbers: Iterable[int]) -> None:
        self._supervisor = supervisor
        self._shown: dict[int, set[tuple[str, int]]] = {number: set() for number in numbers}
        """Memfds and lists of splits that each worker has been shown."""
        self._lists: dict[int, tuple[int, int]] = {}
        """fd and size of each list of splits, by its number."""
        self._last_list = 0

    def new_process(self, number: int) -> None:
        """The worker has a new process, which has been shown nothing."""
        self._shown[number] = set()

    def gone(self, number: int) -> None:
        """The worker has left: nothing more is sent to it."""
        self._shown.pop(number, None)

    def say(self, worker: int, message: m.Message) -> None:
        """Send a message that names no memfd and no list."""
        self._supervisor.send(worker, codec.encode(message))

    def fill(self, command: do.Fill, memfd: Memfd) -> None:
        """Have a turn, or a part of it, filled into `memfd`."""
        self._show_memfd(command.worker, memfd)
        self.say(command.worker, wire.fill(command, memfd.number, memfd.nbytes))

    def measure_rows(self, command: do.MeasureRows) -> None:
        """Have leftover rows measured."""
        self.say(command.worker, wire.measure_rows(command))

    def write_rows(self, command: do.WriteRows, memfd: Memfd) -> None:
        """Have leftover rows written into `memfd`."""
        self._show_memfd(command.worker, memfd)
        self.say(command.worker, wire.write_rows(command, memfd.number, memfd.nbytes))

    def pool_rows(self, command: do.PoolRows, memfd: Memfd, sources: Sequence[Memfd], spec: Spec) -> None:
        """Have rows of the visits in `sources` copied into `memfd`, of a feed with this spec."""
        for shown in (memfd, *sources):
            self._show_memfd(command.worker, shown)
        numbers = [source.number for source in sources]
        self.say(command.worker, wire.pool_rows(command, memfd.number, memfd.nbytes, numbers, spec))

    def start_run(self, command: do.StartRun, spec: Spec) -> None:
        """Have a run opened, of a feed with this spec."""
        self._show_list(command.worker, command.splits)
        self.say(command.worker, wire.start_run(command, spec))

    def compare(self, command: do.Compare) -> None:
        """Have a feed's first sample made again."""
        self._show_list(command.worker, command.splits)
        compare = m.Compare(
            run=command.run,
            feed=command.feed,
            splits=command.splits,
            index=command.index,
            digests=command.digests,
        )
        self.say(command.worker, compare)

    def keep_list(self, fd: int, nbytes: int) -> int:
        """Take over the fd of a list of splits with this many bytes, and return its number."""
        self._last_list += 1
        self._lists[self._last_list] = fd, nbytes
        return self._last_list

    def forget_list(self, number: int) -> None:
        """Forget a list of splits that no message will name again."""
        fd, _ = self._lists.pop(number, (-1, 0))
        if fd >= 0:
            os.close(fd)
        self._forget(("splits", number), m.ForgetSplits(number))

    def forget_memfd(self, memfd: Memfd) -> None:
        """The memfd was given back to the system."""
        self._forget(("memfd", memfd.number), m.Unmap(memfd.number))

    def _show_list(self, worker: int, splits: int) -> None:
        if splits:
            fd, nbytes = self._lists[splits]
            self._show(worker, ("splits", splits), m.ShareSplits(splits, nbytes), fd)

    def _show_memfd(self, worker: int, memfd: Memfd) -> None:
        self._show(worker, ("memfd", memfd.number), m.Map(memfd.number, memfd.nbytes), memfd.fd)

    def _show(self, worker: int, what: tuple[str, int], message: m.Message, fd: int) -> None:
        if what not in self._shown[worker]:
            self._shown[worker].add(what)
            self._supervisor.send(worker, codec.encode(message), fd)

    def _forget(self, what: tuple[str, int], message: m.Message) -> None:
        for worker, shown in self._shown.items():
            if what in shown:
                shown.discard(what)
                self.say(worker, message)
