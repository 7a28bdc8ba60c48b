"""Measures how long training steps wait for their batches, and why. No I/O, and no clock.

A step asks for a batch when it begins. It has waited if the batch was handed over later than that. Several steps may
run in one call (`steps_per_execution`), and only the beginning and the end of the call are known. We then assume that
all its steps take equally long apart from their waits. After the hand-over of a step's batch, that step and those after
it still have to run, which bounds how long a step takes. The tightest bound then gives the wait of each step, one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .._state.hand_overs import HandOver, HandOvers


@dataclass(slots=True)
class Waits:
    """Sums over training steps.

    Attributes:
        seconds: seconds that the steps took, including their waits.
        steps: the number of steps.
        ready: how many of the steps found their batch there when they asked.
        production: seconds that they waited while nothing of the batch had come: it was not made, or not sent.
        transfer: seconds that they waited while the batch was coming.
        handoff: seconds that they waited while the batch was there, until TensorFlow took it.
    """

    seconds: float = 0.0
    steps: int = 0
    ready: int = 0
    production: float = 0.0
    transfer: float = 0.0
    handoff: float = 0.0

    @property
    def waited(self) -> float:
        """Seconds that the steps waited."""
        return self.production + self.transfer + self.handoff

    @property
    def waiting(self) -> float:
        """The share of their time that the steps waited."""
        return min(1.0, self.waited / self.seconds) if self.seconds > 0 else 0.0

    def add(self, other: Waits) -> None:
        """Add the sums of other steps."""
        for name in ("seconds", "steps", "ready", "production", "transfer", "handoff"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class StepWaits:
    """Measures the steps of one phase: training, or validation.

    Attributes:
        sources: the streams that each step consumes a batch of.
        skip: how many calls to leave out. The first call of a training compiles the model before it asks.
        sums: the sums over the steps that were counted.
        fits: whether each step has consumed one batch of each stream, as far as can be seen.
    """

    sources: list[HandOvers] = field(default_factory=list)
    skip: int = 0
    sums: Waits = field(default_factory=Waits)
    fits: bool = True
    _asked: float | None = None
    _steps: int = 1
    _short: bool = False

    def asks(self, now: float, steps: int = 1) -> Waits | None:
        """Begin a call of `steps` steps. The call before has ended: return its sums, or None if it does not count."""
        before = self.end(now)
        self.fits = self.fits and not self._short
        self._asked, self._steps = now, steps
        return before

    def end(self, now: float) -> Waits | None:
        """End the call if it has not ended yet. Return its sums, or None if it does not count."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        each = [source.take(self._steps) for source in self.sources]
        fewest = min(map(len, each), default=0)
        self._short = fewest < self._steps and bool(each)  # as the last call of an epoch may be
        if self.skip:
            self.skip -= 1
            return None
        if not fewest:
            return None
        latest = [max(found, key=lambda one: one.handed) for found in zip(*each, strict=False)]
        sums = Waits(now - asked, fewest)
        for began, wait, one in spread(asked, now, latest):
            sums.ready += not wait
            whole = min(max(one.whole, began), began + wait)
            first = min(max(one.began, began), whole)
            sums.production += first - began
            sums.transfer += whole - first
            sums.handoff += began + wait - whole
        self.sums.add(sums)
        return sums

    def end_epoch(self) -> None:
        """End the epoch. A call that has not ended found no data."""
        self._asked, self._short = None, False


def spread(asked: float, ended: float, batches: Sequence[HandOver]) -> Iterator[tuple[float, float, HandOver]]:
    """Yield, for each step of a call, when it asked, how long it waited, and its batch."""
    steps = len(batches)
    work = (ended - asked) / steps
    for number, one in enumerate(batches):
        work = min(work, (ended - max(asked, one.handed)) / (steps - number))
    at, work = asked, max(0.0, work)
    for one in batches:
        wait = max(0.0, one.handed - at)
        yield at, wait, one
        at += wait + work
