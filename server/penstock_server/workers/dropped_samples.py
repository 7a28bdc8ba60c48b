"""Counts the samples that feeds have dropped, for the status.

A worker reports, with each batch, how many the lane has dropped so far in its epoch. So batches that are made again
after a fault count once, and this file needs only the largest number of each lane.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from penstock_proto.messages import Made

from ..coordinator import CoordinatorView
from ..coordinator.stream.stream import Stream


class DroppedSamples:
    """The numbers of dropped samples, by feed.

    Args:
        coordinator: knows the stream, epoch and lane of a run.
    """

    def __init__(self, coordinator: CoordinatorView) -> None:
        self._coordinator = coordinator
        self._of_lanes: WeakKeyDictionary[Stream, dict[tuple[int | None, int | None], int]] = WeakKeyDictionary()
        self._of_feeds: dict[str, int] = {}

    def of(self, feed: str) -> int:
        """Return how many samples the feed has dropped in the epochs that were read."""
        return self._of_feeds.get(feed, 0)

    def note(self, made: Made) -> None:
        """Add a worker's report."""
        stream = self._coordinator.stream_of(made.run) if made.dropped else None
        if stream is None:
            return
        place = stream.place_of(made.run)
        lanes = self._of_lanes.setdefault(stream, {})
        more = made.dropped - lanes.get(place, 0)
        if place[0] is not None and more > 0:
            lanes[place] = made.dropped
            self._of_feeds[stream.feed.name] = self.of(stream.feed.name) + more
