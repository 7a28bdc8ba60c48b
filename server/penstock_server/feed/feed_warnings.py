"""Warnings for the log about feeds that work, but may not do what their owners expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Spec, leaf_list
from penstock_proto.status.figures import count

from .objects.iterables import WholeDataset
from .options.shuffle_quality import mixing

MAY_LOSE_ROWS = (
    "As it is, the stream changes with the number of workers and after a fault, and rows that are chosen in this way "
    "may be lost or come twice. `penstock check` finds the cause"
)
"""Why a difference matters, and how to find its cause. Two samples do not show that: experiments do."""

MOST_DIFFERENT = 3
"""After this many spot checks of a feed that found a difference, its samples are no longer checked."""


def mixing_warning(plan: FeedPlan, n_splits: int, pool: int) -> str | None:
    """Return a warning if a batch of the feed has samples of only a few of its `n_splits` splits, or None. `pool`:
    number of lanes whose rows are mixed."""
    found = mixing(plan, n_splits, pool=pool)
    if found is None or not found.poor:
        return None
    text = f"feed {plan.name}: {found.text}"
    return f"{text}. To mix more: {'; or '.join(found.advice)}" if found.advice else text


def batch_warning(name: str, spec: Spec, batch_size: int | None) -> str | None:
    """Return a warning if the samples of feed `name` look like batches of `batch_size` rows, or None.

    The leaves of a sequence have a common length, too. So warn only if that length is `batch_size` and the shapes
    differ.
    """
    shapes = {leaf.shape for leaf in leaf_list(spec)}
    if batch_size in (None, 1) or len(shapes) < 2 or any(shape[:1] != (batch_size,) for shape in shapes):
        return None
    return (
        f"feed {name}: each leaf of a sample has {batch_size} rows, the same as batch_size=, so a batch is "
        f"[{batch_size}, {batch_size}, ...]. If the samples are batches already, give batch_size=None"
    )


def names_warning(name: str, sample: Any) -> str | None:
    """Return a warning if a sample of feed `name` is or has a namedtuple, whose names the spec does not keep, or
    None."""
    if isinstance(sample, Mapping):
        return next(filter(None, (names_warning(name, part) for part in sample.values())), None)
    if not isinstance(sample, tuple):
        return None
    fields = getattr(sample, "_fields", ())
    if not fields:
        return next(filter(None, (names_warning(name, part) for part in sample)), None)
    return (
        f"feed {name}: a {type(sample).__name__} arrives as a plain tuple ({', '.join(map(str, fields))}), without the "
        "names: yield its ._asdict() to keep them, or tuple() of it"
    )


def workers_warning(plan: FeedPlan, n_splits: int, workers: int) -> str | None:
    """Return a warning if the feed's lanes cannot keep all `workers` busy, or None."""
    lanes = min(plan.lanes, n_splits)
    most = -(-lanes // workers)  # lanes of the busiest worker: it sets the pace
    enough = -(-lanes // most)
    if plan.length is not None or plan.order != "exact" or enough >= workers:
        return None
    counted = f"lanes={plan.lanes}" if plan.endless else f"lanes={plan.lanes}, {count(n_splits, plan.piece)}"
    text = f"feed {plan.name} has {count(lanes, 'lane')} ({counted}), so {workers} workers run no faster than {enough}"
    return text if lanes == 1 else f"{text}: the number of workers should divide the number of lanes"


def undivided_warning(name: str, source: Any) -> str:
    """Say how the work of a feed that cannot be divided can be shared after all."""
    if isinstance(source, WholeDataset):
        return (
            f"feed {name} cannot be divided, so one worker does all the work: give the dataset that this "
            f"{source.__name__} is made of, if it has an item for each index, or move what is expensive to a function "
            "and give it as transform="
        )
    return (
        f"feed {name} cannot be divided, so one worker does all the work: give splits= (a list of files or ranges; the "
        "generator gets them one by one), or segment=N if it makes up random samples (it runs again for every N "
        "samples), or let it take `shard` and yield every count-th sample from index on, where index, count = shard. "
        "If the generator is cheap and what comes after it is not, move that to a function and give it as transform="
    )


def shards_warning(name: str, lanes: int, parts: int) -> str:
    """Say that a dataset has fewer shards than the feed has lanes."""
    return (
        f"feed {name} has lanes={lanes}, but its dataset only {parts} shards, so {lanes - parts} lanes are empty: give "
        f"lanes={parts}, or a dataset of more shards"
    )
