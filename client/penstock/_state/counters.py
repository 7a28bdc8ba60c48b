"""Counts what a stream hands over and how long its consumer waits, and decides when a wait is worth a warning.

The lock of the hand-off guards it.
"""

from __future__ import annotations

import time
from typing import Any

from .consumer_state import Received

SLOW = 10.0
"""Seconds of waiting for data after which the log says so."""
STOOD = 1.0
"""A waiting consumer checks for data at shorter intervals than this, in seconds. A longer gap means that this process
stood still (SIGSTOP, a debugger, a thread that keeps the GIL), or that the consumer did something else."""


class Counters:
    """The counters of one stream.

    Attributes:
        reconnects: how often a lost connection was replaced.
    """

    def __init__(self, asked: float) -> None:
        """`asked`: the time (monotonic) when the user asked for the connection, which is open now."""
        self._connecting = time.monotonic() - asked
        self._begun: float | None = None
        self._first: float | None = None
        self._counts = {"slabs": 0, "batches": 0, "rows": 0, "bytes": 0, "copies": 0}
        self._batch_rows = 0
        self._waited = self._transfer = self._handoff = 0.0
        self._late = 0
        self._waiting_since: float | None = None
        self._looked = 0.0
        self._warned = False
        self.reconnects = 0

    @property
    def begun(self) -> bool:
        """Whether an epoch was begun."""
        return self._begun is not None

    @property
    def batches(self) -> int:
        """How many batches were handed over."""
        return self._counts["batches"]

    @property
    def waited_seconds(self) -> tuple[float, float]:
        """Seconds that consumers have waited for data, and in how many of these the data was coming."""
        return self._waited, self._transfer

    def begin(self, unread: int) -> None:
        """Begin an epoch. `unread` batches of the last slab were not read, and will not be."""
        self._waiting_since = None
        self._counts = self._without(unread)
        self._begun = self._begun or time.monotonic()

    def take_back(self, batches: int) -> None:
        """No longer count the latest batches: they come again."""
        self._counts = self._without(batches)

    def count_handed_over(self, item: Received, copy: bool) -> None:
        """Count a slab that is handed over. `copy`: as a copy."""
        slab = item.slab
        if self._waiting_since is not None:
            self._late += 1
            self._transfer += max(0.0, item.whole - max(self._waiting_since, item.began))
            self._handoff += max(0.0, self._looked - max(self._waiting_since, item.whole))
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

    def waiting(self, now: float) -> None:
        """Note that the consumer waits, from `now` on if it did not wait before."""
        if self._waiting_since is None or now - self._looked > STOOD:
            self._waiting_since = now
        self._looked = now

    def count_wait(self, began: float, now: float) -> None:
        """Count a wait from `began` until `now`. It may continue."""
        self._waited += now - began
        self.waiting(now)

    def slow(self, now: float) -> float | None:
        """Return how many seconds the consumer has waited if that is worth a warning, else None.

        There is only one warning until data comes. Only the time since this process last stood still counts, because
        nothing could arrive before.
        """
        if self._warned or self._waiting_since is None or now - self._waiting_since <= SLOW:
            return None
        self._warned = True
        return now - self._waiting_since

    def count_reconnection(self) -> None:
        """Count a reconnection. If the consumer waits, its wait counts from now on."""
        self.reconnects += 1
        self._waiting_since = self._waiting_since and time.monotonic()

    def stats(self, unread: int) -> dict[str, Any]:
        """Return the figures for `Connection.stats`, without the `unread` batches of the last slab."""
        now = time.monotonic()
        first = None
        if self._first is not None and self._begun is not None:
            first = self._connecting + self._first - self._begun
        counts = self._without(unread)
        return {
            **counts,
            "reconnects": self.reconnects,
            "wait_seconds": self._waited,
            "waits": {
                "production": max(0.0, self._waited - self._transfer - self._handoff),
                "transfer": self._transfer,
                "handoff": self._handoff,
            },
            "ready": 1 - self._late / counts["batches"] if counts["batches"] else None,
            "first_batch_seconds": first,
            "seconds": 0.0 if self._first is None else now - self._first,
        }

    def _without(self, unread: int) -> dict[str, int]:
        counts = self._counts
        rows = counts["rows"] - unread * self._batch_rows
        return {**counts, "batches": counts["batches"] - unread, "rows": rows}
