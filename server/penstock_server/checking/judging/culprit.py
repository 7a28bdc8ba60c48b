"""Finds out by experiments why samples of a place differ from run to run.

An experiment is two runs in separate processes, which read the place and nothing before it. The first experiment
changes nothing. If its runs agree, the samples depend on what was read before, or on the order of sets. If they differ,
some source of values differs. The runs have noted which sources user code uses. The next experiments fix one of the
likeliest sources at a time, so that it gives the same values in both runs. If the runs then agree, that source is the
culprit. Otherwise all sources are fixed except one, each in turn: if the runs then differ, that source is one of
several culprits.

Threads and processes that user code starts run in no fixed order, so two runs may agree by chance, or differ. So where
there are any, runs agree or differ only if they do so every time.

This file decides what to try, and what the results mean. It starts no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..observing.messages import Done, Source
from ..observing.recording import Recording
from ..observing.sources import AT_IMPORT

HASH, BEFORE, SOURCES, UNKNOWN = "hash", "before", "sources", "unknown"

MOST_LIKELY = 2
"""Sources that are fixed one at a time, at most."""

MOST_SOURCES = 6
"""Sources that are left unfixed one at a time, at most."""

OFTEN = 4
"""How often an experiment is done until its runs count as agreeing, or as different, if user code starts threads or
processes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The conditions of an experiment.

    Attributes:
        fixes: sources that are made to give the same values in both runs.
        hash_seeds: PYTHONHASHSEED of each run.
    """

    fixes: tuple[Source, ...] = ()
    hash_seeds: tuple[str, str] = ("0", "0")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an experiment: whether its two runs agree, and the report of each (None if it sent none)."""

    agree: bool
    runs: tuple[Done | None, Done | None]


@dataclass(frozen=True, slots=True)
class Culprit:
    """Why samples differ.

    Attributes:
        kind: HASH (the order of a set of text), BEFORE (earlier reads), SOURCES, or UNKNOWN.
        sources: the culprits if `kind` is SOURCES; if it is UNKNOWN, sources that are not the only cause.
        proven: whether an experiment has shown each of the sources to be a cause.
        names: if `kind` is BEFORE, names in user modules that change while samples are made.
        at_once: lines that start threads or processes, if `kind` is BEFORE or UNKNOWN.
        late: libraries that were imported while samples were made, if `kind` is BEFORE.
        items: whether the feed is an indexable object, whose items get no `rng`.
        batches: whether samples agree, and what `batch_transform=` makes of them differs.
    """

    kind: str
    sources: tuple[Source, ...] = ()
    proven: bool = True
    names: tuple[str, ...] = ()
    at_once: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    items: bool = False
    batches: bool = False


_OTHER_HASH = Trial(hash_seeds=("0", "1"))

Try = Callable[[Trial], Result | None]
"""Does an experiment; returns None if that fails or no time is left."""


def find(attempt: Try, *, takes_rng: bool) -> Culprit:
    """Return why samples differ.

    Args:
        attempt: does an experiment.
        takes_rng: whether user code takes `rng`, so that Penstock does not seed the global random generators.
    """
    first = attempt(Trial())
    if first is None:
        return Culprit(UNKNOWN)
    at_once = _at_once(first)
    if not at_once:
        return _found(attempt, first, takes_rng)
    often = _often(attempt)
    found = Culprit(UNKNOWN, proven=False)
    if not first.agree or (first := often(Trial())) is not None:
        found = _found(often, first, takes_rng)
    if found.kind in (HASH, SOURCES):
        if _differ_each_time(attempt, Trial() if found.kind == SOURCES else _OTHER_HASH):
            return found
        found = Culprit(UNKNOWN, proven=False)
    return replace(found, at_once=at_once)


def _differ_each_time(attempt: Try, trial: Trial) -> bool:
    """Do an experiment `OFTEN` times; return whether its runs differ each time."""
    for _ in range(OFTEN):
        result = attempt(trial)
        if result is None or result.agree:
            return False
    return True


def _often(attempt: Try) -> Try:
    """Return a function that does an experiment `OFTEN` times, or until its runs differ."""

    def often(trial: Trial) -> Result | None:
        result = None
        for _ in range(OFTEN):
            result = attempt(trial)
            if result is None or not result.agree:
                break
        return result

    return often


def _found(attempt: Try, first: Result, takes_rng: bool) -> Culprit:
    """Return why samples differ, after the first experiment."""
    if first.agree:
        return _not_alone(attempt, first)
    used = _used(first, takes_rng)
    for source in used[:MOST_LIKELY]:
        alone = attempt(Trial((source,)))
        if alone is not None and alone.agree:
            return Culprit(SOURCES, (source,))
    fixed = attempt(Trial(tuple(used))) if used else None
    if fixed is None:
        return Culprit(UNKNOWN, proven=False)
    if not fixed.agree:
        return Culprit(UNKNOWN, tuple(used[:MOST_SOURCES]), proven=False)
    return _one_by_one(attempt, used)


def _not_alone(attempt: Try, first: Result) -> Culprit:
    other = attempt(_OTHER_HASH)
    if other is not None and not other.agree:
        return Culprit(HASH)
    done = first.runs[0]
    if done is None:
        return Culprit(BEFORE)
    return Culprit(BEFORE, names=done.changed, late=tuple(library.name for library in done.late))


def _one_by_one(attempt: Try, used: list[Source]) -> Culprit:
    guilty = []
    for source in used[:MOST_SOURCES]:
        result = attempt(Trial(tuple(other for other in used if other != source)))
        if result is None:
            break
        if not result.agree:
            guilty.append(source)
    if guilty:
        return Culprit(SOURCES, tuple(guilty))
    return Culprit(SOURCES, tuple(used[:MOST_SOURCES]), proven=False)


def _used(result: Result, takes_rng: bool) -> list[Source]:
    """Return the sources that either run has used, the likeliest culprits first."""
    found: dict[Source, None] = {}
    for done in result.runs:
        for source in () if done is None else done.used:
            found[source] = None
    kept = [source for source in found if source.kind not in _AT_ONCE and (takes_rng or source.kind not in _GLOBAL)]
    return sorted(kept, key=_unlikely)


_AT_ONCE: Collection[str] = ("thread", "fork")
_GLOBAL: Collection[str] = ("random", "numpy.random", "torch")


def _unlikely(source: Source) -> int:
    """Return a sort key for a source: the smaller, the likelier it is a culprit."""
    if source.kind == "system":
        return 0 if source.site else 3
    return {"clock": 4, "pid": 5}.get(source.kind, 1 if source.kind in _GLOBAL else 2)


def _at_once(result: Result) -> tuple[str, ...]:
    """Return the lines that start threads or processes in either run, or the libraries that do so on their own."""
    found: dict[str, None] = {}
    for done in result.runs:
        for source in () if done is None else done.used:
            if source.kind in _AT_ONCE and (source.site or source.library != AT_IMPORT):
                found[source.site or source.library] = None
    return tuple(found)


def agree(one: Recording | None, other: Recording | None) -> bool:
    """Return whether two runs of an experiment have read the same samples, at least one."""
    if one is None or other is None or not one.samples:
        return False
    return one.digests == other.digests and one.ended == other.ended
