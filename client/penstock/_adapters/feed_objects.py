"""Feeds that are given as objects: how workers can import them, and whether workers import the same feed."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from penstock_proto import StartError
from penstock_proto.messages import FeedInfo

from .._stream import server_package

if TYPE_CHECKING:
    from penstock_server import Feed
    from penstock_server.targets.targets import Target

_COMPARED = ("batch_size", "drop_remainder", "epochs", "order", "seed", "segment", "shuffle")
"""The attributes of a feed that the daemon reports under the same names, unchanged. Of `shuffle` it reports the number
of samples."""


def require_feed(value: object) -> None:
    """Raise TypeError unless `value` is a Feed."""
    if not server_package.installed() or not isinstance(value, server_package.load("feed.feed").Feed):
        wanted = "expected the URL of a feed, MODULE:ATTR or a Feed, got"
        if inspect.isfunction(value):
            name = value.__name__
            instead = f"if it returns a Feed, give {name}(...), or its name as MODULE:{name} with params="
            if inspect.isgeneratorfunction(value):
                instead = f"give Feed({name}, splits=..., batch_size=...)"
            raise TypeError(f"{wanted} the function {name}: {instead}")
        raise TypeError(
            f'{wanted} {type(value).__name__}: write penstock.dataset("scenes.py:feed"), where scenes.py has '
            "feed = Feed(...)"
        )


def find(feed: Feed) -> Target:
    """Return how workers can import `feed`.

    Raises:
        StartError: they cannot; the message says what to do.
    """
    server_package.refuse_in_worker("a Feed")
    target: Target = server_package.load("targets.targets").target_of(feed)
    return target


def compare(feed: Feed, info: FeedInfo, target: str) -> None:
    """Compare `feed` with the feed that workers have imported as `target`.

    Raises:
        StartError: they differ.
    """
    for option in _COMPARED:
        here, there = getattr(feed, option), getattr(info, option)
        if option == "shuffle":
            here = here.samples
        if here != there and not (option == "drop_remainder" and info.endless):
            raise StartError(
                f"{target} has {option}={there!r} in the workers, and {option}={here!r} in this process: its file has "
                "changed since this process imported it. Import it again (importlib.reload), or restart"
            )
