"""The latest warnings and errors of the daemon's log, with tracebacks, for the page."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from penstock_proto import PenstockError

MOST = 100
_MOST_TEXT = 2000
_MOST_TRACEBACK = 8000


class Notices(logging.Handler):
    """Keeps the latest `MOST` warnings and errors. A repeated one is kept once, with the number of times that it came.

    It is a handler of the package's logger, so the page shows what the log shows.

    Attributes:
        changes: how many warnings and errors have come.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.changes = 0
        self._kept: dict[tuple[str, str, str], dict[str, Any]] = {}

    def begin(self) -> None:
        """Listen to the log."""
        logging.getLogger("penstock_server").addHandler(self)

    def end(self) -> None:
        """Stop listening."""
        logging.getLogger("penstock_server").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record of the log."""
        try:
            text, trace = _parts(record)
        except Exception:
            self.handleError(record)
            return
        key = record.levelname, text[:_MOST_TEXT], trace[-_MOST_TRACEBACK:]
        known = self._kept.pop(key, None)
        times = 1 if known is None else known["times"] + 1
        self._kept[key] = {
            **dict(zip(("level", "text", "traceback"), key, strict=True)),
            "event": getattr(record, "event", ""),
            "at": record.created,
            "times": times,
        }
        while len(self._kept) > MOST:
            del self._kept[next(iter(self._kept))]
        self.changes += 1

    def since(self, changes: int) -> dict[str, Any]:
        """Return the kept records, the latest last, as JSON types; none of them if no more than `changes` have come."""
        return {"changes": self.changes, "kept": None if changes == self.changes else list(self._kept.values())}


def _parts(record: logging.LogRecord) -> tuple[str, str]:
    """Return the text of a record and the traceback."""
    text, trace = record.getMessage(), str(getattr(record, "traceback", None) or "")
    for value in record.args if isinstance(record.args, tuple) else ():
        if isinstance(value, PenstockError) and value.remote_traceback:
            trace = value.remote_traceback.rstrip()
            text = text.replace(trace, "").rstrip()
    if record.exc_info and record.exc_info[1] is not None:
        trace = "".join(traceback.format_exception(record.exc_info[1]))
    return text, trace
