"""The use of the feeds' caches, added up from workers' messages, for the status and the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock_proto.messages import CacheUsed
from penstock_proto.status.feed_status import Cache


@dataclass(slots=True)
class CacheUsage:
    """The use of the cache of a feed, or of one of the feeds of a mix, since the daemon was started.

    Attributes:
        hits: splits that were read from it.
        misses: splits for which the generator ran.
        written: splits that were written to it.
        nbytes: bytes in its directory: those at the start, and those written since.
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
        self._used: dict[tuple[str, str], CacheUsage] = {}

    def status(self, feed: str, part: str, directory: str | None) -> Cache | None:
        """Describe the cache of a feed for the status. Return None if it has none (no `directory`).

        Args:
            feed: name of the feed.
            part: name of one of the feeds of a mix, or "".
            directory: the cache's directory.
        """
        if directory is None:
            return None
        used = self._used.get((feed, part), CacheUsage())
        return Cache(
            directory=directory,
            bytes=used.nbytes,
            hits=used.hits,
            misses=used.misses,
            written=used.written,
            problem=used.problem or None,
        )

    def note(self, said: CacheUsed) -> None:
        """Add a worker's report."""
        used = self._used.setdefault((said.feed, said.part), CacheUsage())
        used.hits += said.hits
        used.misses += said.misses
        used.written += said.written
        used.nbytes = said.nbytes + (used.nbytes if said.stored is None else said.stored)
        if said.written or said.problem:
            used.problem = said.problem
        if said.problem:
            self._warn_once(warning_of(said))


def warning_of(said: CacheUsed) -> str:
    """Return the log message for a problem."""
    name = f"{said.feed}, {said.part}" if said.part else said.feed
    return (
        f"feed {name}, cache: {said.problem}. The stream goes on: the generator runs again for splits that are not in "
        "the cache"
    )
