"""A log that peers cannot flood: of each kind of line so many a minute, and then how many were left out."""

from __future__ import annotations

import logging
from collections import Counter

MOST = 50
"""Lines of a kind in a minute."""
MINUTE = 60.0


class RateLimitedLog:
    """Writes to `log`. The kind of a line is its text before values are filled in."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: Counter[str] = Counter()
        self._began = 0.0

    def info(self, text: str, *values: object) -> None:
        """As that of a logger."""
        self._say(logging.INFO, text, values)

    def warning(self, text: str, *values: object) -> None:
        """As that of a logger."""
        self._say(logging.WARNING, text, values)

    def error(self, text: str, *values: object) -> None:
        """As that of a logger."""
        self._say(logging.ERROR, text, values)

    def look_at_the_clock(self, now: float) -> None:
        """Begin another minute when this one is over."""
        if now - self._began < MINUTE:
            return
        self._began = now
        said, self._said = self._said, Counter()
        for text, times in said.items():
            if times > MOST:
                self._log.warning("%d more lines of this kind were left out: %s", times - MOST, text)

    def _say(self, level: int, text: str, values: tuple[object, ...]) -> None:
        self._said[text] += 1
        if self._said[text] <= MOST:
            self._log.log(level, text, *values)
