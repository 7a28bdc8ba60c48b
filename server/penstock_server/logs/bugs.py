"""Unexpected errors: all are counted, and one for each place that raises them is logged with its traceback.

The status shows the number, so that a daemon that goes on after such an error does not hide it, and the tests check
that it is 0.
"""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger(__name__)


class Bugs:
    """Counts and logs unexpected errors.

    Attributes:
        count: number of errors so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: set[tuple[str, str, int | None]] = set()

    def note(self, error: BaseException) -> None:
        """Count an error, and log it if its place is new."""
        self.count += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = type(error).__name__, frames[-1].filename if frames else "", frames[-1].lineno if frames else 0
        if place not in self._known:
            self._known.add(place)
            log.critical(
                "unexpected error; please report this as a bug", exc_info=error, extra={"event": "internal_error"}
            )
