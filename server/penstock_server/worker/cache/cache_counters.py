"""Counts a process's reads from a feed's cache and its writes to it, until it reports them to the daemon."""

from __future__ import annotations

from penstock_proto.messages import CacheUsed


class CacheCounters:
    """The reads and writes since the last report to the daemon."""

    def __init__(self) -> None:
        self._hits = self._misses = self._written = self._nbytes = 0
        self._problem = ""
        self._stored: int | None = None

    def count_opened(self, *, hit: bool) -> None:
        """Count a split that was opened."""
        self._hits += hit
        self._misses += not hit

    def count_written(self, nbytes: int) -> None:
        """Count a split that was written, and forget an earlier problem."""
        self._written += 1
        self._nbytes += nbytes
        self._problem = ""

    def note_nbytes(self, nbytes: int) -> None:
        """Note the bytes in the directory, which include all splits written so far."""
        self._stored = nbytes
        self._nbytes = 0

    def note_problem(self, why: str) -> None:
        """Note that a split was "not written: ..." or "not read: ...", and why."""
        self._problem = why[:1024]

    def take(self, feed: str, part: str = "") -> CacheUsed | None:
        """Return the report for the daemon, and start again from zero. Return None if there is nothing to report.

        Args:
            feed: the name of the feed.
            part: the feed of a mix that has this cache, or "".
        """
        said = CacheUsed(
            feed=feed,
            part=part,
            hits=self._hits,
            misses=self._misses,
            written=self._written,
            nbytes=self._nbytes,
            stored=self._stored,
            problem=self._problem,
        )
        if said == CacheUsed(feed=feed, part=part):
            return None
        self._hits = self._misses = self._written = self._nbytes = 0
        self._problem, self._stored = "", None
        return said
