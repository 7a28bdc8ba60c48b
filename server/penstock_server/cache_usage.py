"""How the caches of feeds are used, added up from what workers say, for the status and the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_proto.messages import CacheUsed, FeedPlan


@dataclass(slots=True)
class CacheUsage:
    """The use of a feed's cache since the daemon was started.

    Attributes:
        hits: splits that were read from it.
        misses: splits for which the generator ran.
        written: splits that were written to it.
        nbytes: in its directory: counted at the start, and what was written since.
        problem: why a split was not written or not read, such as "not written: No space left on device"; empty if one
            was written since.
    """

    hits: int = 0
    misses: int = 0
    written: int = 0
    nbytes: int = 0
    problem: str = ""


class CacheUsages:
    """The use of the caches of all feeds.

    Args:
        warn_once: logs a warning, unless the same was logged before.
    """

    def __init__(self, warn_once: Callable[[str], None]) -> None:
        self._warn_once = warn_once
        self._used: dict[str, CacheUsage] = {}

    def of(self, feed: str) -> CacheUsage:
        """Return the use of a feed's cache."""
        return self._used.setdefault(feed, CacheUsage())

    def note(self, said: CacheUsed) -> None:
        """Add what a worker says."""
        used = self.of(said.feed)
        used.hits += said.hits
        used.misses += said.misses
        used.written += said.written
        used.nbytes = said.nbytes + (used.nbytes if said.stored is None else said.stored)
        if said.written or said.problem:
            used.problem = said.problem
        if said.problem:
            self._warn_once(warning_of(said.feed, said.problem))


def warning_of(feed: str, problem: str) -> str:
    """Return the words for the log."""
    return (
        f"feed {feed}, cache: {problem}. The stream goes on: the generator runs again for splits that are not in the "
        "cache"
    )


def status_of(plan: FeedPlan, used: CacheUsage) -> dict[str, object] | None:
    """Describe the cache of a feed as JSON types; None if it has none."""
    if plan.cache is None:
        return None
    return {
        "directory": plan.cache,
        "bytes": used.nbytes,
        "hits": used.hits,
        "misses": used.misses,
        "written": used.written,
        "problem": used.problem or None,
    }
