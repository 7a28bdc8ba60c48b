"""The share of a lane in a generator that cannot be divided: every lane keeps some of its samples.

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
        self.index = index
        self.count = count
        self.stretch = stretch

    @property
    def round(self) -> int:
        """The number of samples after which it has its next stretch."""
        return self.count * self.stretch

    def of(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the samples of this share. Take the others from `samples` too, and drop them."""
        dropped = self.index * self.stretch
        while True:
            if dropped and next(islice(samples, dropped - 1, dropped), _END) is _END:
                return
            for _ in range(self.stretch):
                sample = next(samples, _END)
                if sample is _END:
                    return
                yield sample
                del sample  # it may be large, and the generator runs on
            dropped = (self.count - 1) * self.stretch

    def place_of(self, number: int) -> int:
        """Return the number, in the generator, of the share's sample `number`."""
        before, within = divmod(number, self.stretch)
        return (before * self.count + self.index) * self.stretch + within

    def size_of(self, samples: int) -> int:
        """Return how many of a generator's `samples` this share has."""
        rounds, rest = divmod(samples, self.round)
        return rounds * self.stretch + min(self.stretch, max(0, rest - self.index * self.stretch))


def stretch_of_share(plan: FeedPlan, layout: SlotLayout | None) -> int:
    """Return the length of a share's stretches; `layout` is that of a slot, or None if batches vary in size."""
    if plan.shuffle or plan.batch_size is None:
        return 1
    return plan.batch_size * (1 if layout is None else turn_of(plan, layout))
