"""Decides which job a worker does next: streams share its time, and within a stream the oldest ticket comes first.

The batches of a stripe's jobs alternate in the stream, so the job comes first whose next batch does. To change the job
after each quick batch would only cost time, so this is looked at when the stream's time is up.

This file knows nothing of messages or clocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")

SLICE_SECONDS = 0.020


@dataclass(eq=False)
class Job(Generic[R]):
    """A piece of work for a run.

    Attributes:
        run: the run that it belongs to.
        ticket: the ticket, for the answer.
        steps: does the work, one step at a time.
        fills: whether it makes batches; otherwise it writes leftover rows.
        reported: batches reported so far.
        stripe: the ticket of the slot that it shares with other jobs; 0 if it has a slot of its own.
        place: for a job of a stripe, the place of its next batch.
    """

    run: R
    ticket: int
    fills: bool
    steps: Iterator[None] = field(init=False)
    reported: int = 0
    stripe: int = 0
    place: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Jobs that fill slots are done in this order."""
        return self.stripe or self.ticket, self.place


class Scheduler(Generic[R]):
    """The jobs that wait, by stream.

    Args:
        stream: returns the stream of a run.
        waits: returns whether a run waits for something, so that its jobs cannot be done now.
    """

    def __init__(self, stream: Callable[[R], int], waits: Callable[[R], bool]) -> None:
        self._stream = stream
        self._waits = waits
        self._jobs: dict[int, deque[Job[R]]] = {}  # by stream; the first one is next
        self._current: int | None = None
        self._since = 0.0

    def add(self, job: Job[R], *, first: bool = False) -> None:
        """Add a job before those of its stream that fill younger tickets, or before all of them if `first`."""
        jobs = self._jobs.setdefault(self._stream(job.run), deque())
        place = 0 if first else len(jobs)
        while place and jobs[place - 1].fills and jobs[place - 1].order > job.order:
            place -= 1
        jobs.insert(place, job)

    def next(self, is_urgent: Callable[[R], bool] | None = None) -> Job[R] | None:
        """Return the job to continue with. Pass over the jobs of a waiting run, which keep their places. `is_urgent`
        says which runs come first in their stream."""
        for jobs in self._jobs.values():
            if is_urgent is None and not self._waits(jobs[0].run):
                return jobs[0]
            ready = self._ready(jobs)
            first = next(ready, None)
            if first is not None:
                if is_urgent is None or is_urgent(first.run):
                    return first
                return next((job for job in ready if is_urgent(job.run)), first)
        return None

    def _ready(self, jobs: Iterable[Job[R]]) -> Iterator[Job[R]]:
        """Yield the jobs whose runs do not wait. If a job is passed over, so are the later ones of its run, even if it
        waits no longer then: a run makes its batches in order."""
        waiting: list[R] = []
        for job in jobs:
            if any(job.run is run for run in waiting):
                continue
            if self._waits(job.run):
                waiting.append(job.run)
            else:
                yield job

    def on_step(self, job: Job[R], began: float, now: float) -> None:
        """Note that a step of the job was done from `began` until `now`. A stream that has used up its time goes
        last."""
        stream = self._stream(job.run)
        if self._current != stream:
            self._current, self._since = stream, began
        if now - self._since >= SLICE_SECONDS:
            self._current = None
            if stream in self._jobs:
                self._jobs[stream] = self._jobs.pop(stream)
                if job.stripe and job in self._jobs[stream]:
                    self._jobs[stream].remove(job)
                    self.add(job)

    def done(self, job: Job[R]) -> None:
        """Remove a job that is done. (If its run was dropped meanwhile, it is already gone.)"""
        self._remove(job.run, lambda other: other is job)

    def drop(self, run: R) -> list[Job[R]]:
        """Remove the jobs of a run, and return them in order."""
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
