"""The order of a stream as NumPy arrays, without processes: which sample comes when.

`penstock_order` follows `worker/lane/lane.py`, `worker/lane/lane_splits.py` and `coordinator/order/pooled_order.py` for
a feed with splits; a test compares it with a real stream. `tfdata_order` is that of `interleave(deterministic=True)`
and `shuffle`, and `full_order` a permutation of the whole epoch. Each returns positions: element *k* is the number of
the sample that comes at place *k* of the stream. Samples are numbered in the order of the splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_proto.messages import FeedPlan
from penstock_proto.spec import Leaf
from penstock_server.feed.options.plan_sizes import block_samples, fixed_slots, pooled_lanes
from penstock_server.shuffling.permutation import make_key, permute
from penstock_server.shuffling.pool_order import source_rows

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Mixing:
    """How well an order mixes.

    Attributes:
        splits: distinct splits in a batch, on average.
        spread: chi-squared over its degrees of freedom, of the splits in windows of consecutive samples, on average. A
            full shuffle has 1, and an order that gives each window its part of every split has 0.
    """

    splits: float
    spread: float


def mixing(positions: Positions, sizes: Positions, *, batch_size: int, window: int) -> Mixing:
    """Measure an order of the samples of splits with these `sizes`, in batches and in windows of `window` samples."""
    split = np.repeat(np.arange(len(sizes)), sizes)[positions]
    batches = np.sort(split[: len(split) // batch_size * batch_size].reshape(-1, batch_size), axis=1)
    distinct = 1 + np.count_nonzero(np.diff(batches, axis=1), axis=1)
    total = len(split)
    windows = split[: total // window * window].reshape(-1, window)
    expected = window * sizes / total
    found = []
    for one in windows:
        counts = np.bincount(one, minlength=len(sizes))
        found.append(np.sum((counts - expected) ** 2 / expected))
    correction = (total - 1) / (total - window) if total > window else 1.0  # samples do not come twice
    return Mixing(float(distinct.mean()), float(np.mean(found)) / (len(sizes) - 1) * correction)


def turn_and_pool(plan: FeedPlan, sample_nbytes: int) -> tuple[int, int]:
    """Return the batches in a turn, and the lanes that mix their rows, of a feed whose samples are `sample_nbytes`
    bytes in one leaf."""
    assert plan.batch_size is not None
    spec = Leaf(np.uint8, (sample_nbytes,))
    return fixed_slots(plan, spec, plan.batch_size).batches, pooled_lanes(plan, spec)


def penstock_order(plan: FeedPlan, sizes: Positions, turn: int, pool: int, epoch: int = 0) -> Positions:
    """Return the order of one epoch of a feed whose splits have these `sizes`, in turns of `turn` batches. `pool`
    lanes mix their rows.

    The feed has a `batch_size`, and neither segments nor buckets.
    """
    n_splits = len(sizes)
    lanes = [_lane(plan, sizes, turn, pool, epoch, lane) for lane in range(min(plan.lanes, n_splits))]
    return np.concatenate(list(_visits(plan, lanes, turn, pool, epoch)))


def tfdata_order(sizes: Positions, *, cycle: int, buffer: int, seed: int = 0) -> Positions:
    """Return an order of `files.shuffle(all).interleave(cycle_length=cycle, block_length=1).shuffle(buffer)`."""
    random = np.random.default_rng(seed)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    files = random.permutation(len(sizes))
    order = _interleaved(starts[files], sizes[files], cycle)
    if not buffer:
        return order
    return _through_buffer(order, buffer, random)


def full_order(total: int, seed: int = 0) -> Positions:
    """Return a permutation of the whole epoch."""
    return np.random.default_rng(seed).permutation(total)


def _lane(plan: FeedPlan, sizes: Positions, turn: int, pool: int, epoch: int, lane: int) -> Positions:
    """Return the samples of a lane in their order."""
    n_splits = len(sizes)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    lanes = min(plan.lanes, n_splits)
    mine = np.arange(lane, n_splits, lanes)
    if not plan.shuffle:
        return np.concatenate([np.arange(starts[split], starts[split] + sizes[split]) for split in mine])
    mine = permute(make_key(plan.seed, epoch, "splits"), n_splits, mine)
    rows = block_samples(plan.shuffle, lanes, plan.batch_size)
    found = []
    for number, block in enumerate(_blocks(starts[mine], sizes[mine], rows, min(plan.interleave, rows))):
        if pool == 1 or len(block) < rows or rows != turn * (plan.batch_size or 1):  # otherwise the pool mixes it
            key = make_key(plan.seed, epoch, "block", lane, number)
            block = block[permute(key, len(block), np.arange(len(block)))]
        found.append(block)
    return np.concatenate(found)


def _blocks(starts: Positions, sizes: Positions, rows: int, seats: int) -> Iterator[Positions]:
    """Fill blocks of `rows` samples from `seats` open splits, in equal runs."""
    open_: list[int | None] = [None] * seats
    taken = [0] * len(sizes)
    following = 0
    while True:
        block: list[Positions] = []
        filled = 0
        while filled < rows:
            readable = [seat for seat in range(seats) if open_[seat] is not None or following < len(sizes)]
            if not readable:
                break
            run, longer = divmod(rows - filled, len(readable))
            for place, seat in enumerate(readable):
                end = filled + run + (place < longer)
                while filled < end:
                    split = open_[seat]
                    if split is None:
                        if following == len(sizes):
                            break
                        split = open_[seat] = following
                        following += 1
                    count = min(end - filled, int(sizes[split]) - taken[split])
                    first = int(starts[split]) + taken[split]
                    block.append(np.arange(first, first + count))
                    taken[split] += count
                    filled += count
                    if filled < end:
                        open_[seat] = None
        if filled:
            yield np.concatenate(block)
        if filled < rows:
            return


def _visits(plan: FeedPlan, lanes: list[Positions], turn: int, pool: int, epoch: int) -> Iterator[Positions]:
    """Yield the stream that visits the lanes in turn and mixes the rows of pools, with merged batches of leftovers."""
    batch_size = plan.batch_size or 1
    live = list(range(len(lanes)))
    at = [0] * len(lanes)
    leftover = np.empty(0, np.int64)
    visit = 0
    while live:
        for part in sorted({lane // pool for lane in live}):
            visits = []
            for lane in [lane for lane in live if lane // pool == part]:
                rows = lanes[lane][at[lane] : at[lane] + turn * batch_size]
                whole = len(rows) // batch_size * batch_size
                at[lane] += whole
                visits.append(rows[:whole])
                if whole < turn * batch_size:
                    live.remove(lane)
                    leftover = np.concatenate((leftover, rows[whole:]))
            pooled = np.concatenate(visits)
            if pool > 1 and len(pooled):
                pooled = pooled[source_rows(plan.seed, epoch, visit, part, len(pooled), 0, len(pooled))]
            yield pooled
            merged = len(leftover) // batch_size * batch_size
            yield leftover[:merged]
            leftover = leftover[merged:]
        visit += 1
    yield leftover


def _interleaved(starts: Positions, sizes: Positions, cycle: int) -> Positions:
    """Take one sample of each of `cycle` open files in turn. The next file replaces one that has ended.

    TensorFlow opens that file one round later, which makes no difference for files of one size.
    """
    found = []
    waiting = list(zip(starts.tolist(), sizes.tolist(), strict=True))[::-1]
    open_ = [list(waiting.pop()) for _ in range(min(cycle, len(waiting)))]
    while open_:
        rounds = min(size for _, size in open_)  # until the next file ends, as whole rounds
        firsts = np.array([start for start, _ in open_])
        found.append((firsts + np.arange(rounds)[:, None]).reshape(-1))
        for file in open_:
            file[0] += rounds
            file[1] -= rounds
        kept = []
        for file in open_:
            if file[1]:
                kept.append(file)
            elif waiting:
                kept.append(list(waiting.pop()))
        open_ = kept
    return np.concatenate(found)


def _through_buffer(order: Positions, buffer: int, random: np.random.Generator) -> Positions:
    """Pass the order through a buffer. Each sample of a full buffer is equally likely to be next, and is then
    replaced."""
    total = len(order)
    buffer = min(buffer, total)
    kept = order[:buffer].tolist()
    found = []
    for pick, following in zip(
        random.integers(0, buffer, total - buffer).tolist(), order[buffer:].tolist(), strict=True
    ):
        found.append(kept[pick])
        kept[pick] = following
    return np.concatenate((np.array(found, np.int64), random.permutation(kept)))
