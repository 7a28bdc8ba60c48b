"""The share of the daemon's thread that answers to pages and monitoring may take: all streams need that thread."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.25
"""Maximum seconds of CPU time per second. What one answer takes beyond that, later seconds pay."""
REQUEST = 0.0003
"""CPU seconds that a request takes in any case."""


class Budget:
    """Measures the work in its `with` blocks.

    Args:
        clock: returns the CPU time of this thread in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._spent = 0.0
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *_: object) -> None:
        self._spent += self._clock() - self._began

    def admits(self) -> bool:
        """Return whether another request can be answered in this second, and count it if so."""
        if self._spent >= SHARE:
            return False
        self._spent += REQUEST
        return True

    def another_second(self) -> None:
        """Begin another second."""
        self._spent = max(0.0, self._spent - SHARE)
