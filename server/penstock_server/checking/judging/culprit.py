"""Finds out by experiments why samples of a place differ from run to run.

An experiment is two runs in separate processes, which read the place and nothing before it. The first experiment
changes nothing. If its runs agree, the samples depend on what was read before, or on the order of sets. If they differ,
some source of values differs. The runs have noted which sources user code uses. The next experiments fix one of the
likeliest sources at a time, so that it gives the same values in both runs. If the runs then agree, that source is the
culprit. Otherwise all sources are fixed except one, each in turn: if the runs then differ, that source is one of
several culprits.

This file decides what to try, and what the results mean. It starts no processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..observing.messages import Done, Source
from ..observing.recording import Recording

HASH, BEFORE, SOURCES, UNKNOWN = "hash", "before", "sources", "unknown"

MOST_LIKELY = 2
"""Sources that are fixed one at a time, at most."""

MOST_SOURCES = 6
"""Sources that are left unfixed one at a time, at most."""


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
        names: if `kind` is BEFORE, names in user modules that change while samples are made; if it is UNKNOWN, lines
            that start threads or processes.
        late: libraries that were imported while samples were made, if `kind` is BEFORE.
        items: whether the feed is an indexable object, whose items get no `rng`.
        batches: whether samples agree, and what `batch_transform=` makes of them differs.
    """

    kind: str
    sources: tuple[Source, ...] = ()
    proven: bool = True
    names: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    items: bool = False
    batches: bool = False


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
    if first.agree:
        return _not_alone(attempt, first)
    used = _used(first, takes_rng)
    for source in used[:MOST_LIKELY]:
        alone = attempt(Trial((source,)))
        if alone is not None and alone.agree:
            return Culprit(SOURCES, (source,))
    fixed = attempt(Trial(tuple(used))) if used else None
    if fixed is None or not fixed.agree:
        return _unknown(first, used)
    return _one_by_one(attempt, used)


def _not_alone(attempt: Try, first: Result) -> Culprit:
    other = attempt(Trial(hash_seeds=("0", "1")))
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


def _unknown(result: Result, used: list[Source]) -> Culprit:
    at_once: dict[str, None] = {}
    for done in result.runs:
        for source in () if done is None else done.used:
            if source.kind in _AT_ONCE and source.site:
                at_once[source.site] = None
    return Culprit(UNKNOWN, tuple(used[:MOST_SOURCES]), False, names=tuple(at_once))


def agree(one: Recording | None, other: Recording | None) -> bool:
    """Return whether two runs of an experiment have read the same samples, at least one."""
    if one is None or other is None or not one.samples:
        return False
    return one.digests == other.digests and one.ended == other.ended
