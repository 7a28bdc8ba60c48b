"""Errors that nobody expected: counted, and logged with a traceback, once for each place that raises them.

Counted, so that a daemon that goes on in spite of one does not hide it: status shows the number, and the tests hold it
to be 0.
"""

from __future__ import annotations

import logging
import traceback

log = logging.getLogger(__name__)


class Bugs:
    """See the file's head.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: set[tuple[str, str, int | None]] = set()

    def note(self, error: BaseException) -> None:
        """There was one more."""
        self.count += 1
        frames = traceback.extract_tb(error.__traceback__)
        place = type(error).__name__, frames[-1].filename if frames else "", frames[-1].lineno if frames else 0
        if place not in self._known:
            self._known.add(place)
            log.critical("something failed that should not have; please report this as a bug", exc_info=error)
