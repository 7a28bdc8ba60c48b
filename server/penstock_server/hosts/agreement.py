"""Checks that a joining host agrees with the head, so that its workers make the same batches."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence

from msgspec import structs

from penstock_proto import StartError, distribution
from penstock_proto import messages as m
from penstock_proto.params import split_params

from ..targets import saved_sources
from ..targets.file_target import is_file_target
from ..targets.pickled import is_pickled_target
from ..targets.place import file_of, place_of


def versions() -> dict[str, str]:
    """Return the versions on which batches depend, as fields of a Join."""
    import importlib.metadata  # slow to import, and only for hosts that join

    return {
        "penstock": distribution.version(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": importlib.metadata.version("numpy"),
    }


def sources(feeds: Sequence[str]) -> tuple[m.Source, ...]:
    """Return the SHA-256 of the file of each MODULE:ATTR, as workers import it (saved_sources.py), without importing it
    here. For a feed of data files, it is the SHA-256 of its target (file_target.py).

    Raises:
        StartError: there is no such module.
    """
    return tuple(m.Source(_shown(feed), _digest(feed)) for feed in feeds)


def differences(join: m.Join, here: dict[str, str], ours: tuple[m.Source, ...]) -> str:
    """Return the first difference between a joining host and the head, with both sides, or ""."""
    names = {"penstock": "Penstock", "python": "Python", "numpy": "NumPy"}
    for field, name in names.items():
        theirs = getattr(join, field)
        if theirs != here[field]:
            return f"it has {name} {theirs}, and the head has {here[field]}: install the same version on both"
    theirs_shown, ours_shown = ([source.feed for source in side] for side in (join.sources, ours))
    if [_attribute(feed) for feed in theirs_shown] != [_attribute(feed) for feed in ours_shown]:
        return (
            f"it serves {', '.join(theirs_shown)}, and the head serves {', '.join(ours_shown)}: give the same feeds in "
            "the same order"
        )
    for theirs_one, our_one in zip(join.sources, ours, strict=True):
        if theirs_one.digest != our_one.digest:
            return (
                f"its file of {theirs_one.feed} (SHA-256 {theirs_one.digest.hex()[:12]}) is not that of {our_one.feed} "
                f"at the head ({our_one.digest.hex()[:12]}): copy the head's file to it"
            )
    return ""


def plan_differences(theirs: tuple[m.FeedPlan, ...], ours: tuple[m.FeedPlan, ...]) -> str:
    """Return the first difference between the feeds as imported there and here, with both sides, or "". Their order
    does not matter: feeds are imported in order, but served as soon as each can be."""
    by_name = {plan.name: plan for plan in ours}
    for one in theirs:
        other = by_name.get(one.name)
        if other is None:
            return f"it has a feed {one.name}, and the head has {', '.join(by_name)}"
        for field in structs.fields(m.FeedPlan):
            there, here = getattr(one, field.name), getattr(other, field.name)
            if field.name != "warnings" and there != here:
                same = "import the same modules and see the same files"
                if field.name == "params":
                    same = "get the same --param"
                return (
                    f"its feed {one.name} has {field.name} {_short(there)}, and the head's has {_short(here)}: see "
                    f"that both {same}"
                )
    count = len({plan.name for plan in theirs})
    return "" if count == len(ours) else f"it has only {count} of the head's {len(ours)} feeds"


def _digest(feed: str) -> bytes:
    if is_file_target(feed) or is_pickled_target(feed):
        return hashlib.sha256(feed.encode()).digest()
    place = place_of(feed)
    found = place.path or file_of(place.name)
    if found is None:
        raise StartError(f"there is no module {place.name} in {os.getcwd()} or on the Python path")
    try:
        return hashlib.sha256(saved_sources.read(found)).digest()
    except OSError as error:
        raise StartError(f"cannot read {found}: {error.strerror}") from None


def folder(feeds: Sequence[str]) -> str:
    """Return the folder of the first feed's file, with a slash at the end, or "". Hosts may have different ones."""
    for feed in feeds:
        if not is_file_target(feed) and not is_pickled_target(feed):
            place = place_of(feed)
            found = place.path or file_of(place.name)
            return "" if found is None else os.path.join(os.path.dirname(os.path.abspath(found)), "")
    return ""


def _attribute(feed: str) -> str:
    return feed.rpartition(":")[2]


def _shown(feed: str) -> str:
    return split_params(feed)[0][:1000] if not is_file_target(feed) else "data files"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
