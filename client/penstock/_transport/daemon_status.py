"""Asks a daemon for its status on a separate thread: nobody waits for the answer, and a failure is not an error."""

from __future__ import annotations

import contextlib
import threading
import time

from penstock_proto import PenstockError
from penstock_proto.security.keys import ClientKeys
from penstock_proto.status import asking
from penstock_proto.status.span import Span
from penstock_proto.status.status_shape import Status

from .address import parse
from .dialing import dealer_to

TIMEOUT = 5.0
"""Seconds that an answer may take."""


MOST = 16
"""Most answers that are kept."""


class DaemonStatus:
    """The statuses of the daemon that serves a feed.

    Attributes:
        answers: the answers of the latest daemon at the URL, the earliest first: two for each time in which its workers
            were the same, at most `MOST` in all.
    """

    def __init__(self, url: str, keys: ClientKeys | None) -> None:
        """`url`: the URL of a feed, `tcp://HOST:PORT/FEED`. `keys`: the client's, for a daemon that requires keys."""
        self.answers: list[Status] = []
        self._url = url
        self._keys = keys
        self._thread: threading.Thread | None = None

    @property
    def latest(self) -> Status | None:
        """The latest answer; None before there is one."""
        return self.answers[-1] if self.answers else None

    def ask(self) -> None:
        """Ask for the status and return at once. Do nothing while an earlier answer is still due."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="penstock-status", daemon=True)
            self._thread.start()

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the answer to the latest request."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _ask(self) -> None:
        with contextlib.suppress(PenstockError, OSError, ValueError):
            deadline = time.monotonic() + TIMEOUT
            dealer = dealer_to(parse(self._url), self._keys, None, TIMEOUT, lambda: None)
            try:
                found = asking.status(dealer, deadline)
            finally:
                dealer.close(0)
            if found is not None:
                self.answers = [*kept(found, self.answers), found]


def kept(new: Status, answers: list[Status]) -> list[Status]:
    """Return those of the answers to keep beside a new one: the first and the last of each time in which the workers
    were the same and no consumer got its first batch."""
    if answers and answers[-1].id != new.id:
        return []
    if len(answers) > 1 and _goes_on(answers[-2], answers[-1]) and _goes_on(answers[-1], new):
        return answers[:-1]
    return answers[1 - MOST :]


def _goes_on(first: Status, last: Status) -> bool:
    span = Span(first, last)
    return (
        span.same_workers
        and span.before.keys() == span.after.keys()
        and all(bool(one.handed) == bool(span.after[key].handed) for key, one in span.before.items())
    )
