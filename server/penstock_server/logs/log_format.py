"""The formats of the daemon's log: lines for people, or a JSON object for each event.

A log call passes the fields of its event in `extra=`, and its text says the same in words:

    log.info("worker %d is ready", number, extra={"event": "worker_ready", "worker": number})
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import time
from typing import Any

from penstock_proto import PenstockError
from penstock_proto.text import printable

FIELDS = ("event", "feed", "epoch", "lane", "split", "worker", "consumer")
"""The fields of `extra`, besides `traceback` (a text) and `error` (a PenstockError, which knows its feed, worker and
split)."""

MINUTE = 60.0
"""How long the same traceback is not written again, in seconds."""

_TRACEBACKS = 16

TEXT = "%(asctime)s %(levelname)-7s penstock: %(message)s"


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON: time, level, event, message, the fields that apply, host, traceback."""

    def __init__(self) -> None:
        super().__init__()
        self._host = socket.gethostname()

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": "log",
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in FIELDS if record.__dict__.get(name) is not None}
        line["host"] = self._host
        traceback = record.__dict__.get("traceback")
        error = record.__dict__.get("error")
        if isinstance(error, PenstockError):  # the text ends with its place and its traceback
            traceback = error.remote_traceback
            line["message"] = line["message"].replace(str(error), error.message)
            line |= {
                name: getattr(error, name) for name in ("feed", "worker", "split") if getattr(error, name) is not None
            }
        if record.exc_info:
            traceback = self.formatException(record.exc_info)
        return json.dumps({**line, "traceback": traceback} if traceback else line, default=str)


class TextFormatter(logging.Formatter):
    """Writes a record as a line for people, followed by the traceback of user code, if there is one, unless the same
    was written in the last `MINUTE` seconds: one exception may stop all lanes of a feed. Names and messages of others
    are in it, so it is made safe to print."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._written: dict[str, float] = {}
        """When a traceback was written, by its text, oldest first. The latest `_TRACEBACKS` are kept."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        traceback = record.__dict__.get("traceback")
        error = record.__dict__.get("error")
        own = (error.remote_traceback or "").rstrip() if isinstance(error, PenstockError) else ""
        if own and text.endswith(own):  # an error's text ends with its traceback
            traceback, text = own, text.removesuffix(own).rstrip("\n")
        if traceback:
            text += self._of(traceback.rstrip(), record.created)
        return printable(text)

    def _of(self, traceback: str, now: float) -> str:
        """Return the traceback as lines, or when it was written."""
        before = self._written.get(traceback)
        if before is not None and 0 <= now - before < MINUTE:
            return f" (the traceback is the same as at {time.strftime('%H:%M:%S', time.localtime(before))})"
        self._written.pop(traceback, None)
        self._written[traceback] = now
        while len(self._written) > _TRACEBACKS:
            del self._written[next(iter(self._written))]
        return f"\n{traceback}"


def configure(level: str, form: str) -> logging.Handler:
    """Send the log of this process to stderr, and return the handler that writes it. `form` is "text" or "json"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler
