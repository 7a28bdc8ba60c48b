"""Takes aiohttp's log: a few lines a minute about requests that cannot be read, and our own bugs."""

from __future__ import annotations

from aiohttp.http_exceptions import HttpProcessingError

from ..logs.bugs import Bugs
from ..logs.rate_limited_log import RateLimitedLog


class RequestLog:
    """What aiohttp takes for its logger. It has the two methods of a logger that aiohttp calls.

    Args:
        log: where lines about requests go.
        bugs: notes unexpected errors.
    """

    def __init__(self, log: RateLimitedLog, bugs: Bugs) -> None:
        self._log = log
        self._bugs = bugs

    def debug(self, text: str, *values: object, exc_info: object = None) -> None:
        """Ignore it: connections that end early, and bytes that are not HTTP."""

    def exception(self, text: str, *values: object, exc_info: BaseException | None = None) -> None:
        """Log a request that cannot be read, or note a bug. aiohttp has closed the connection."""
        if isinstance(exc_info, HttpProcessingError):
            why = type(exc_info).__name__
            self._log.warning("refused a request over HTTP: %s", why, event="message_refused")
        elif not isinstance(exc_info, OSError):  # the peer is gone
            self._bugs.note(exc_info or RuntimeError(text % values))
