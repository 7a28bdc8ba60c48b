"""The stream of an epoch, written directly from the text of the design.

An epoch's lanes take turns. A visit takes up to `turn` full batches from a lane. A lane with fewer ends there, and its
leftover rows go to an accumulator. As soon as the accumulator holds a full batch, this batch comes next. The rows that
it holds after the last lane are the last, smaller batch.
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
    """Yield the batches of an epoch in exact order. A lane's error is raised where a batch needs the sample."""
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
    """Yield the batches of an epoch in exact order, with mixed lanes.

    As `batches_of_lanes`, but the full batches of one visit to each of `pool` neighbouring lanes form a pool. `mix`
    returns its rows in their new order. It is called with the number of the visit, the number of the pool in the visit,
    and the rows. Merged batches come after the pool.
    """
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
    """Yield the batches of an epoch of an indexable source, whose `items` are given in order."""
    items = iter(items)
    while batch := tuple(islice(items, batch_size)):
        if len(batch) == batch_size or not drop_remainder:
            yield batch


def epoch_length(samples: int, batch_size: int, *, drop_remainder: bool = False) -> int:
    """Return how many batches an epoch with this many samples has."""
    return samples // batch_size if drop_remainder else -(-samples // batch_size)
