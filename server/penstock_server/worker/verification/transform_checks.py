"""Decides which batches a `batch_transform=` transforms once more, and reports if it makes another batch of one.

A function that draws without a seed, or keeps something from batch to batch, is noticed so while the feed is read. What
differs from process to process is noticed at the start (reproducibility.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from penstock_proto import messages as m

from ...feed.feed_warnings import MAY_LOSE_ROWS

SHARE = 0.01
"""The share of the transform's time that checks may take."""

FIRST = 4
"""Batches that are checked before time was saved for them."""

FIRST_SECONDS = 0.2
"""Seconds that one of these first batches may take."""


class TransformChecks:
    """The checks of one feed in one worker.

    Args:
        feed: the feed's name.
        send: sends a message to the daemon.
    """

    def __init__(self, feed: str, send: Callable[[m.TransformDiffers], None]) -> None:
        self._feed = feed
        self._send = send
        self._saved = 0.0
        """Seconds that checks may take now."""
        self._takes = 0.0
        """Seconds that the latest batch took, so about what a check takes."""
        self._first = FIRST
        self._found = False

    @property
    def is_due(self) -> bool:
        """Whether to transform the next batch twice."""
        if self._found or not self._takes:  # before the first batch, nobody knows how long one takes
            return False
        if sys.gettrace() is not None:  # the user debugs the feed
            return False
        return self._saved > self._takes or (self._first > 0 and self._takes <= FIRST_SECONDS)

    def on_transformed(self, seconds: float) -> None:
        """Note how long a batch took."""
        self._takes = seconds
        self._saved += SHARE * seconds

    def on_checked(self, seconds: float, different: str) -> None:
        """Note that a batch was transformed once more, which took `seconds`. `different`: the function, and the place
        of the batch, if it made another one; or empty."""
        self._first -= 1
        self._saved = max(0.0, self._saved - seconds)
        if different:
            self._found = True
            text = f"feed {self._feed}: {different} gave another batch when it was called once more. {MAY_LOSE_ROWS}"
            self._send(m.TransformDiffers(self._feed, text[:1024]))
