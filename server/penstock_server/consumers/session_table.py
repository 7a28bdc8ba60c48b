"""The table of sessions, which finds a session by its token, its connection, or its consumer."""

from __future__ import annotations

from collections.abc import Iterator

from ..net.local import LocalPeer
from .greeted import Greeted
from .link import LocalLink
from .session import Session


class SessionTable:
    """All sessions, each under every key by which a message can name it.

    Attributes:
        by_token: all sessions.
        by_routing_id: those with a connection over ZeroMQ.
        by_peer: those with a connection on this host.
        by_consumer: those that were opened, by the consumer's number.
        greeted: those that are not open yet.
    """

    def __init__(self) -> None:
        self.by_token: dict[bytes, Session] = {}
        self.by_routing_id: dict[bytes, Session] = {}
        self.by_peer: dict[LocalPeer, Session] = {}
        self.by_consumer: dict[int, Session] = {}
        self.greeted = Greeted()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self.by_token.values()))

    def greet(self, session: Session) -> None:
        """Add a session that was greeted over ZeroMQ."""
        self.by_token[session.token] = self.by_routing_id[session.routing_id] = session

    def bind(self, session: Session, consumer: int, peer: LocalPeer | None) -> None:
        """Make the session this consumer, over `peer`, or over ZeroMQ if `peer` is None."""
        session.consumer = consumer
        self.by_consumer[consumer] = session
        if peer is not None:
            session.link = LocalLink(peer)
            self.by_peer[peer] = session

    def unbind(self, session: Session) -> None:
        """Undo `bind`: the session does not become a consumer."""
        if session.consumer is not None:
            del self.by_consumer[session.consumer]
            session.consumer = None
        if isinstance(session.link, LocalLink):
            del self.by_peer[session.link.peer]

    def opened(self, session: Session) -> None:
        """Mark the session as open. If it has a connection on this host, forget its connection over ZeroMQ."""
        session.opened = True
        if isinstance(session.link, LocalLink):
            self.by_routing_id.pop(session.routing_id, None)

    def remove(self, session: Session) -> int | None:
        """Remove the session, but not its connection on this host. Return its consumer, if it was one."""
        self.by_token.pop(session.token, None)
        if self.by_routing_id.get(session.routing_id) is session:
            del self.by_routing_id[session.routing_id]
        consumer, session.consumer = session.consumer, None
        if consumer is not None:
            self.by_consumer.pop(consumer, None)
        return consumer
