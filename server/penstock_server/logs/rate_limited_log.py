"""A log that peers cannot flood: at most `MOST` lines of a kind per minute, and then a count of the lines left out."""

from __future__ import annotations

import logging
from collections import Counter

MOST = 50
"""Most lines of a kind per minute."""
MINUTE = 60.0


class RateLimitedLog:
    """Writes to `log`. Two lines are of the same kind if their texts are equal before the values are filled in."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()
        self._began = 0.0

    def info(self, text: str, *values: object, **fields: object) -> None:
        """Log a line like the method of a logger, with these fields (see log_format.py)."""
        self._say(logging.INFO, text, values, fields)

    def warning(self, text: str, *values: object, **fields: object) -> None:
        """Log a line, like `info`."""
        self._say(logging.WARNING, text, values, fields)

    def error(self, text: str, *values: object, **fields: object) -> None:
        """Log a line, like `info`."""
        self._say(logging.ERROR, text, values, fields)

    def look_at_the_clock(self, now: float) -> None:
        """When a minute is over, begin the next one and log how many lines were left out."""
        if now - self._began < MINUTE:
            return
        self._began = now
        counts, self._counts = self._counts, Counter()
        for text, times in counts.items():
            if times > MOST:
                fields = {"event": "lines_left_out"}
                self._log.warning("left out %d more lines of this kind: %s", times - MOST, text, extra=fields)

    def _say(self, level: int, text: str, values: tuple[object, ...], fields: dict[str, object]) -> None:
        self._counts[text] += 1
        if self._counts[text] <= MOST:
            self._log.log(level, text, *values, extra=fields)
