"""One deadline for several steps, so that no peer gains time by taking many of them."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a time of `seconds` seconds, at `at` (monotonic)."""

    seconds: float
    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline that is `seconds` seconds away."""
        return cls(seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then; 0 if it has passed."""
        return max(0.0, self.at - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` seconds away if that is sooner."""
        return min(self, Deadline.after(seconds), key=lambda one: one.at)
