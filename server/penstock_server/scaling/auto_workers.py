"""Decides from measured figures how many workers a daemon should have (`serve --workers auto`), or how many hosts with
a fixed number of workers each (`serve --on ray --hosts MIN:MAX`). No I/O.

Workers are added while a trainer waits for them and they are always busy, provided that CPUs are free or workers wait
for something other than a CPU. They are removed when, for a minute, fewer could do the same with room to spare. Only
useful counts are tried: of 16 lanes, 8 workers make 2 each, and with 9 workers one would still make 2.

A step is judged when the new workers have got their lanes, which may take until a split has ended. If a trainer still
waits, and batches come hardly faster, the step is taken back. A step that was taken back, or had to be repeated,
doubles the waiting time before the next step of that kind. So under a steady load the number settles. Under a load that
comes and goes, it stays at the number that the load needs at its peaks.

Hosts are counted by their workers, which come and go in steps of a host. They bring CPUs, so idle CPUs do not matter.
It may take minutes until a requested host has joined. Until then no step is judged, and no further hosts are requested.
If no trainer waits any longer, the request is withdrawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from penstock_proto.status.figures import Figures, percent
from penstock_proto.status.span import Key
from penstock_proto.status.verdict import BUSY, WAITS, verdict

LOOKED = 5.0
"""Least seconds of measurement before a decision. The time before `AutoWorkers.since` does not count."""

CALM = 60.0
"""Seconds for which fewer workers must suffice before some are removed, and for which a count that did not help is not
tried again. Each of the two doubles when it was too short, up to LONGEST_CALM."""

LONGEST_CALM = 3600.0

_SETTLE = 2.0
"""Seconds after a change that the measurement leaves out."""

_ROOM = 0.6
"""Largest busy share of the remaining workers for which some are removed."""

_GAIN = 0.25
"""Least share of the possible gain that a step must bring. (From 2 to 4 workers the possible gain is 100 %.)"""

PER_CPU = 4
"""Most workers for each CPU, however little of it they use."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers from now on, and the reason."""

    workers: int
    why: str


@dataclass(frozen=True, slots=True)
class _Trial:
    """A step that added workers, and the state before it."""

    streams: frozenset[Key]
    rate: float
    before: int
    after: int


