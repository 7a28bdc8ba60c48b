"""The lists of splits of one feed that workers know: each is kept as long as somebody needs it.

Only feeds that list their splits for each epoch need this. A stream holds the list of each epoch that is open. A window
holds that of an epoch which some job still reads from it. A job that moves to another stream within an epoch finds its
list there.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct


class SplitsInfo(Struct, frozen=True):
    """A list of splits: the number under which it is known, how many it holds, and its SHA-256."""

    number: int
    count: int
    digest: bytes


class KnownLists:
    """The lists of one feed, with the number of their holders."""

    def __init__(self) -> None:
        self._lists: dict[int, tuple[int, SplitsInfo]] = {}
        """The epoch of each list, and the list, by its number."""
        self._holders: Counter[int] = Counter()

    def hold(self, epoch: int, splits: SplitsInfo) -> None:
        """Add a holder of the list of this epoch."""
        self._lists[splits.number] = epoch, splits
        self._holders[splits.number] += 1

    def release(self, splits: SplitsInfo) -> bool:
        """Remove a holder. Return whether it was the last, so that workers may forget the list."""
        self._holders[splits.number] -= 1
        if self._holders[splits.number]:
            return False
        del self._holders[splits.number], self._lists[splits.number]
        return True

    def find(self, epoch: int, digest: bytes) -> SplitsInfo | None:
        """Return a list of the epoch with this digest; None if none is known."""
        for number, splits in self._lists.values():
            if number == epoch and splits.digest == digest:
                return splits
        return None
