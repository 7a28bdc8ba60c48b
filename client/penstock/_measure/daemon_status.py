"""Asks a daemon for its status on a separate thread: nobody waits for the answer, and a failure is not an error."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from penstock_proto import PenstockError, ProtocolError
from penstock_proto.messages import VERSION, Status, StatusRequest
from penstock_proto.security.keys import ClientKeys
from penstock_proto.status import status_text
from penstock_proto.transport import one_answer

from .._transport.address import parse
from .._transport.tcp_connection import dealer_to

TIMEOUT = 5.0
"""Seconds that an answer may take."""


class DaemonStatus:
    """The first and the latest status of the daemon that serves a feed.

    Attributes:
        first, latest: the first and the latest answer; None before there is one.
    """

    def __init__(self, url: str, keys: ClientKeys | None) -> None:
        """`url`: the URL of a feed, `tcp://HOST:PORT/FEED`. `keys`: the client's, for a daemon that requires keys."""
        self.first: dict[str, Any] | None = None
        self.latest: dict[str, Any] | None = None
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
            self.latest = _status(self._url, self._keys, time.monotonic() + TIMEOUT)
            self.first = self.first or self.latest


def _status(url: str, keys: ClientKeys | None, deadline: float) -> dict[str, Any]:
    """Return the daemon's status. Raises PenstockError, OSError or ValueError if it does not answer."""
    address = parse(url)
    dealer = dealer_to(address, keys, None, deadline - time.monotonic(), lambda: None)
    try:
        reply = one_answer.ask(dealer, StatusRequest(VERSION), deadline)
    finally:
        dealer.close(0)
    if not isinstance(reply, Status):
        raise ProtocolError(f"the daemon answered {type(reply).__name__} to a status request")
    return status_text.parse(reply.json)
