"""Checks the feeds that `Feed.zip` combines, and makes the options of the combined feed. Each error says what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock_proto.value_text import shown

from ..objects.endless_items import EndlessItems
from ..objects.indexables import is_keras
from ..options.feed_options import FeedOptions
from ..options.generator_call import Wants
from ..options.transforms import checked_transforms
from .component_options import agreed_batch_size, check_component
from .feed_kinds import KINDS, kind_of
from .mixed import is_mix
from .zipped import NAME, Form, StaticPairs, Zipped, ZippedItems, ZippedSplits

_INSTEAD = {
    "cache": (
        "Feed.zip cannot use, as it keeps no splits: leave it out, or read both in one generator and give that cache="
    ),
    "rebatch": (
        "Feed.zip cannot use for one feed, as it pairs what generators yield: if all of them yield batches of the same "
        "sizes, give each batch_size=None, and rebatch= to Feed.zip"
    ),
}
"""Why a zip cannot have these options, and what to do instead."""


def zipped(feeds: Sequence[Any], uneven: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a feed that zips `feeds`: feeds, or one dict of feeds.

    Raises:
        TypeError, ValueError: they cannot be zipped; the message says what to do.
    """
    keys = len(feeds) == 1 and isinstance(feeds[0], Mapping)
    parts = dict(feeds[0]) if keys else {f"part {number}": feed for number, feed in enumerate(feeds)}
    if not keys and len(feeds) == 1 and isinstance(feeds[0], list | tuple):
        raise TypeError(
            "Feed.zip takes feeds, Feed.zip(a, b), or a dict of feeds, and got a list: write Feed.zip(*feeds)"
        )
    if any(not isinstance(label, str) for label in parts):
        raise TypeError(f"the keys of Feed.zip are those of its samples, so they are text, got {shown(list(parts))}")
    if len(parts) < 2:
        raise ValueError(f"Feed.zip needs two feeds or more, got {len(parts)}")
    if uneven not in ("warn", "raise", "allow"):
        raise ValueError(f"uneven must be 'warn', 'raise' or 'allow', got {uneven!r}")
    for refused in ("generate", "method", "args", "kwargs", "splits", "segment"):
        if refused in options:
            raise TypeError(f"{refused}= belongs to the feeds that Feed.zip combines: leave it out")
    if "cache" in options:
        raise ValueError(f"cache= is given, which {_INSTEAD['cache']}")
    for label, feed in parts.items():
        check_component(label, feed, NAME, instead=_INSTEAD)
        if is_keras(feed.generate) or isinstance(feed.generate, EndlessItems):
            raise ValueError(
                f"{label} is a Keras dataset, whose items are whole batches and change from epoch to epoch: let one "
                "dataset return both, or zip what it reads"
            )
        if any(one.yields for one in checked_transforms(feed.transform)):
            raise ValueError(
                f"the transform of {label} yields, and Feed.zip pairs samples one by one: give it to Feed.zip"
            )
        if is_mix(feed):
            raise ValueError(f"{label} is a mix, whose samples have no partners: zip the feeds first, and mix the zips")
    kind, form = _common_kind(parts), Form(tuple(parts) if keys else None)
    batch_size = agreed_batch_size(parts, NAME, options)
    if options.get("rebatch") is not None and batch_size is not None:
        raise ValueError(
            f"rebatch={options['rebatch']} takes whole batches apart, and the feeds yield samples: give batch_size= "
            "instead of rebatch=, or, if they yield batches, batch_size=None to each of them"
        )
    found: dict[str, Any] = {**options, "batch_size": batch_size}
    if kind == "items":
        return {"generate": ZippedItems(parts, form, uneven), **found}
    wants = Wants(split=kind in ("splits", "segments"), rng=False, epoch=False, shard=kind == "shards")
    found["generate"] = Zipped(parts, wants, form, uneven)
    if kind == "segments":
        found["segment"] = _common_segment(parts)
    elif kind == "splits":
        lists = {label: feed.splits for label, feed in parts.items()}
        splits = ZippedSplits(lists, uneven)
        found["splits"] = splits if any(callable(each) for each in lists.values()) else StaticPairs(splits)
    return found


def _common_kind(parts: Mapping[str, FeedOptions]) -> str:
    kinds = {label: kind_of(feed) for label, feed in parts.items()}
    if len(set(kinds.values())) == 1:
        return next(iter(kinds.values()))
    listed = ", and ".join(f"{label} {KINDS[kind]}" for label, kind in kinds.items())
    hint = "give each of them splits= of the same length, so that split k of one belongs to split k of the other"
    if "items" in kinds.values():
        hint = (
            "give the object as a generator with splits=, such as ranges of indices: "
            "`def rows(r): return (data[i] for i in range(*r))`"
        )
    raise ValueError(
        f"Feed.zip pairs splits with splits, segments with segments and items with items. {listed}: {hint}"
    )


def _common_segment(parts: Mapping[str, FeedOptions]) -> int | None:
    segments = {label: feed.segment for label, feed in parts.items()}
    if len(set(segments.values())) > 1:
        listed = ", ".join(f"{label} has segment={segment}" for label, segment in segments.items())
        raise ValueError(f"{listed}: a segment is paired with that of the same number, so give all of them the same")
    return next(iter(segments.values()))
