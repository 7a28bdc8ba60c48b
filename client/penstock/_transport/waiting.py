"""A wait for a daemon: asks one that does not answer Hello how far it is, and says what the wait is for, in the log or
below the cell of a notebook."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock_proto.security.keys import ClientKeys
from penstock_proto.status.readiness import Patience
from penstock_proto.transport.urls import Address

from .notebook import NotebookBar

if TYPE_CHECKING:
    from .daemon_status import DaemonStatus

ASK_AFTER = 1.0
"""Seconds until the daemon is first asked."""
ASK_AGAIN = 2.0
"""Seconds between two questions."""
SAY_AFTER = 2.0
"""Seconds until the log first says what the daemon waits for. Then the time doubles, up to `SAY_AGAIN`."""
SAY_AGAIN = 60.0

logger = logging.getLogger("penstock")


class Announcer:
    """Says what a wait is for, once it takes `SAY_AFTER` seconds: in the log at longer and longer intervals, or in a
    notebook with a bar. Call `close` at the end.

    Args:
        what: the thing that somebody waits for.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._at = self._began + SAY_AFTER
        self._bar = NotebookBar()

    def say(self, phase: str) -> None:
        """Say that the wait is for `phase`, if it is time. Call it often."""
        now = time.monotonic()
        if now < self._at or not phase:
            return
        if self._bar.works:
            self._bar.show(f"{self._what}: {phase}")
            return
        self._at = now + min(SAY_AGAIN, now - self._began)
        logger.warning("waiting for %s: %s", self._what, phase)

    def close(self) -> None:
        """Take back what is still shown."""
        self._bar.close()


class Waiting:
    """One wait.

    Args:
        address: the feed.
        keys: the client's keys, or None.
        patience: how long the wait is. It is told the daemon's statuses.
    """

    def __init__(self, address: Address, keys: ClientKeys | None, patience: Patience) -> None:
        self._url = str(address)
        self._patience = patience
        self._keys = keys
        self._status: DaemonStatus | None = None
        self._phase = ""
        self._announcer = Announcer(self._url)
        self._ask_at = time.monotonic() + ASK_AFTER

    def look(self) -> None:
        """Ask or speak, if it is time. Call it often."""
        now = time.monotonic()
        if now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN
            self._ask()
        state = None if self._status is None else self._status.latest
        if state is not None and state is not self._patience.state:
            self._patience.heard(state)
            self._phase = state.phase
        self._announcer.say(self._phase)

    def close(self) -> None:
        """End the wait."""
        self._announcer.close()

    def on_nobody(self, error: OSError) -> None:
        """Note that nobody answers there."""
        self._phase = f"no daemon answers ({error.strerror or error})"

    def _ask(self) -> None:
        if self._status is None:
            from .daemon_status import DaemonStatus  # most daemons answer at once, and then nobody needs it

            self._status = DaemonStatus(self._url, self._keys)
        self._status.ask()
