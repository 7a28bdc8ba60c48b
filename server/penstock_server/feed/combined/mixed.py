"""The source of a feed from `Feed.mix`, which draws its samples from other feeds.

Each lane of a mix has splits of each component, and draws a component for each sample. This file draws nothing and runs
no generators: `worker/lane/mixed_lane.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import structs

from penstock_proto.messages import FeedPlan

from ..options.cache_key import feed_directory
from ..options.feed_options import FeedOptions
from ..options.generator_call import Wants
from .component_options import seed_of

NAME = "Feed.mix"


class Planned(Protocol):
    """A `Feed`, which has a plan."""

    def plan(self, default_name: str) -> FeedPlan: ...


class Mixed:
    """The components of a mix. A mix has this instead of a generator.

    Attributes:
        parts: the feeds, by name.
        weights: the probability with which each feed is drawn; their sum is 1.
        stop: as in `Feed.mix`.
        wants: none, because the mix itself takes no arguments.
    """

    def __init__(self, parts: Mapping[str, Any], weights: Mapping[str, float], stop: str) -> None:
        self.__name__ = NAME
        self.parts = dict(parts)
        self.weights = dict(weights)
        self.stop = stop
        self.wants = Wants(split=False, rng=False, epoch=False, shard=False)

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        ends = [part.segment is None or part.samples is not None for part in self.parts.values()]
        return not (any(ends) if self.stop == "first" else all(ends))

    @property
    def static_splits(self) -> bool:
        """Whether all epochs have the same lists of splits."""
        return not any(callable(part.splits) for part in self.parts.values())

    @property
    def caches(self) -> tuple[tuple[str, str], ...]:
        """The components that have a cache, by name, with the directories of their splits.

        Raises:
            TypeError: the generator of a component or its arguments cannot be pickled, so the cache could not
                distinguish its splits from others.
        """
        found = []
        for label, part in self.parts.items():
            if part.cache is not None:
                try:
                    found.append((label, feed_directory(part)))
                except TypeError as error:
                    raise TypeError(f"{label}: {error}") from error
        return tuple(found)

    @property
    def samples(self) -> int | None:
        """The samples of an epoch, if they follow from those of the components."""
        counts = [part.samples for part in self.parts.values()]
        return None if self.stop == "first" or None in counts else sum(counts)

    @property
    def segment(self) -> int | None:
        """About how many samples are drawn until all segments that are open now have ended; None if epochs end."""
        if not self.endless:
            return None
        segments: dict[str, int] = {k: part.segment for k, part in self.parts.items() if part.segment is not None}
        return max(math.ceil(segment / self.weights[label]) for label, segment in segments.items())


def part_plan(part: Planned, label: str, plan: FeedPlan) -> FeedPlan:
    """Return the plan of a component of a mix. The mix's `plan` gives the options that apply to all components."""
    return structs.replace(
        part.plan(plan.name),
        name=plan.name,
        spec=plan.spec,
        batch_size=plan.batch_size,
        lanes=plan.lanes,
        shuffle=plan.shuffle,
        interleave=plan.interleave,
        seed=seed_of(plan.seed, label),
        on_error=plan.on_error,
        attempts=plan.attempts,
        batching=plan.batching,
        buckets=plan.buckets,
        drop_remainder=False,
        warnings=(),
    )


def is_mix(feed: FeedOptions) -> bool:
    """Return whether the feed is a mix."""
    return isinstance(feed.generate, Mixed)
