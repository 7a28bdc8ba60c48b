"""Answers clients that ask for the status over ZeroMQ: at once, and then at most once a second for each connection."""

from __future__ import annotations

from collections.abc import Callable

from penstock_proto import messages as m

from .to_consumers import ToConsumers


class StatusRequests:
    """See the file's head.

    Args:
        out: sends the answers.
        status: makes the text of an answer.
    """

    def __init__(self, out: ToConsumers, status: Callable[[], str]) -> None:
        self._out = out
        self._status = status
        self._asked: dict[bytes, bool] = {}
        """Connections that were answered in this second, and whether each has asked again."""

    def came(self, routing_id: bytes) -> None:
        """A connection asks for the status."""
        again = self._asked[routing_id] = routing_id in self._asked
        if not again:
            self.answer(routing_id)

    def answer(self, routing_id: bytes) -> None:
        """Answer the connection."""
        self._out.answer(routing_id, m.Status(self._status()))

    def forget(self, routing_id: bytes) -> None:
        """The connection has ended."""
        self._asked.pop(routing_id, None)

    def asked_again(self) -> list[bytes]:
        """Begin another second. Return the connections that asked again in the last one, to be answered now."""
        asked, self._asked = self._asked, {}
        return [routing_id for routing_id, again in asked.items() if again]
