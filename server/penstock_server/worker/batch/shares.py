"""The share of a lane in a generator that cannot be divided: every lane runs all of it, and keeps some of its samples.

A share is made of stretches of consecutive samples. Without shuffling a stretch is a turn, so the stream, which takes
turns from the lanes one after another, is in the generator's order. With shuffling it is a single sample, so that a
shuffle block mixes samples from as wide a range as it can.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from penstock_proto.batches.layout import SlotLayout
from penstock_proto.messages import FeedPlan

from ...feed.options.plan_sizes import turn_of

_END = object()


class Share:
    """Every `count`-th stretch of `stretch` samples, from stretch `index` on."""

    def __init__(self, index: int, count: int, stretch: int) -> None:
        self._index = index
        self._count = count
        self._stretch = stretch

    def of(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of this share. Take the others from `samples` too, and drop them."""
        dropped = self._index * self._stretch
        while True:
            if dropped and next(islice(samples, dropped - 1, dropped), _END) is _END:
                return
            for _ in range(self._stretch):
                sample = next(samples, _END)
                if sample is _END:
                    return
                yield sample
                del sample  # it may be large, and the generator runs on
            dropped = (self._count - 1) * self._stretch

    def place_of(self, number: int) -> int:
        """Return the number, in the generator, of the share's sample `number`."""
        before, within = divmod(number, self._stretch)
        return (before * self._count + self._index) * self._stretch + within

    def size_of(self, samples: int) -> int:
        """Return how many of a generator's `samples` this share has."""
        rounds, rest = divmod(samples, self._count * self._stretch)
        return rounds * self._stretch + min(self._stretch, max(0, rest - self._index * self._stretch))


def stretch_of_share(plan: FeedPlan, layout: SlotLayout | None) -> int:
    """Return the length of a share's stretches; `layout` is that of a slot, or None if batches vary in size."""
    if plan.shuffle or plan.batch_size is None:
        return 1
    return plan.batch_size * (1 if layout is None else turn_of(plan, layout))
