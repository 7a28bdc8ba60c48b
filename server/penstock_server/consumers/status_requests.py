"""Answers clients that ask for the status over ZeroMQ: soon, but at most once a second for each connection.

Answers have fresh figures of the workers' memory. If those must be measured first, the answer waits for that, but at
most until the end of the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock_proto import messages as m

from ..workers.worker_memory import WorkerMemory
from .to_consumers import ToConsumers


class StatusText(Protocol):
    """Makes the daemon's status (status/current_status.py)."""

    def text(self) -> str: ...


class StatusRequests:
    """The connections that wait for the status. If a method returns connections, the caller must answer them now.

    Args:
        out: sends the answers.
        status: makes the text of an answer.
        memory: measures the workers' memory.
        measured: called when an answer may have waited for that.

    Attributes:
        watching: the open connections that have asked.
    """

    def __init__(
        self, out: ToConsumers, status: StatusText, memory: WorkerMemory, measured: Callable[[], None]
    ) -> None:
        self._out = out
        self._status = status
        self._memory = memory
        self._measured = measured
        self.watching: set[bytes] = set()
        self._asked: dict[bytes, bool] = {}
        """Connections that asked in this second, and whether each has asked again after its answer."""
        self._waiting: set[bytes] = set()
        """Connections whose answer waits for fresh figures."""

    def came(self, routing_id: bytes) -> None:
        """Handle a connection's request for the status."""
        self.watching.add(routing_id)
        if routing_id in self._waiting:
            return
        again = self._asked[routing_id] = routing_id in self._asked
        if again:
            return
        if self._memory.fresh(self._measured):
            self.answer(routing_id)
        else:
            self._waiting.add(routing_id)

    def answer(self, routing_id: bytes) -> None:
        """Answer the connection."""
        self._out.answer(routing_id, m.Status(self._status.text()))

    def forget(self, routing_id: bytes) -> None:
        """Forget a connection that has ended."""
        self.watching.discard(routing_id)
        self._asked.pop(routing_id, None)
        self._waiting.discard(routing_id)

    def refreshed(self) -> set[bytes]:
        """Return the connections that waited for fresh figures, now that there are some."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    def another_second(self) -> set[bytes]:
        """Begin another second. Return the connections that asked again in the last one, or still wait."""
        asked, self._asked = self._asked, {}
        return self.refreshed() | {routing_id for routing_id, again in asked.items() if again}
