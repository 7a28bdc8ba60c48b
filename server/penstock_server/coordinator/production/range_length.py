"""How many batches a range has: as many as a worker makes in a moment, so that all workers advance together.

In an indexable feed the stream does not depend on how it is cut into ranges. So their length may follow measured times.
Each range costs the daemon, its worker and the trainer about a millisecond.
"""

from __future__ import annotations

MOMENT_MS = 100
"""A range that takes less is followed by longer ones, and one that takes twice as much by shorter ones."""

MOST_MS = 300
"""A worker stops within a range that takes longer, because the cost of samples has changed. All workers make the
rest."""


class RangeLength:
    """The length of the next range of a stream. It is one batch at first, because it is not known what a batch costs.

    Args:
        most: the most batches in a range.

    Attributes:
        batches: the length.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.batches = 1

    def on_made(self, batches: int, ms: int, *, last: bool) -> None:
        """Note that a worker has made so many batches of a range in `ms` milliseconds; with `last`, all of them."""
        if ms > 2 * MOMENT_MS:
            self.batches = max(1, min(self.batches, batches * MOMENT_MS // ms))
        elif last and ms < MOMENT_MS and batches >= self.batches:
            self.batches = min(self._most, 2 * batches)
