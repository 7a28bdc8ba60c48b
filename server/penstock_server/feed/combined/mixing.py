"""Checks the feeds that `Feed.mix` combines, and makes the options of the mix. Each error says what to do.

A mix of mixes is one mix: the feeds of a mix within it take its place, with the weights multiplied.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from penstock_proto.value_text import shown

from ..objects.endless_items import EndlessItems
from ..objects.indexables import is_indexable, is_keras
from ..options.feed_options import FeedOptions
from ..options.values import MAX_INTERLEAVE, OnError, Pad, Shuffle
from .component_options import agreed_batch_size, check_component
from .mixed import NAME, Mixed, is_mix

_MOST = 256
"""Most components of a mix."""

_OWN = ("cache", "rebatch")
"""Options that each component of a mix has on its own, besides those that define its samples."""

_INSTEAD = {
    "batch_transform": "is not for Feed.mix: let its feeds yield whole batches, with batch_size=None, and give the "
    "function as transform=. Then each batch comes from one of the feeds"
}
"""Options that neither a mix nor its components can have."""


def mixed(feeds: Any, weights: Any, stop: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a feed that draws from `feeds`.

    Raises:
        TypeError, ValueError: they cannot be mixed; the message says what to do.
    """
    if not isinstance(feeds, Mapping):
        raise TypeError(f'Feed.mix takes a dict of feeds, Feed.mix({{"a": a, "b": b}}), got {shown(feeds)}')
    if not 2 <= len(feeds) <= _MOST:
        raise ValueError(f"Feed.mix needs 2 to {_MOST} feeds, got {len(feeds)}")
    if any(not isinstance(label, str) or not label or len(label) > 128 for label in feeds):
        raise TypeError(f"the names of feeds in Feed.mix must be text of 1 to 128 characters, got {shown(list(feeds))}")
    if stop not in ("first", "all"):
        raise ValueError(f"stop must be 'first' or 'all', got {stop!r}")
    for refused in ("generate", "method", "args", "kwargs", "splits", "segment"):
        if refused in options:
            raise TypeError(f"{refused}= belongs to the feeds that Feed.mix combines: leave it out")
    for refused in _OWN:
        if refused in options:
            raise ValueError(f"{refused}= belongs to the feeds that Feed.mix combines: give it to those that need it")
    if options.get("batch_transform") is not None:
        raise ValueError(f"batch_transform= {_INSTEAD['batch_transform']}")
    for label, feed in feeds.items():
        counted = isinstance(feed, FeedOptions) and (feed.segment is not None or is_mix(feed))
        check_component(label, feed, NAME, also=("samples", *_OWN) if counted else _OWN, instead=_INSTEAD)
        _check_source(label, feed)
    batch_size = agreed_batch_size(feeds, NAME, options)
    feeds, weights = _without_mixes(feeds, _normalised(weights, list(feeds)), stop)
    shuffle = Shuffle.of(options.get("shuffle", 0))
    if (shuffle.interleave or 1) * len(feeds) > MAX_INTERLEAVE:
        raise ValueError(
            f"shuffle={shuffle} opens {shuffle.interleave} splits of each of {len(feeds)} feeds, and a lane may have "
            f"{MAX_INTERLEAVE} open: make interleave smaller"
        )
    source = Mixed(feeds, weights, stop)
    found = {**options, "generate": source, "batch_size": batch_size}
    if "samples" in options and options["samples"] is not None:
        _check_samples(source, options["samples"])
    elif not _leaves_out(options):
        found["samples"] = source.samples
    if source.endless:
        if options.get("epochs") is not None:
            raise ValueError(
                f"epochs={options['epochs']} cannot work, as this mix has one endless epoch: {_ENDING}, or leave "
                "epochs= out"
            )
        found["segment"] = source.segment
    return found


def _leaves_out(options: Mapping[str, Any]) -> bool:
    """Return whether a mix with these options may leave out samples, so that nobody knows how many an epoch has."""
    batching = options.get("batching")
    drops = isinstance(batching, Pad) and batching.too_long == "drop"
    return drops or OnError.of(options.get("on_error", "raise")).action == "skip"


