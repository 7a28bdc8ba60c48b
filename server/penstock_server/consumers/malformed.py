"""Malformed messages: counted, logged a few times a minute, and answered at most once a second for each connection.

The answer tells the author of a client what is wrong. There are few answers because a peer may answer each error with
another malformed message, or send many small ones to get many answers.
"""

from __future__ import annotations

from collections.abc import Hashable

from penstock_proto import ProtocolError

from ..logs.rate_limited_log import RateLimitedLog


class Malformed:
    """Counts malformed messages and decides which of them to answer.

    Attributes:
        count: number of malformed messages so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._answered: set[Hashable] = set()
        """Connections that were answered in this second."""

    def came(self, connection: Hashable, transport: str, error: ProtocolError, log: RateLimitedLog) -> bool:
        """Note and log a malformed message. Return whether to answer it with `error`."""
        self.count += 1
        log.warning("refused a message over %s: %s", transport, error.message, event="message_refused")
        answered = connection in self._answered
        self._answered.add(connection)
        return not answered

    def look_at_the_clock(self) -> None:
        """Let each connection be answered again. Called once a second."""
        self._answered.clear()
