"""What jobs of one feed share, in a line for people."""

from __future__ import annotations

from .feed_status import Feed
from .status_shape import Status


def what_is_shared(status: Status, feed: Feed) -> str:
    """Return how many jobs of a feed share its batches, and how many batches were made and sent; "" if none share."""
    jobs = {stream.stream: stream.jobs for stream in status.streams if stream.feed == feed.name}
    sharing = sum(there for there in jobs.values() if there > 1)
    if not sharing:
        return ""
    every = sum(jobs.values())
    who = f"{sharing} jobs share" if sharing == every else f"{sharing} of {every} jobs share"
    return f"{who}: {feed.made:,} batches made, {feed.sent.batches:,} sent"
