"""Notice a loop that makes a new dataset for each epoch, and so reads the first epoch of a feed again and again.

A new connection's stream begins at epoch 0. A training loop that connects in each epoch trains on the same batches in
the same order each time, and nothing fails. Many programs open a feed more than once and are right, so the warning
comes only where all of this is so:

- The stream begins at the feed's very beginning: without a state, and not in a group, whose stream goes on.
- Epochs of the feed differ for certain: it is shuffled, or made of segments. (Validation data mostly are neither, and
  reading them the same each time is what is wanted.) It was not made with `epochs=1`.
- Two streams before it, each opened when the one before was done, read the first epoch to its end, or `MANY` batches of
  it, and never began another: it is the third time in a row.
- No other stream of this process, of any feed, is being read, or has begun a later epoch or gone on from a state since.
  Where one has, or is, that is the training, and these are evaluations.

It comes once for each feed. Decisions alone, on any thread; no call for a batch.
"""

from __future__ import annotations

import os
import threading
import weakref

from penstock_proto.messages import FeedInfo

TIMES = 2
"""Reads of a first epoch, one after another, after which a further one is worth the warning."""
MANY = 100
"""Batches of an epoch that was left from which on it was read, and not just looked at."""


def may_repeat(info: FeedInfo) -> bool:
    """Whether reading the first epoch of a feed again is not what a training loop wants."""
    return info.epochs != 1 and (info.shuffle > 0 or info.segment is not None)


class StreamRegistry:
    """The streams of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Know of none. In a forked child: they are the parent's, and so may the lock be."""
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[StreamReads] = weakref.WeakSet()
        self._times: dict[str, int] = {}
        self._warned: set[str] = set()

    def opened(self, feed: str | None, goes_on: bool = False) -> StreamReads:
        """A stream was opened that begins with the first epoch of `feed` (None: that is nothing to count), or that
        `goes_on` from a state."""
        with self._lock:
            reads = StreamReads(self, feed, self._times.get(feed or "", 0), goes_on)
            self._alive.add(reads)
            return reads

    def _begins(self, reads: StreamReads) -> bool:
        with self._lock:
            later = reads.begun
            others = any(other.within for other in self._alive if other is not reads)
            reads.begun = reads.within = True
            if later:
                self._times.clear()
            if later or others or reads.feed is None or reads.before < TIMES or reads.feed in self._warned:
                return False
            self._warned.add(reads.feed)
            return True

    def _ends(self, reads: StreamReads, whole: bool) -> None:
        with self._lock:
            if reads.within and whole and reads.feed is not None and not reads.counted:
                reads.counted = True
                self._times[reads.feed] = self._times.get(reads.feed, 0) + 1
            reads.within = False


class StreamReads:
    """What one stream read. Made by `StreamRegistry.opened`.

    Attributes:
        feed: the feed whose first epoch it begins with, or None.
        before: how often that was read before it was opened.
        begun: whether an epoch was begun, in this stream or before its state was taken.
        within: whether one is being read.
        counted: whether its first epoch was counted.
    """

    def __init__(self, registry: StreamRegistry, feed: str | None, before: int, goes_on: bool) -> None:
        self._registry = registry
        self.feed = feed
        self.before = before
        self.begun = goes_on
        self.within = self.counted = False

    def begins(self) -> bool:
        """An epoch begins. Whether that is worth the warning."""
        return self._registry._begins(self)

    def ends(self, whole: bool) -> None:
        """The epoch was left, or read as a `whole`. May be called again."""
        self._registry._ends(self, whole)


registry = StreamRegistry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry.forget)