_ENDING = "give samples= to a feed with segment= (with stop='all', to each of them)"


def _check_source(label: str, feed: Any) -> None:
    if is_keras(feed.generate) or isinstance(feed.generate, EndlessItems):
        raise ValueError(
            f"{label} is a Keras dataset, whose items are whole batches and change from epoch to epoch: give a "
            "generator of the samples that it reads"
        )
    if is_indexable(feed.generate):
        raise ValueError(
            f"{label} is an object that can be indexed, and a mix is drawn from splits: give it as a generator with "
            "ranges of indices as splits=, `def rows(r): return (data[i] for i in range(*r))` with "
            "splits=[(0, 1000), (1000, 2000), ...]"
        )


def _normalised(weights: Any, labels: list[str]) -> dict[str, float]:
    """Return the weights with a sum of 1."""
    if weights is None:
        weights = dict.fromkeys(labels, 1.0)
    if not isinstance(weights, Mapping):
        raise TypeError(f'weights must be a dict, weights={{"{labels[0]}": 2, ...}}, got {shown(weights)}')
    if missing := [label for label in labels if label not in weights]:
        raise ValueError(f"weights= has none for {', '.join(missing)}: give one for each feed")
    if unknown := [str(label) for label in weights if label not in labels]:
        raise ValueError(f"weights= names {', '.join(unknown)}, and the feeds are {', '.join(labels)}")
    for label in labels:
        weight = weights[label]
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise TypeError(f"the weight of {label} must be a number, got {shown(weight)}")
        if not 0 < weight < math.inf:
            raise ValueError(
                f"the weight of {label} must be greater than 0, got {weight}: leave out a feed to mix none of it"
            )
    total = math.fsum(weights[label] for label in labels)
    return {label: weights[label] / total for label in labels}


def _without_mixes(
    feeds: Mapping[str, Any], weights: Mapping[str, float], stop: str
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the feeds and their weights, with the feeds of each mix in its place, as "its name/their name".

    They get its transforms after their own.
    """
    found: dict[str, tuple[Any, float]] = {}
    for label, feed in feeds.items():
        inner = {label: (feed, weights[label])}
        if is_mix(feed):
            if feed.generate.stop != stop:
                raise ValueError(
                    f"{label} is a mix with stop={feed.generate.stop!r}, and this one has stop={stop!r}: a mix of "
                    "mixes is one mix, so give all of them the same stop="
                )
            inner = {
                f"{label}/{name}": (_transformed(part, feed), weights[label] * feed.generate.weights[name])
                for name, part in feed.generate.parts.items()
            }
        if taken := sorted(inner.keys() & found.keys()):
            raise ValueError(f"two feeds of this mix have the name {taken[0]}: give one of them another name")
        found |= inner
    if len(found) > _MOST:
        raise ValueError(f"Feed.mix needs 2 to {_MOST} feeds, got {len(found)}, with those of the mixes in it")
    if long := [label for label in found if len(label) > 128]:
        raise ValueError(f"the name {long[0]} of a feed in a mix has more than 128 characters: give shorter names")
    _check_weights({label: weight for label, (_, weight) in found.items()})
    return {label: feed for label, (feed, _) in found.items()}, {label: weight for label, (_, weight) in found.items()}


def _transformed(feed: Any, mix: Any) -> Any:
    if mix.transform is None:
        return feed
    return dataclasses.replace(feed, transform=[*_listed(feed.transform), *_listed(mix.transform)])


def _listed(transform: Any) -> list[Any]:
    if transform is None:
        return []
    return list(transform) if isinstance(transform, list | tuple) else [transform]


def _check_weights(found: Mapping[str, float]) -> None:
    if least := [label for label, weight in found.items() if weight < 1e-9]:
        raise ValueError(f"the weight of {least[0]} is less than a billionth of all: it would never be drawn")


def _check_samples(source: Mixed, samples: Any) -> None:
    if source.endless:
        raise ValueError(f"samples={samples} cannot end this mix, which has no end: {_ENDING}")
    if source.stop == "first":
        raise ValueError(
            f"samples={samples} cannot be promised with stop='first', as the draws decide when a feed has no more: "
            "leave samples= out"
        )
