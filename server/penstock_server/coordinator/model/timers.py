"""Timers: calls that are due later. The coordinator has no clock; it says when it needs the next Tick."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count


class Timers:
    """Calls to be made later. `now` is the time of the current event, in seconds from an arbitrary start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Make the call in `seconds` seconds."""
        heapq.heappush(self._calls, (self.now + seconds, next(self._count), call))

    @property
    def next(self) -> float | None:
        """The time at which the next call is due; None if there is none."""
        return self._calls[0][0] if self._calls else None

    @property
    def times(self) -> list[float]:
        """The times at which calls are due."""
        return sorted(due for due, _, _ in self._calls)

    def due(self) -> Iterator[Callable[[], None]]:
        """Take the calls that are due, soonest first."""
        while self._calls and self._calls[0][0] <= self.now:
            yield heapq.heappop(self._calls)[2]
