"""Detects a loop that makes a new dataset for each epoch, and so reads the first epoch of a feed again and again.

The stream of a new connection begins at epoch 0. A training loop that connects in each epoch trains on the same batches
in the same order each time, and nothing fails. Many programs open a feed more than once for good reasons, so the
warning comes only if all of this holds:

- The stream begins at the feed's very beginning: without a state, and not in a group, whose stream continues.
- Epochs of the feed certainly differ: it is shuffled, or made of segments. (Validation data is usually neither, and
  should be the same each time.) It was not made with `epochs=1`.
- Two streams before it, each opened after the one before was done, read the first epoch to its end, or `MANY` batches
  of it, and never began another: this is the third time in a row.
- No other stream of this process, of any feed, is being read, or has begun a later epoch or resumed from a state since.
  Such a stream would be the training, and these reads evaluations.

It comes once for each feed. Nothing here is called for each batch.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref

from penstock_proto.messages import FeedInfo

logger = logging.getLogger("penstock")

TIMES = 2
"""Consecutive reads of a first epoch after which one more is worth the warning."""
MANY = 100
"""An epoch that was left early counts as read if at least this many batches were handed over."""


def may_repeat(info: FeedInfo) -> bool:
    """Return whether a training loop that reads the first epoch of this feed again makes a mistake."""
    return info.epochs != 1 and (info.shuffle > 0 or info.segment is not None)


class StreamRegistry:
    """The streams of this process. Its methods may be called on any thread."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all streams. In a forked child they are the parent's, and the lock may be held."""
        self._lock = threading.Lock()
        self._alive: weakref.WeakSet[StreamReads] = weakref.WeakSet()
        self._times: dict[str, int] = {}
        self._warned: set[str] = set()

    def register(self, feed: str | None, goes_on: bool = False) -> StreamReads:
        """Register a stream that begins with the first epoch of `feed` (None: do not count it). `goes_on`: it continues
        from a state instead."""
        with self._lock:
            reads = StreamReads(self, feed, self._times.get(feed or "", 0), goes_on)
            self._alive.add(reads)
            return reads

    def _on_epoch_begun(self, reads: StreamReads) -> bool:
        """Note that an epoch begins. Return whether that is worth the warning."""
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

    def _on_epoch_ended(self, reads: StreamReads, whole: bool) -> None:
        with self._lock:
            if reads.within and whole and reads.feed is not None and not reads.counted:
                reads.counted = True
                self._times[reads.feed] = self._times.get(reads.feed, 0) + 1
            reads.within = False


class StreamReads:
    """The reads of one stream. Made by `StreamRegistry.register`.

    Attributes:
        feed: the feed whose first epoch the stream begins with, or None.
        before: how often this epoch was read before the stream was opened.
        begun: whether an epoch was begun, in this stream or before its state was taken.
        within: whether an epoch is being read.
        counted: whether the first epoch was counted.
    """

    def __init__(self, registry: StreamRegistry, feed: str | None, before: int, goes_on: bool) -> None:
        self._registry = registry
        self.feed = feed
        self.before = before
        self.begun = goes_on
        self.within = self.counted = False

    def begin(self, url: str) -> None:
        """Begin an epoch of the stream at `url`. If that is worth the warning, log it."""
        if self._registry._on_epoch_begun(self):
            logger.warning(
                "%s: a new connection reads epoch 0 of this feed again and gets the same batches as the %d times "
                "before. Create the dataset (or connection) once and iterate over it once per epoch, or resume where "
                "the last one stopped: connect(state=...)",
                url,
                self.before,
            )

    def end(self, whole: bool) -> None:
        """End the epoch. `whole`: it counts as read; otherwise it was left. May be called again."""
        self._registry._on_epoch_ended(self, whole)


registry = StreamRegistry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=registry.forget)
