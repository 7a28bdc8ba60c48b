"""The stream of an epoch, written down directly from the words of the design.

An epoch's lanes take turns: a visit takes up to `turn` full batches from a lane, and the lane that finds fewer has
ended. What it has left over joins one accumulator, and as soon as that holds a batch, it is emitted at that point.
What is in there at the end is the last, smaller batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
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


def batches_of_index(items: Iterable[T], *, batch_size: int, drop_remainder: bool = False) -> Iterator[tuple[T, ...]]:
    """The batches of an epoch of an indexable source, whose items are given in their order."""
    items = iter(items)
    while batch := tuple(islice(items, batch_size)):
        if len(batch) == batch_size or not drop_remainder:
            yield batch


def epoch_length(samples: int, batch_size: int, *, drop_remainder: bool = False) -> int:
    """Return how many batches an epoch with this many samples has."""
    return samples // batch_size if drop_remainder else -(-samples // batch_size)
