"""The kinds of feeds: how a feed's generator is called, and into what parts the feed is divided."""

from __future__ import annotations

from ..objects.indexables import is_indexable, is_keras
from ..options.feed_options import FeedOptions
from ..options.generator_call import GeneratorCall, Wants
from ..options.transforms import checked_transforms
from ..options.values import OnError
from .mixed import Mixed, is_mix
from .zipped import Zipped

KINDS = {
    "items": "is an object that can be indexed",
    "segments": "has segments (segment=)",
    "splits": "has splits=",
    "shards": "divides itself by its parameter `shard`",
    "whole": "can neither be divided nor indexed",
}
"""The parts into which a feed is divided, and how messages describe such a feed."""


def generator_call(feed: FeedOptions) -> GeneratorCall:
    """Return how the generator of `feed`, which is neither indexable nor combined, is called.

    Raises:
        TypeError, ValueError: as `GeneratorCall`.
    """
    return GeneratorCall(
        feed.generate,
        method=feed.method,
        args=feed.args,
        kwargs=feed.kwargs,
        has_splits=feed.splits is not None,
        segments=feed.segment is not None,
    )


def takes_rng(feed: FeedOptions) -> bool:
    """Return whether the generator of `feed`, or one of those that it combines, takes `rng`."""
    source = feed.generate
    if isinstance(source, Zipped | Mixed):
        return any(map(takes_rng, source.parts.values()))
    return not is_indexable(source) and not generator_call(feed).seeds_global_state


def wants_of(feed: FeedOptions) -> Wants:
    """Return the arguments that the generator of `feed`, which is not indexable, takes."""
    source = feed.generate
    return source.wants if isinstance(source, Zipped | Mixed) else generator_call(feed).wants


def is_shared(feed: FeedOptions) -> bool:
    """Return whether every lane keeps its share of the samples of the whole generator of `feed`, because the generator
    cannot be divided, but the `transform` runs in parallel."""
    return (
        _is_transformed(feed)
        and not is_mix(feed)
        and not is_indexable(feed.generate)
        and feed.splits is None
        and feed.segment is None
        and not wants_of(feed).shard
    )


def leaves_out_items(feed: FeedOptions) -> bool:
    """Return whether `feed` is indexable, and may leave out items or make several samples of one. Then it is read in
    lanes, and nobody knows how many samples an epoch has."""
    if not is_indexable(feed.generate) or is_keras(feed.generate):
        return False
    skips = OnError.of(feed.on_error).action == "skip"
    return feed.drops or skips or any(one.yields for one in checked_transforms(feed.transform))


def _is_transformed(feed: FeedOptions) -> bool:
    parts = feed.generate.parts.values() if isinstance(feed.generate, Zipped) else ()
    return bool(checked_transforms(feed.transform)) or any(map(_is_transformed, parts))


def kind_of(feed: FeedOptions) -> str:
    """Return the parts into which a feed is divided, as a key of `KINDS`."""
    if is_indexable(feed.generate):
        return "items"
    if feed.segment is not None:
        return "segments"
    if feed.splits is not None:
        return "splits"
    return "shards" if wants_of(feed).shard else "whole"
