"""Failures of user code and of workers: how long to pause, how careful to be, and what the error says."""

from __future__ import annotations

from penstock_proto import WorkerDied
from penstock_proto.messages import FeedPlan

from ...feed.options.plan_sizes import block_samples
from ...worker_state.process_ends import advice

LAST_PAUSE = 30.0
"""The most seconds between a failure and the next attempt."""

FIRST_PAUSE = 0.1
"""Seconds that the pauses begin with."""

ALL = 2**62
"""More batches than a lane ever has."""


def pause(times: int) -> float:
    """Return the seconds from failure number `times` to the next attempt."""
    return min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(times, 10))


def batches_at_stake(plan: FeedPlan) -> int:
    """Return how many batches a lane makes until the splits that are open now have ended. After a death a lane is
    careful for that many batches. (Otherwise an endless lane would be careful forever.)"""
    if plan.segment is None:
        return ALL
    rows = plan.interleave * plan.segment + block_samples(plan.shuffle, plan.lanes, plan.batch_size)
    return min(ALL, -(-rows // (plan.batch_size or 1)))


def deadly(plan: FeedPlan, epoch: int, split: int, count: int, how: str, worker: int, name: str) -> WorkerDied:
    """Return the error for a place in an epoch at which the worker died `count` times.

    `split` is -1 if it was outside of user code, or in that for the batch `name`.
    """
    if split < 0 and name:  # it was in user code that is not called for a split
        said = f"batch_transform= ended its worker process {count} times in epoch {epoch}"
    elif split < 0:
        said = (
            f"the worker process died {count} times in a row at one place of epoch {epoch}, outside of the feed's code"
        )
    else:
        said = f"a {plan.piece} ended its worker process {count} times in epoch {epoch}"
    text = f"{said}, the last time it {how}{advice(how)}"
    if plan.on_error == "raise" and plan.length is None and split >= 0:
        text += f'. Feed(on_error="skip") leaves such {plan.piece}s out'
    return WorkerDied(text, feed=plan.name, worker=worker, split=name or None)
