"""Tells consumers from which hosts they can fetch slabs, and knows which of these hosts they reach."""

from __future__ import annotations

from penstock_proto import messages as m

from ..coordinator import CoordinatorView
from ..hosts.host_table import HostTable
from .session import Session
from .session_table import SessionTable
from .to_consumers import ToConsumers


class Fetching:
    """The consumers that can fetch, and what they have said about hosts.

    Args:
        coordinator: makes the decisions.
        table: all sessions.
        out: sends messages to consumers.
        hosts: the joined hosts.
    """

    def __init__(self, coordinator: CoordinatorView, table: SessionTable, out: ToConsumers, hosts: HostTable) -> None:
        self._coordinator = coordinator
        self._table = table
        self._out = out
        self._hosts = hosts

    def opened(self, session: Session) -> None:
        """Tell a new consumer that can fetch of all hosts."""
        session.fetches = True
        for where in self._hosts.addresses():
            self._out.host_at(session, where)

    def host_at(self, where: m.HostAt) -> None:
        """Tell consumers that they can fetch slabs from this host."""
        for session in self._table:
            if session.fetches:
                self._out.host_at(session, where)

    def said(self, session: Session, message: m.Reaches) -> None:
        """Note whether a consumer reaches a host."""
        if message.reached and any(message.host == where.host for where in self._hosts.addresses()):
            session.reached.add(message.host)
        else:
            session.reached.discard(message.host)

    def reach(self, stream: int, reader: int | None, host: int) -> bool:
        """Return whether this consumer of a stream, or each of them if `reader` is None, can fetch slabs from the host.
        No consumer can while a preview looks at slabs."""
        if self._out.look is not None:
            return False
        reads = self._coordinator.streams.get(stream)
        readers = [one.number for one in reads.consumers] if reads is not None else []
        sessions = [self._table.by_consumer.get(one) for one in (readers if reader is None else [reader])]
        return bool(sessions) and all(session is not None and host in session.reached for session in sessions)
