"""How long a client waits for a daemon whose feeds are being started.

A client that was given no time waits as long as the daemon makes progress. A daemon makes progress while it answers
that it imports modules, lists splits or makes first samples, however long that takes: only the user knows how long the
user's code needs. It makes none if nobody answers, if it stops, or if a feed has failed and is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .status_shape import Status

NO_PROGRESS = 30.0
"""Seconds without progress after which a client gives up, if it was given no other time."""


def progresses(state: Status) -> bool:
    """Return whether a daemon with this status is about to serve its feeds."""
    return not (state.draining or state.ready or state.failing)


class Patience:
    """A wait for a daemon: for a number of seconds, or also as long as the daemon makes progress.

    Args:
        seconds: how long to wait.
        on_progress: called when the daemon makes progress: the wait then lasts at least `NO_PROGRESS` seconds more.
            None: progress does not matter.

    Attributes:
        until: when the wait ends, as far as is known now (monotonic).
        state: the daemon's latest status, or None.
    """

    def __init__(self, seconds: float, on_progress: Callable[[], None] | None = None) -> None:
        self.state: Status | None = None
        self._seconds = seconds
        self._on_progress = on_progress
        self._began = time.monotonic()
        self.until = self._began + seconds

    def heard(self, state: Status) -> None:
        """Note the daemon's status."""
        self.state = state
        if self._on_progress is not None and progresses(state):
            self._on_progress()
            self.until = max(self.until, time.monotonic() + NO_PROGRESS)

    @property
    def fixed(self) -> bool:
        """Whether progress does not matter."""
        return self._on_progress is None

    @property
    def seconds(self) -> float:
        """How long the wait is, or was if it is over."""
        return max(self._seconds, self.until - self._began)

    @property
    def lasted(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the wait ends; 0 if it is over."""
        return max(0.0, self.until - time.monotonic())
