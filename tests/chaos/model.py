"""A model of the batches that a consumer must see, after docs/guarantees.md and docs/protocol.md, in plain Python.

It imports nothing of the product. A sample is (split, number). Where the keyed permutation decides the order, the model
only says what does not depend on the permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, count, islice

from .sample import ROWS, endless_size, rows_of
from .scenario import FeedCase

Sample = tuple[int, int]
Batch = tuple[Sample, ...]
Cuts = Mapping[int, int]
"""For each split whose rest is left out: the number of samples that it still has."""


def splits_of(case: FeedCase, variant: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the size of each split of an epoch, in the order of the list. Segments count as splits."""
    if case.kind == "endless":
        assert case.segment is not None
        return ((number, endless_size(case.segment, number)) for number in count())
    if case.kind == "segment":
        assert case.segment is not None
        assert case.tells_samples is not None
        whole, rest = divmod(case.tells_samples, case.segment)
        return iter([*((number, case.segment) for number in range(whole)), *([(whole, rest)] if rest else [])])
    return ((1000 * variant + number, size) for number, size in enumerate(case.sizes[variant]))


def lanes_of(case: FeedCase, turn: int = 1, variant: int = 0, cuts: Cuts | None = None) -> list[Iterator[Sample]]:
    """Return the samples of each lane if nothing is shuffled: split i belongs to lane i mod C. Of an undivided
    generator, each lane has every C-th turn, or every C-th sample for shuffling."""
    cuts = cuts or {}
    if case.kind == "whole":
        stretch = 1 if case.shuffle else turn * (case.batch_size or 1)
        numbers = range(case.sizes[0][0])
        return [
            iter([(0, number) for number in numbers if number // stretch % case.lanes == lane])
            for lane in range(case.lanes)
        ]
    if case.kind == "endless":
        lanes = case.lanes
    elif case.kind == "plain":
        lanes = 1
    else:
        lanes = min(case.lanes, len(list(splits_of(case, variant))))

    def samples(lane: int) -> Iterator[Sample]:
        for split, size in islice(splits_of(case, variant), lane, None, lanes):
            for number in range(min(size, cuts.get(split, size))):
                made = [ROWS * number + row for row in range(rows_of(split, number))] if case.rebatches else [number]
                yield from ((split, row) for row in made)

    return [samples(lane) for lane in range(lanes)]


def batches(case: FeedCase, turn: int, variant: int = 0, cuts: Cuts | None = None) -> Iterator[Batch]:
    """Yield the batches of an epoch in exact order, not shuffled.

    A visit takes up to `turn` full batches of a lane. A lane with fewer ends there. Its leftover rows join those of
    other lanes, and as soon as these make a full batch, this batch comes next.
    """
    if case.indexable:
        size = case.batch_size or 1
        total = case.sizes[0][0]
        for start in range(0, total, size):
            batch = tuple((0, number) for number in range(start, min(total, start + size)))
            if len(batch) == size or not case.drop_remainder:
                yield ready(case, batch)
        return
    live = lanes_of(case, turn, variant, cuts)
    size = case.batch_size or 1
    over: list[Sample] = []
    while live:
        lane = live.pop(0)
        for _ in range(turn):
            batch = tuple(islice(lane, size))
            if len(batch) < size:
                over += batch
                break
            yield ready(case, batch)
        else:
            live.append(lane)
        while len(over) >= size:
            yield tuple(over[:size])
            del over[:size]
    if over and not case.drop_remainder:
        yield tuple(over)


def mixes_lanes(case: FeedCase) -> bool:
    """Return whether lanes mix the rows of one visit to each. (The batches here are small enough for that.)"""
    return bool(case.shuffle) and case.order == "exact" and case.batch_size is not None and not case.indexable


def groups(case: FeedCase, turn: int) -> Iterator[tuple[int, Batch]]:
    """Yield groups of batches that share their rows: the number of batches, and the rows, not permuted.

    If lanes mix their rows, the full batches of one visit to each lane are a group. Otherwise each batch is a group.
    """
    if not mixes_lanes(case):
        yield from ((1, batch) for batch in batches(case, turn))
        return
    live, size = lanes_of(case), case.batch_size or 1
    over: list[Sample] = []
    while live:
        pool: list[Sample] = []
        for lane in list(live):
            for _ in range(turn):
                batch = tuple(islice(lane, size))
                if len(batch) < size:
                    over += batch
                    live.remove(lane)
                    break
                pool += batch
        if pool:
            yield len(pool) // size, tuple(pool)
        while len(over) >= size:
            yield 1, tuple(over[:size])
            del over[:size]
    if over and not case.drop_remainder:
        yield 1, tuple(over)


def ready(case: FeedCase, batch: Batch) -> Batch:
    """Return the rows of a batch. In a feed that makes its own batches, `batch` is one sample that stands for them."""
    if case.batch_size is not None:
        return batch
    ((split, number),) = batch
    return tuple((split, ROWS * number + row) for row in range(rows_of(split, number)))


def rows(case: FeedCase, variant: int = 0, cuts: Cuts | None = None) -> set[Sample]:
    """Return all rows of an epoch that has an end."""
    if case.indexable:
        samples: Iterator[Sample] = ((0, number) for number in range(case.sizes[0][0]))
    else:
        samples = chain.from_iterable(lanes_of(case, 1, variant, cuts))
    return set(chain.from_iterable(ready(case, (sample,)) for sample in samples))


def blocks(case: FeedCase, lane: int) -> Iterator[set[Sample]]:
    """Yield the shuffle blocks of a lane of segments. These are not permuted: open ones fill a block in equal runs."""
    assert case.kind in ("segment", "endless")
    size = case.batch_size or 1
    lanes = case.lanes if case.kind == "endless" else min(case.lanes, len(list(splits_of(case, 0))))
    room = -(-case.shuffle // (lanes * size)) * size
    following = islice(splits_of(case, 0), lane, None, lanes)
    waiting: list[tuple[int, int]] = []

    def more() -> Iterator[Sample] | None:
        found = waiting.pop(0) if waiting else next(following, None)
        return None if found is None else iter([(found[0], number) for number in range(found[1])])

    def any_more() -> bool:
        if not waiting:
            waiting.extend(islice(following, 1))
        return bool(waiting)

    seats: list[Iterator[Sample] | None] = [None] * min(case.interleave or 4, room)
    while True:
        block: list[Sample] = []
        while len(block) < room:
            live = [seat for seat, split in enumerate(seats) if split is not None or any_more()]
            if not live:
                break
            run, longer = divmod(room - len(block), len(live))
            for place, seat in enumerate(live):
                stop = len(block) + run + (place < longer)
                while len(block) < stop:
                    split = seats[seat] = seats[seat] or more()
                    if split is None:
                        break
                    before = len(block)
                    block += islice(split, stop - before)
                    whole = case.segment is not None and len(block) and block[-1][1] == case.segment - 1
                    if len(block) < stop or (len(block) > before and whole):
                        seats[seat] = None
        if not block:
            return
        yield set(block)
