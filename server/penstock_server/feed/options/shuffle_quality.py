"""Describes how well a feed mixes: from how many splits a batch has samples, in numbers and words, and what to change.

The figures follow from the options, without reading anything. benchmarks/mixing.py measures whole orders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, expm1, log1p

from penstock_proto.messages import FeedPlan

from .plan_sizes import block_samples, open_splits
from .values import MAX_INTERLEAVE, Shuffle

_POOR = 1 / 5
"""Share of the splits in a batch of a full shuffle. If a batch has fewer, the log warns."""

_ENOUGH = 4
"""Splits that each lane should have."""

_FINE = 16
"""Splits that each lane has open if the user follows the advice to divide them."""

_WORTH = 1.5
"""Least factor by which a change must improve the number of splits to be worth naming."""


@dataclass(frozen=True)
class Mixing:
    """How many splits a batch mixes.

    Attributes:
        splits: distinct splits in a batch, on average.
        full: the same number if all samples of an epoch were shuffled together.
        text: a sentence with these numbers.
        advice: changes that would mix better, with the number of splits for each, the cheapest first. Empty if there
            are none.
        poor: whether `splits` is so small that the log should warn.
    """

    splits: float
    full: float
    text: str
    advice: tuple[str, ...]
    poor: bool


def mixing(plan: FeedPlan, n_splits: int, samples: int | None = None, pool: int = 1) -> Mixing | None:
    """Describe how well a feed mixes.

    Args:
        plan: the feed's options.
        n_splits: length of its list of splits.
        samples: samples in all splits together, if known. All splits are assumed to be equally long.
        pool: how many lanes mix their rows with each other; see `plan_sizes.pooled_lanes`.

    Returns:
        None if there is nothing to describe: the feed does not shuffle, or it has no splits to mix. (An indexable
        object is shuffled as a whole. If a generator cannot be divided, each lane has a share of it. The plan of a mix
        does not tell how many splits each feed has.)
    """
    shares = plan.interleave == 1 and n_splits <= plan.lanes
    if not plan.shuffle or plan.length is not None or plan.mixes or n_splits < 2 or shares:
        return None
    batch = plan.batch_size or 1
    samples = samples or plan.samples
    each = None if samples is None else samples / n_splits
    now = _Options(batch, plan.lanes, plan.interleave, plan.shuffle, pool)
    got, full = now.splits(n_splits, each), _distinct(n_splits, batch)
    name = plan.piece + "s"
    if plan.batch_size is None:
        text = (
            f"its batches are ready-made, so none mixes {name}; those of "
            f"{_number(now.of_lane(n_splits))} of its {n_splits} {name} are shuffled together"
        )
        return Mixing(1, 1, text, (), poor=False)
    many = name if plan.endless else f"of its {n_splits} {name}"
    text = f"a batch of {batch} has samples of {_number(got)} {many}; a full shuffle would have {_number(full)}"
    poor = got < _POOR * full or (n_splits < _ENOUGH * now.used(n_splits) and got < full / 2)
    better = (advice for gives, advice in _advice(plan, now, n_splits, each, got) if gives >= _WORTH * got)
    return Mixing(got, full, text, tuple(better), poor)


@dataclass(frozen=True)
class _Options:
    """The options that decide how many splits are mixed."""

    batch: int
    lanes: int
    interleave: int
    shuffle: int
    pool: int

    def used(self, n_splits: int) -> int:
        """Return how many lanes have any splits."""
        return min(self.lanes, n_splits)

    def of_lane(self, n_splits: int, each: float | None = None) -> float:
        """Return how many splits a block mixes, on average over lanes. `each`: samples in a split, if known."""
        lane = n_splits / self.used(n_splits)
        rows = block_samples(self.shuffle, self.used(n_splits), self.batch)
        open_ = min(self.interleave, rows)
        if each:  # short splits end within a block, and the next ones follow
            ends = rows / open_ / each
            return min(lane, open_ * max(1 + ends / 2, ends + 1 / 2))
        return min(lane, open_)

    def splits(self, n_splits: int, each: float | None) -> float:
        """Return the number of distinct splits in a batch."""
        return _distinct(self.of_lane(n_splits, each) * min(self.pool, self.used(n_splits)), self.batch)


def _distinct(splits: float, batch: int) -> float:
    """Return how many of `splits` equal splits a batch of `batch` random samples has, on average."""
    return -splits * expm1(batch * log1p(-1 / splits)) if splits > 1 else 1.0


def _advice(
    plan: FeedPlan, now: _Options, n_splits: int, each: float | None, got: float
) -> Iterator[tuple[float, str]]:
    """Yield changes, each with the number of splits that a batch would then have."""
    used = now.used(n_splits)
    lane = n_splits / used
    if lane > now.interleave:
        open_ = min(MAX_INTERLEAVE, 4 * now.interleave, round(lane))
        gives = replace(now, interleave=open_).splits(n_splits, each)
        yield gives, f"{_spelling(now, open_)}, for {_number(gives)} in a batch (each lane then has {open_} open)"
    elif plan.segment is not None:
        yield (0 if plan.endless else 2 * got), "make segment= smaller, for more and shorter segments"
    else:
        open_ = max(now.interleave, _FINE)
        parts = max(2, ceil(open_ / lane))
        gives = replace(now, interleave=open_).splits(n_splits * parts, None if each is None else each / parts)
        again = f" and give {_spelling(now, open_)}" if open_ > now.interleave else ""
        yield gives, f"divide each split into {parts} (row ranges, say){again}, for {_number(gives)} in a batch"
    if lane < now.interleave:
        default = now.interleave == open_splits(now.shuffle, now.lanes, now.batch)
        for lanes in (used // 2, used // 4):
            if lanes:
                open_ = open_splits(now.shuffle, lanes, now.batch) if default else now.interleave
                gives = replace(now, lanes=lanes, interleave=open_).splits(n_splits, each)
                workers = "one worker" if lanes == 1 else f"{lanes} workers"
                yield gives, f"lanes={lanes}, for {_number(gives)} in a batch (at most {workers} can work then)"


def _spelling(now: _Options, interleave: int) -> str:
    return f"shuffle={Shuffle(now.shuffle, interleave=interleave)}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value < 3 else f"{value:.0f}"
