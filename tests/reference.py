"""The stream of an epoch, written down directly from the words of the design.

An epoch's lanes take turns: a visit takes up to `turn` full batches from a lane, and the lane that finds fewer has
ended. What it has left over joins one accumulator, and as soon as that holds a batch, it is emitted at that point.
What is in there at the end is the last, smaller batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def batches_of_lanes(
    lanes: Iterable[Iterable[T]], *, batch_size: int, turn: int, drop_remainder: bool = False
) -> Iterator[tuple[T, ...]]:
    """The batches of an epoch in exact order. What a lane raises is raised where its sample would be needed."""
    live = deque(iter(lane) for lane in lanes)
    accumulator: list[T] = []
    while live:
        lane = live.popleft()
        for _ in range(turn):
            batch = tuple(islice(lane, batch_size))
            if len(batch) < batch_size:
                accumulator += batch
                break
            yield batch
        else:
            live.append(lane)
        while len(accumulator) >= batch_size:
            yield tuple(accumulator[:batch_size])
            del accumulator[:batch_size]
    if accumulator and not drop_remainder:
        yield tuple(accumulator)


def batches_of_pools(
    lanes: Iterable[Iterable[T]],
    *,
    batch_size: int,
    turn: int,
    pool: int,
    mix: Callable[[int, int, list[T]], list[T]],
    drop_remainder: bool = False,
) -> Iterator[tuple[T, ...]]:
    """As `batches_of_lanes`, but the full batches of a visit to each of `pool` neighbouring lanes are one pool, whose
    rows `mix` puts in order, given the number of the visit and of the pool in it. Leftovers come behind the pool."""
    live = dict(enumerate(iter(lane) for lane in lanes))
    accumulator: list[T] = []
    visit = 0
    while live:
        for part in sorted({lane // pool for lane in live}):
            rows: list[T] = []
            for lane in [lane for lane in live if lane // pool == part]:
                for _ in range(turn):
                    batch = tuple(islice(live[lane], batch_size))
                    if len(batch) < batch_size:
                        accumulator += batch
                        del live[lane]
                        break
                    rows += batch
            mixed = iter(mix(visit, part, rows))
            while batch := tuple(islice(mixed, batch_size)):
                yield batch
            while len(accumulator) >= batch_size:
                yield tuple(accumulator[:batch_size])
                del accumulator[:batch_size]
        visit += 1
    if accumulator and not drop_remainder:
        yield tuple(accumulator)


def batches_of_index(items: Iterable[T], *, batch_size: int, drop_remainder: bool = False) -> Iterator[tuple[T, ...]]:
    """The batches of an epoch of an indexable source, whose items are given in their order."""
    items = iter(items)
    while batch := tuple(islice(items, batch_size)):
        if len(batch) == batch_size or not drop_remainder:
            yield batch


def epoch_length(samples: int, batch_size: int, *, drop_remainder: bool = False) -> int:
    """Return how many batches an epoch with this many samples has."""
    return samples // batch_size if drop_remainder else -(-samples // batch_size)
