"""A set of whole numbers, kept as ranges. Its size depends on how many gaps it has, not on how many numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ranges:
    """The numbers that were added, as sorted ranges with gaps between them."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._stops[at]

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` on, up to but not including `stop`."""
        first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if first < last:  # join the ranges that it touches
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]
