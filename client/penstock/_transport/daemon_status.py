"""Asks a daemon for its status on a separate thread: nobody waits for the answer, and a failure is not an error."""

from __future__ import annotations

import contextlib
import threading
import time

from penstock_proto import PenstockError
from penstock_proto.security.keys import ClientKeys
from penstock_proto.status import asking
from penstock_proto.status.status_shape import Status

from .address import parse
from .dialing import dealer_to

TIMEOUT = 5.0
"""Seconds that an answer may take."""


class DaemonStatus:
    """The first and the latest status of the daemon that serves a feed.

    Attributes:
        first, latest: the first and the latest answer; None before there is one.
    """

    def __init__(self, url: str, keys: ClientKeys | None) -> None:
        """`url`: the URL of a feed, `tcp://HOST:PORT/FEED`. `keys`: the client's, for a daemon that requires keys."""
        self.first: Status | None = None
        self.latest: Status | None = None
        self._url = url
        self._keys = keys
        self._thread: threading.Thread | None = None

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
                self.latest = found
                self.first = self.first or found
