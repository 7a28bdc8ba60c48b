"""The options that a component of `Feed.zip` or `Feed.mix` may set: those that define its samples, and no others.

Options for the order, for batches and for failures apply to all components together. So users give them to the combined
feed. A component that sets one is refused, because ignoring it silently would be worse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from penstock_proto.value_text import shown

from ...shuffling.permutation import make_key
from ..options.feed_options import FeedOptions
from ..options.short_repr import is_set

_OWN = frozenset(("generate", "method", "args", "kwargs", "transform", "splits", "segment", "batch_size", "name"))
"""Options that a component may set. Its `name` is for serving it on its own, and has no effect in a combined feed."""

_DEFAULTS = {field.name: field.default for field in fields(FeedOptions) if field.name not in _OWN and field.kw_only}


def check_component(
    label: str, feed: Any, combining: str, *, also: Sequence[str] = (), instead: Mapping[str, str] | None = None
) -> None:
    """Check that a component is a feed, and sets only options that define its samples.

    Args:
        label: the component's name, for errors.
        feed: the component, as the user gave it.
        combining: "Feed.zip" or "Feed.mix".
        also: further options that it may set.
        instead: for options that the combined feed cannot have either: the reason, and what to do instead.

    Raises:
        TypeError, ValueError: it cannot be combined.
    """
    if not isinstance(feed, FeedOptions):
        raise TypeError(f"{combining} combines feeds, and {label} is {shown(feed)}: give Feed(...)")
    for option, default in _DEFAULTS.items():
        value = getattr(feed, option)
        if is_set(value, default) and option not in also and not (option == "env" and not value):
            why = f"holds for the combined feed alone: leave it out there, and give it to {combining}"
            raise ValueError(f"{label} sets {option}={shown(value)}, which {(instead or {}).get(option, why)}")


def agreed_batch_size(feeds: Mapping[str, FeedOptions], combining: str, options: Mapping[str, Any]) -> int | None:
    """Return the batch size of a combined feed: the one in `options`, or else that of its components.

    Raises:
        ValueError: they differ, or some components yield whole batches and others samples.
    """
    sizes = {label: feed.batch_size for label, feed in feeds.items()}
    found: set[int | None] = set(sizes.values())
    if "batch_size" in options:
        found = {size and 1 for size in found} | {options["batch_size"] and 1}
        if len(found) == 1:
            return options["batch_size"]  # type: ignore[no-any-return]  # `Feed` checks it
    elif len(found) == 1:
        return found.pop()
    listed = ", ".join(f"{label} has batch_size={size}" for label, size in sizes.items())
    if None in found:
        raise ValueError(
            f"{listed}: with None a feed yields whole batches: give batch_size=None to all of them and to "
            f"{combining}, or to none"
        )
    raise ValueError(f"{listed}: give {combining} a batch_size=, or all of them the same")


def seed_of(seed: int, label: str) -> int:
    """Return the seed of the component `label` of a feed with this seed, so that two components draw different
    numbers."""
    return make_key(seed, "component", label) >> 2
