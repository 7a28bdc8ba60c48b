"""The verdict of `penstock bench`: what limits a feed, and whether the slices of the measurement agree on it.

`bench.py` measures; this module decides, without I/O.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock_proto.status.figures import Figures, count, joined, percent
from penstock_proto.status.verdict import NAMES, is_busy_with_others, verdict

STOLEN = 0.05
"""The report mentions CPU time that a hypervisor gives to other hosts if it is at least this share of the CPUs."""

FEWEST = 4
"""Fewest slices for a sure verdict."""

SURE = 0.9
"""A verdict is sure if at least this share of the resamples agrees with it."""

RESAMPLES = 400

LONG = 60.0
"""Seconds after which a longer measurement would not help: the feed is on the border between two limits."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on a feed.

    Attributes:
        limit: the likeliest limit, as `verdict` names it.
        sure: whether the slices agree on it.
        shares: for each limit, the share of the resamples that name it.
        text: some sentences; with advice only if the verdict is sure.
    """

    limit: str
    sure: bool
    shares: dict[str, float]
    text: str


def judged(seen: Figures) -> Judgement:
    """Return what limits the speed, and whether the measurement supports that.

    On a busy machine, or if the splits of a feed differ, the verdict changes from moment to moment. So the time is
    measured in slices, and many resamples of the slices (as many slices, drawn with replacement) get a verdict each.
    The share that agrees shows how much the verdict depends on the moment. This is the bootstrap of Efron and
    Tibshirani (An Introduction to the Bootstrap, 1993, chapter 6). The unit drawn is a slice, because moments close to
    each other are alike (Künsch, 1989, does the same with blocks of a series). A verdict is sure if `SURE` of the
    resamples agree.
    """
    likeliest = verdict(seen)
    limit, text = likeliest.limit, likeliest.text
    shares = _shares(seen.slices)
    others = _others(seen)
    if len(seen.slices) >= FEWEST and shares.get(limit, 0.0) >= SURE:
        return Judgement(limit, True, shares, f"{text}{others}")
    if len(seen.slices) < FEWEST:
        why = f"Not sure: {seen.seconds:.1f} s is too short to tell. It looks like {NAMES[limit]}. "
    else:
        ordered = sorted(shares.items(), key=lambda item: -item[1])
        found = ", ".join(f"{NAMES[name]} ({percent(share)})" for name, share in ordered if share >= 0.01)
        why = f"Not sure: the limit changed during the measurement. Its parts suggest: {found}. "
    if seen.seconds < LONG:
        # The spread shrinks with the square root of the time, so less than twice the time is not worth it.
        why += f"Measure for longer: --seconds {max(30, 10 * round(seen.seconds * 2 / 10))}."
    else:
        why += "A longer run would hardly help: they limit the speed in turn, and removing one shows the other."
    return Judgement(limit, False, shares, f"{why}{others}")


def _shares(slices: Sequence[Figures]) -> dict[str, float]:
    """Return the share of the resamples that names each limit. Deterministic."""
    if not slices:
        return {}
    draw = random.Random(0)
    counts = collections.Counter(verdict(joined(draw.choices(slices, k=len(slices)))).limit for _ in range(RESAMPLES))
    return {limit: count / RESAMPLES for limit, count in counts.items()}


def _others(seen: Figures) -> str:
    """Return a sentence about other work of the host, or an empty string."""
    found, machine = [], seen.machine
    if machine is None:
        return ""
    if is_busy_with_others(seen):
        found.append(f"other work on the daemon's host used {seen.other_cpu:.1f} of its {count(machine.count, 'CPU')}")
    if machine.stolen >= STOLEN * machine.count:
        found.append(f"its hypervisor gave {machine.stolen:.1f} to other hosts")
    return f" Meanwhile {' and '.join(found)}: measure again when it is idle." if found else ""
