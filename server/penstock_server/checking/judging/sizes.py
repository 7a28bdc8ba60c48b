"""Computes, from a feed's plan, its spec and one worker's speed: memory, useful numbers of workers, samples per second.

Does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Spec

from ...coordinator.model.feeds import ServedFeed
from ...coordinator.model.known_lists import SplitsInfo
from ...coordinator.model.memory import share
from ..observing.messages import Done, Undivided

_CREDIT, _QUOTA = 4, 8
"""Slots that a consumer on the same host asks for."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a stream takes.

    Attributes:
        batch: bytes of a batch, without headers.
        varies: whether batches vary in size; then the numbers are estimates from the first sample.
        slot, slots: bytes of a slot, and how many slots a stream has at most.
        blocks: bytes of the shuffle blocks.
        wanted: bytes of all slots and blocks.
        least: the least bytes with which the stream runs.
        allowed: bytes that the daemon may take.
    """

    batch: int
    varies: bool
    slot: int
    slots: int
    blocks: int
    wanted: int
    least: int
    allowed: int


def memory(plan: FeedPlan, spec: Spec, sample_nbytes: int, n_splits: int, workers: int, allowed: int) -> Memory:
    """Return the memory of a stream with `workers` workers, if the daemon may take `allowed` bytes."""
    splits = SplitsInfo(0, n_splits, b"") if plan.length is None and plan.segment is None else None
    feed = ServedFeed(plan, spec, sample_nbytes, splits)
    slot, blocks = feed.slot_nbytes, feed.blocks_nbytes
    granted = share(
        free=1 << 62,
        slot=slot,
        blocks=blocks,
        workers=workers,
        credit=_CREDIT,
        quota=_QUOTA,
        pool=feed.info.pool,
        stripe=feed.info.stripe,
    )
    assert granted is not None
    return Memory(
        batch=(plan.batch_size or 1) * sample_nbytes,
        varies=feed.varies,
        slot=slot,
        slots=granted.slots,
        blocks=blocks,
        wanted=granted.nbytes,
        least=feed.least_nbytes,
        allowed=allowed,
    )


def useful_workers(plan: FeedPlan, n_splits: int) -> list[int] | None:
    """Return the numbers of workers that are faster than any smaller number; None if every number is."""
    if plan.length is not None:
        return None
    lanes = min(plan.lanes, n_splits)
    if plan.order != "exact":
        return list(range(1, lanes + 1))
    return sorted({-(-lanes // most) for most in range(1, lanes + 1)})


def fastest(plan: FeedPlan, n_splits: int, workers: int) -> int:
    """Return how many of `workers` workers are busy at the same time."""
    useful = useful_workers(plan, n_splits)
    return workers if useful is None else max(number for number in useful if number <= workers)


@dataclass(frozen=True, slots=True)
class Pace:
    """How long workers take for a sample.

    Attributes:
        whole: seconds of work that each of them does, such as running a generator that cannot be divided.
        divided: seconds of work that they share.
    """

    whole: float
    divided: float

    def rate(self, workers: float) -> float:
        """Return the samples per second of so many workers."""
        return 1 / max(self.whole + self.divided / workers, 1e-9)


def pace_of(plan: FeedPlan, done: Done, undivided: Undivided | None) -> Pace:
    """Return the pace of workers, from a run that has read each lane apart."""
    if undivided is None:
        return Pace(0.0, done.seconds / done.samples)
    divided = max(0.0, done.seconds - done.undivided_seconds) / done.samples
    if undivided.uncopied:  # each lane runs the generator, and lanes are divided among workers
        return Pace(0.0, plan.lanes * undivided.seconds + divided)
    return Pace(undivided.seconds, divided)


def speed(pace: Pace, cpu_share: float, workers: int, cpus: float) -> float:
    """Return the samples per second of `workers` busy workers, if trainer and daemon keep one CPU busy.

    Args:
        pace: how long they take for a sample.
        cpu_share: how many CPUs one worker keeps busy, with the processes of its user code.
        workers: how many workers are busy at the same time.
        cpus: CPUs of this host that others leave.
    """
    return pace.rate(min(workers, max(1.0, max(cpus - 1, cpus / 2) / max(cpu_share, 1e-3))))


def rate_text(value: float) -> str:
    """Return a number of samples a second as text, with two digits or three."""
    digits = 3 - len(f"{value:.0f}")
    return f"{round(value, digits):,.0f}" if value >= 10 else f"{value:.2g}"
