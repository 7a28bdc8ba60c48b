"""Remembers for `penstock top` how fast each feed was between the latest looks at the status. No I/O."""

from __future__ import annotations

from collections import deque

from penstock_proto.status.status_shape import Status

HISTORY = 30
"""How many looks it remembers."""


class Looks:
    """The latest status of a daemon, and the speeds of its feeds at earlier looks."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._rates: dict[str, deque[float]] = {}

    @property
    def latest(self) -> Status:
        """The latest status. There is one after `add`."""
        assert self._status is not None
        return self._status

    def add(self, status: Status) -> None:
        """Add a status. Forget the statuses of an earlier daemon at the same address."""
        before, self._status = self._status, status
        if before is None or before.id != status.id:
            self._rates.clear()
            return
        seconds = status.seconds - before.seconds
        sent = {feed.name: feed.sent.batches for feed in before.feeds}
        for feed in status.feeds:
            more = feed.sent.batches - sent.get(feed.name, 0)
            if seconds > 0:
                self._rates.setdefault(feed.name, deque(maxlen=HISTORY)).append(more / seconds)

    def rates(self, feed: str) -> tuple[float, ...]:
        """Return the batches per second of a feed between the latest looks."""
        return tuple(self._rates.get(feed, ()))
