"""What a worker does next: streams take turns, and each has its jobs done one after another, in the order asked for.

A stream keeps the worker for `SLICE_SECONDS` at a time (or for one step of a job, if that takes longer), so one that
reads a split from far back, or whose samples take long, does not hold up the others. Within a stream the oldest job
comes first: it is what the consumer waits for.

This file knows no message and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")

SLICE_SECONDS = 0.020


@dataclass(eq=False)
class Job(Generic[R]):
    """A piece of work for a run.

    Attributes:
        run: what it is for.
        ticket: its number, for the answer.
        steps: does it, step by step.
        fills: whether batches are to be made; otherwise leftover rows are to be written.
        reported: how many batches were reported.
    """

    run: R
    ticket: int
    fills: bool
    steps: Iterator[None] = field(init=False)
    reported: int = 0


class Scheduler(Generic[R]):
    """The jobs that are to be done.

    Args:
        stream: the stream of a run.
        waits: whether a run waits for something, so that its jobs cannot be done now.
    """

    def __init__(self, stream: Callable[[R], int], waits: Callable[[R], bool]) -> None:
        self._stream = stream
        self._waits = waits
        self._jobs: dict[int, deque[Job[R]]] = {}  # by stream, the one whose turn it is first
        self._current: int | None = None
        self._since = 0.0

    def add(self, job: Job[R], *, first: bool = False) -> None:
        """One more job, behind those of its stream or before them."""
        jobs = self._jobs.setdefault(self._stream(job.run), deque())
        if first:
            jobs.appendleft(job)
        else:
            jobs.append(job)

    def next(self) -> Job[R] | None:
        """The job that is to be gone on with. A run that waits keeps its order and lets others by."""
        return next((job for jobs in self._jobs.values() for job in jobs if not self._waits(job.run)), None)

    def stepped(self, job: Job[R], began: float, now: float) -> None:
        """A step of the job was done, from `began` until `now`. A stream that has had its time lets others by."""
        stream = self._stream(job.run)
        if self._current != stream:
            self._current, self._since = stream, began
        if now - self._since >= SLICE_SECONDS:
            self._current = None
            if stream in self._jobs:
                self._jobs[stream] = self._jobs.pop(stream)

    def done(self, job: Job[R]) -> None:
        """The job is done. (If its run was dropped meanwhile, it is not here any longer.)"""
        self._remove(job.run, lambda other: other is job)

    def drop(self, run: R) -> list[Job[R]]:
        """Take away the jobs of a run, and return them in order."""
        return self._remove(run, lambda job: job.run is run)

    def _remove(self, run: R, which: Callable[[Job[R]], bool]) -> list[Job[R]]:
        stream = self._stream(run)
        jobs = self._jobs.get(stream, deque())
        removed = [job for job in jobs if which(job)]
        for job in removed:
            jobs.remove(job)
        if not jobs:
            self._jobs.pop(stream, None)
        return removed
