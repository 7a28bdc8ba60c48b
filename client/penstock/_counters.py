"""What a session counts: what it handed over, how long its consumer waited, and when a wait is worth a warning.

All of it under the session's lock.
"""

from __future__ import annotations

import time
from typing import Any

from penstock_proto.messages import Slab

SLOW = 10.0
"""Seconds of waiting for data after which the log says so."""
STOOD = 1.0
"""Seconds between two looks for data, which are never so far apart, after which it was this process that stood still
(SIGSTOP, a debugger, a busy thread that keeps the GIL), or its consumer that did something else."""


class Counters:
    """The counts of one session.

    Attributes:
        begun: whether an epoch was begun.
        reconnects: how often the connection was another one.
    """

    def __init__(self, asked: float) -> None:
        """`asked`: the time (monotonic) when the user asked for the connection, which is there now."""
        self._connecting = time.monotonic() - asked
        self._begun: float | None = None
        self._first: float | None = None
        self._counts = {"slabs": 0, "batches": 0, "rows": 0, "bytes": 0, "copies": 0}
        self._batch_rows = 0
        self._waited = 0.0
        self._waiting_since: float | None = None
        self._looked = 0.0
        self._warned = False
        self.reconnects = 0

    @property
    def begun(self) -> bool:
        return self._begun is not None

    @property
    def batches(self) -> int:
        """How many batches were handed over."""
        return self._counts["batches"]

    def begins(self, unread: int) -> None:
        """An epoch begins. `unread` batches of the last slab were not read, and will not be."""
        self._waiting_since = None
        self._counts = self._read(unread)
        self._begun = self._begun or time.monotonic()

    def hands(self, slab: Slab, copy: bool) -> None:
        """`slab` is handed over, as a copy or not."""
        self._waiting_since, self._warned = None, False
        if self._first is None:
            self._first = time.monotonic()
        counts = self._counts
        counts["slabs"] += 1
        counts["batches"] += slab.batches
        counts["rows"] += slab.rows
        counts["bytes"] += slab.nbytes
        counts["copies"] += copy
        self._batch_rows = slab.rows // slab.batches

    def waits(self, now: float) -> None:
        """The consumer waits from `now` on, if it did not before."""
        if self._waiting_since is None or now - self._looked > STOOD:
            self._waiting_since = now
        self._looked = now

    def waited(self, began: float, now: float) -> None:
        """It waited from `began` until `now`, and may wait again."""
        self._waited += now - began
        self.waits(now)

    def slow(self, now: float) -> float | None:
        """For how many seconds it has waited in vain, where that is worth a warning: once until something comes.

        Only the time since this process last stood still counts: before, nothing could have come.
        """
        if self._warned or self._waiting_since is None or now - self._waiting_since <= SLOW:
            return None
        self._warned = True
        return now - self._waiting_since

    def reconnected(self) -> None:
        """There is another connection: if the consumer waits, it waits for that one from now on."""
        self.reconnects += 1
        self._waiting_since = self._waiting_since and time.monotonic()

    def stats(self, unread: int) -> dict[str, Any]:
        """The counts in `Connection.stats`, without the `unread` batches of the last slab."""
        now = time.monotonic()
        first = None
        if self._first is not None and self._begun is not None:
            first = self._connecting + self._first - self._begun
        return {
            **self._read(unread),
            "reconnects": self.reconnects,
            "wait_seconds": self._waited,
            "first_batch_seconds": first,
            "seconds": 0.0 if self._first is None else now - self._first,
        }

    def _read(self, unread: int) -> dict[str, int]:
        """The counts without the `unread` batches of the last slab."""
        counts = self._counts
        rows = counts["rows"] - unread * self._batch_rows
        return {**counts, "batches": counts["batches"] - unread, "rows": rows}
