"""Sends messages to the worker processes of this host, and shows them memory: memfds and lists of splits.

Each process gets the file descriptor of a memfd or list once, before the first message that names it.
"""

from __future__ import annotations

import os

from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..shared_memory.arena import Memfd
from .supervisor import Supervisor


class LocalWorkers:
    """Sends to the workers of `supervisor`."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._lists: dict[int, tuple[int, int]] = {}
        """fd and size of each list of splits, by its number."""

    def say(self, worker: int, message: m.Message) -> None:
        """Send a message."""
        self._supervisor.send(worker, codec.encode(message))

    def keep_list(self, number: int, fd: int, nbytes: int) -> None:
        """Take over the fd of a list of splits, which has `nbytes` bytes."""
        self._lists[number] = fd, nbytes

    def has_list(self, number: int) -> bool:
        """Whether this list of splits is kept."""
        return number in self._lists

    def list_of(self, number: int) -> tuple[int, int]:
        """Return the fd and the size of a list of splits."""
        return self._lists[number]

    def forget_list(self, splits: int) -> None:
        """Forget a list of splits that no message will name again."""
        fd, _ = self._lists.pop(splits, (-1, 0))
        if fd >= 0:
            os.close(fd)
        self._forget(("splits", splits), m.ForgetSplits(splits))

    def forget_lists(self) -> None:
        """Forget all lists of splits."""
        for number in list(self._lists):
            self.forget_list(number)

    def forget_memfd(self, memfd: Memfd) -> None:
        """Tell workers that the memfd was returned to the system."""
        self._forget(("memfd", memfd.number), m.Unmap(memfd.number))

    def show_list(self, worker: int, splits: int) -> None:
        """Show a list of splits to a worker, unless `splits` is 0 (no list)."""
        if splits:
            fd, nbytes = self._lists[splits]
            self._show(worker, ("splits", splits), m.ShareSplits(splits, nbytes), fd)

    def show_memfd(self, worker: int, memfd: Memfd) -> None:
        """Show a memfd to a worker."""
        self._show(worker, ("memfd", memfd.number), m.Map(memfd.number, memfd.nbytes), memfd.fd)

    def _show(self, worker: int, what: tuple[str, int], message: m.Message, fd: int) -> None:
        shown = self._supervisor.workers[worker].shown
        if what not in shown:
            shown.add(what)
            self._supervisor.send(worker, codec.encode(message), fd)

    def _forget(self, what: tuple[str, int], message: m.Message) -> None:
        for number, worker in self._supervisor.workers.items():
            if what in worker.shown:
                worker.shown.discard(what)
                self.say(number, message)
