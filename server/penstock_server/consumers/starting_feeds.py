"""The progress of feeds at the daemon's start: which can be read, at which URL, and why the others cannot."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterable

from penstock_proto.status.figures import size

from ..coordinator import CoordinatorView
from ..feed.feed_warnings import mixing_warning, workers_warning

log = logging.getLogger(__name__)

SAY_AGAIN = 300
"""Seconds after which the log repeats why a feed cannot be started."""

WAITS = 30
"""Seconds after which the log repeats that trainers wait and there is no worker."""


class StartingFeeds:
    """Follows each feed from the daemon's start until its URL is logged.

    Args:
        coordinator: makes the decisions.
        feeds: number of feeds that the daemon is to serve.
        endpoint: the `tcp://address:port` at which the daemon listens.
        advertise: HOST or HOST:PORT for the feeds' URLs; None: the address of `endpoint`.
        on_ready: called with the URL of each feed once it can be read.

    Attributes:
        count: the number of feeds.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        *,
        feeds: int,
        endpoint: str,
        advertise: str | None,
        on_ready: Callable[[str], None],
    ) -> None:
        self._coordinator = coordinator
        self.count = feeds
        self._splits: dict[str, int] = {}
        self._on_ready = on_ready
        self._warned: set[str] = set()
        address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        host = socket.gethostname() if address in ("0.0.0.0", "[::]", "*") else address
        place = advertise or host
        self._root = f"tcp://{place if re.search(r':[0-9]+$', place) else f'{place}:{port}'}"

    @property
    def ready(self) -> bool:
        """Whether all feeds can be read."""
        return len(self._coordinator.feeds) == self.count

    def url(self, feed: str) -> str:
        """Return the URL of a feed."""
        return f"{self._root}/{feed}"

    def feed_ready(self, name: str, splits: int) -> None:
        """Handle a feed that can be read: report its URL, and warn if its `splits` do not suit its options."""
        feed = self._coordinator.feeds[name]
        fields = {"event": "feed_ready", "feed": name}
        log.info("feed %s: %s, slots of %s", name, feed.info.spec, size(feed.slot_nbytes), extra=fields)
        if splits:
            self._splits[name] = splits
            if text := mixing_warning(feed.plan, splits, feed.info.pool):
                self.warn_once(text)
            self.look_at_workers()
        if self.ready and not self._coordinator.workers.makers:
            text = "there are no workers here, so no batches are made until a host joins: penstock join %s FEED..."
            log.info(text, self._root, extra={"event": "no_workers"})
        self._on_ready(self.url(name))

    def look_at_workers(self) -> None:
        """Warn if a feed has too few lanes for the current number of workers."""
        there = self._coordinator.workers
        workers = len(set(there.makers) - there.leaving)
        for name, splits in self._splits.items():
            plan = self._coordinator.feeds[name].plan
            if workers and (text := workers_warning(plan, splits, workers)):
                self.warn_once(text)

    def warn_once(self, text: str) -> None:
        """Log a warning about a feed, unless it was logged before."""
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text, extra={"event": "feed_warning"})

    def look_at_the_clock(self, seconds: int, phase: Callable[[], str]) -> None:
        """Log from time to time which feeds are not ready yet, or that no worker makes batches of the streams that are
        read, `seconds` after the start. `phase` returns what keeps the feeds."""
        if seconds % WAITS == 0 and self._coordinator.streams and not self._coordinator.workers.makers:
            text = (
                "no worker makes batches, so trainers wait: start some on another host with penstock join %s FEED..., "
                "or here with penstock scale %s N"
            )
            log.warning(text, self._root, self._root, extra={"event": "no_workers"})
        failing = self._coordinator.starting.failing
        if seconds % SAY_AGAIN == 0:
            self.say_what_fails(failing)
        if seconds % 10 == 0 and not self.ready and not failing:
            log.info("not ready after %d s: %s", seconds, phase(), extra={"event": "starting"})

    def say_what_fails(self, feeds: Iterable[str]) -> None:
        """Log why these feeds cannot be started yet."""
        for name in feeds:
            failing = self._coordinator.starting.failing[name]
            text = "feed %s cannot be started yet, and is tried again (tries so far: %d): %s"
            fields = {"event": "feed_failing", "feed": name, "error": failing.error}
            log.error(text, name, failing.times, failing.error, extra=fields)
