"""What `Feed.mix` makes of feeds: a source whose samples are drawn from them.

Each lane of a mix has splits of each component, and draws for each sample which component it is from. This file draws
nothing and runs no generators: `worker/mixed_lane.py` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from msgspec import structs

from penstock_proto.messages import FeedPlan

from .cache_key import feed_directory
from .component_options import seed_of
from .feed_options import FeedOptions
from .generator_call import Wants

NAME = "Feed.mix"


class Planned(Protocol):
    """A `Feed`, which has a plan."""

    def plan(self, default_name: str) -> FeedPlan: ...


class Mixed:
    """The components of a mix. It takes the place of a feed's generator.

    Attributes:
        parts: the feeds, by name.
        weights: how often each is drawn; their sum is 1.
        stop: as in `Feed.mix`.
        wants: the mix itself takes no arguments.
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
            TypeError: the generator of a component or its arguments cannot be pickled, so the cache could not tell its
                splits apart.
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
        """About how many samples are drawn until all segments that are open now have ended; None if an epoch ends."""
        if not self.endless:
            return None
        segments: dict[str, int] = {k: part.segment for k, part in self.parts.items() if part.segment is not None}
        return max(math.ceil(segment / self.weights[label]) for label, segment in segments.items())


def part_plan(part: Planned, label: str, plan: FeedPlan) -> FeedPlan:
    """Return the plan of a component of the mix with this `plan`: what holds for all together is the mix's."""
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
    """Whether the feed is a mix."""
    return isinstance(feed.generate, Mixed)