class AutoWorkers:
    """The rule, with what it has seen in the last seconds.

    Args:
        cpus: CPUs of this host that the daemon may use; None if workers bring CPUs, as those of hosts do.
        step: workers that come or go together, such as those of a host.
        least: fewest workers.
        most: most workers; None: four for each CPU.

    Attributes:
        since: the earliest start of the next figures. They must not contain a change of the number.
    """

    def __init__(self, cpus: int | None, *, step: int = 1, least: int = 1, most: int | None = None) -> None:
        self.since = 0.0
        self._brings_cpus = cpus is None
        self._step = step
        self._least = least
        self._most = max(1, PER_CPU * (cpus or 1)) if most is None else most
        self._trial: _Trial | None = None
        self._no_more = self._most  # the most workers until `_no_more_until`
        self._no_more_until = 0.0
        self._no_more_for = CALM
        self._calm_since: float | None = None
        self._calm = CALM
        self._removed_at = -math.inf

    @staticmethod
    def first(cpus: int) -> int:
        """Return the number of workers to begin with."""
        return min(2, cpus)

    def changed(self, now: float) -> None:
        """Note that the number of workers was changed."""
        self.since = now + _SETTLE
        self._calm_since = None

    def limit(self, workers: int) -> None:
        """Note that the daemon cannot have more than `workers` workers."""
        self._most = workers

    def decide(self, now: float, workers: int, seen: Mapping[Key, Figures], coming: int = 0) -> Decision | None:
        """Return how many workers there should be, or None for no change.

        Args:
            now: seconds on any monotonic clock.
            workers: how many of the counted workers make batches.
            seen: the figures of each stream that was read, measured from `since` or later, over LOOKED seconds or more.
                All workers have run for that time.
            coming: how many further workers were requested and are not there yet.
        """
        if not seen:
            self._calm_since = None
            return None
        wanting = [figures for figures in seen.values() if figures.waiting >= WAITS]
        if coming:
            return self._wait_for(now, workers, coming, waits=bool(wanting))
        trial, self._trial = self._trial, None
        if trial is not None and trial.after == workers and trial.streams == seen.keys():
            if wanting and not _all_work(wanting[0]):
                self._trial = trial
                return None
            back = self._taken_back(now, trial, seen, waits=bool(wanting))
            if back is not None:
                return back
        if wanting:
            self._calm_since = None
            return self._more(now, workers, seen, wanting)
        return self._fewer(now, workers, seen)

    def _wait_for(self, now: float, workers: int, coming: int, *, waits: bool) -> Decision | None:
        """Go on waiting for requested workers while a trainer waits for them. Otherwise withdraw the request."""
        target = max(workers, self._least)
        calm = self._calm_for(now, calm=not waits and target < workers + coming)
        if calm is None:
            return None
        self._removed_at = now
        return Decision(target, f"no trainer has waited for {calm:.0f} s, and {coming} workers have not come yet")

    def _calm_for(self, now: float, *, calm: bool) -> float | None:
        """Return for how many seconds there has been `calm`, if that is long enough."""
        if not calm:
            self._calm_since = None
            return None
        if self._calm_since is None:
            self._calm_since = now
        return now - self._calm_since if now - self._calm_since >= self._calm else None

    def _taken_back(self, now: float, trial: _Trial, seen: Mapping[Key, Figures], *, waits: bool) -> Decision | None:
        """Judge the last step, and take it back if it did not help. `waits`: whether a trainer still waits."""
        gain, possible = _rate(seen) / max(trial.rate, 1e-9) - 1, trial.after / trial.before - 1
        if gain >= _GAIN * possible or not waits:
            self._no_more_for = CALM
            return None
        self._no_more, self._no_more_until = trial.before, now + self._no_more_for
        self._no_more_for = min(2 * self._no_more_for, LONGEST_CALM)
        came = f"come only {percent(gain)} faster" if gain >= 0.005 else "come no faster"
        return Decision(trial.before, f"with {trial.after} workers batches {came} than with {trial.before}")

    def _more(
        self,
        now: float,
        workers: int,
        seen: Mapping[Key, Figures],
        wanting: list[Figures],
    ) -> Decision | None:
        most = min(self._most, self._no_more) if now < self._no_more_until else self._most
        for figures in wanting:
            found = verdict(figures)
            if found.limit not in ("generator", "collating") and not (self._brings_cpus and found.limit == "cpus"):
                continue
            here = len(figures.workers)  # including those that are not counted
            counts = _useful(figures.lanes, here + self._most, self._step, here - workers)
            wanted = min(2.0, 1 / max(0.01, 1 - figures.waiting)) * _at_work(figures.lanes, here)
            limit = here + most - workers
            if not self._brings_cpus:
                limit = min(limit, _fitting(figures))
            fitting = [count for count in counts if here < count <= limit]
            if fitting:
                target = next((count for count in fitting if _at_work(figures.lanes, count) >= wanted), fitting[-1])
                if now - self._removed_at < 10 * self._calm:
                    self._calm = min(2 * self._calm, LONGEST_CALM)
                    self._removed_at = -math.inf
                after = workers + target - here
                self._trial = _Trial(frozenset(seen), _rate(seen), workers, after)
                return Decision(after, _why(figures))
        return None

    def _fewer(self, now: float, workers: int, seen: Mapping[Key, Figures]) -> Decision | None:
        figures = next(iter(seen.values()))
        here, busy = len(figures.workers), sum(worker.busy for worker in figures.workers)
        counts = {count for one in seen.values() for count in _useful(one.lanes, here, self._step, here - workers)}
        least = here - workers + self._least
        target = max((count for count in counts if least <= count < here), default=here)
        calm = self._calm_for(now, calm=target < here and busy <= _ROOM * target)
        if calm is None:
            return None
        self._removed_at = now
        return Decision(
            workers + target - here,
            f"no trainer has waited for {calm:.0f} s, and workers are busy {percent(busy / here)}",
        )


def _why(figures: Figures) -> str:
    busy = sum(worker.busy for worker in figures.workers) / len(figures.workers)
    return f"the trainer waits {percent(figures.waiting)} of the time, and workers are busy {percent(busy)}"


def _all_work(figures: Figures) -> bool:
    return sum(worker.busy for worker in figures.workers) >= BUSY * figures.usable


def _rate(seen: Mapping[Key, Figures]) -> float:
    return sum(figures.rate for figures in seen.values())


def _fitting(figures: Figures) -> int:
    """Return how many workers the CPUs have room for, if each uses as much as now. Workers that mostly wait for
    something else always have room."""
    if figures.waits_for_io:
        return len(figures.workers) + PER_CPU * figures.cpus
    each = sum(worker.cpu + worker.cpu_wait for worker in figures.workers) / len(figures.workers)
    free = 0.0 if figures.machine is None else figures.machine.free
    return len(figures.workers) + max(0, math.ceil(free / max(each, 0.01) - 0.5))


def _at_work(lanes: int | None, workers: int) -> float:
    """Return how many workers work at once, on average, given that each makes whole lanes."""
    return workers if lanes is None else lanes / -(-lanes // workers)


def _useful(lanes: int | None, most: int, step: int = 1, others: int = 0) -> list[int]:
    """Return the counts up to `most` with which the busiest worker has fewer lanes than with one step less.

    If any number of workers can work at once, return 1, 2, 3, 4, 6, 8, 12, 16 steps and so on. All counts include the
    `others`.
    """
    counts = [count for count in range(others + step, most + 1, step) if count > 0]
    if lanes is None:
        powers = range(most.bit_length())
        steps = {2**power for power in powers} | {3 * 2**power for power in powers}
        return [count for count in counts if count // step in steps]
    return [count for count in counts if count == step or -(-lanes // count) < -(-lanes // max(1, count - step))]
