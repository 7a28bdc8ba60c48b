"""The workers of this host that are profiled: which there are, until when they go on, and their samples."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable

from .folding import Folding
from .profile import Sampled
from .worker import WatchedWorker

RATE = 100
"""Samples a second, of each worker."""

MOST_SAMPLES = 1_000_000
"""Samples of a profile: longer ones, and those of many workers, have fewer in a second."""


def rate_of(seconds: float, workers: int) -> float:
    """Return how often each worker is sampled in a second, in a profile of these seconds and workers."""
    return min(RATE, MOST_SAMPLES / (max(1.0, seconds) * max(1, workers)))


class SampledWorkers:
    """Finds the workers and reads their samples, until they are told to stop.

    Attributes:
        records: those of all processes so far; the owner may take some away.
    """

    def __init__(self) -> None:
        self.records: list[Sampled] = []
        self._folding = Folding()
        self._watched: dict[int, WatchedWorker] = {}
        self._ends = select.poll()

    def __len__(self) -> int:
        return len(self._watched)

    def found(self, workers: Iterable[tuple[int, int, int]]) -> None:
        """There are these workers: their numbers, their processes, and fds of their stacks files, which are taken
        over."""
        for number, pid, fd in workers:
            if pid in self._watched:
                os.close(fd)
            elif (worker := WatchedWorker.of(number, pid, fd, self._folding)) is not None:
                self.records.append(worker.record)
                self._watched[pid] = worker
                self._ends.register(worker.pidfd, select.POLLIN)

    def read(self) -> bool:
        """Read the new samples. Return whether a process has ended."""
        ended = {fd for fd, _ in self._ends.poll(0)}
        for worker in self._watched.values():
            worker.read()
        for worker in [worker for worker in self._watched.values() if worker.pidfd in ended]:
            self._ends.unregister(worker.pidfd)
            worker.record.ended = True
            del self._watched[worker.record.pid]
            worker.close()
        return bool(ended)

    def go_on(self, now: float, until: float, rate: float) -> None:
        """Have them sample their stacks `rate` times a second, until `until` or until this is no longer called."""
        for worker in self._watched.values():
            worker.go_on(now, until, rate)

    def close(self) -> None:
        """Release their files. They end by themselves."""
        for worker in self._watched.values():
            worker.close()
        self._watched.clear()
