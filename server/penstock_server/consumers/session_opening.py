"""Opens sessions: Hello, perhaps parts of a position, and Open, after which the client is a consumer."""

from __future__ import annotations

import hmac
import itertools
import secrets
import time
from collections.abc import Callable

import msgspec

from penstock_proto import ConnectionLost, DaemonStopped, PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.batches.position import unpack

from ..coordinator import CoordinatorView
from ..coordinator.model import events as on
from ..coordinator.model.open_request import OpenRequest
from ..logs.rate_limited_log import RateLimitedLog
from ..net.keys import may_read
from ..net.local import LocalPeer
from ..net.version import check_version
from . import greeted
from .session import Session
from .session_table import SessionTable
from .starting_feeds import StartingFeeds
from .to_consumers import ToConsumers, failed

MOST_EARLY = 1024
"""Most Hellos that may wait for the feeds to be ready."""


class Opening:
    """Takes the messages of clients that are not consumers yet.

    Args:
        coordinator: makes the decisions.
        tell: tells the coordinator of an event, and carries out its commands.
        table: the sessions.
        out: sends answers.
        unix: the abstract unix address for consumers on this host.
        feeds: knows whether all feeds are ready; until then Hellos wait.
        fail: ends a session with an error.
        refuse: ends the session of a consumer that cannot be opened.
        gone: removes a session that has ended; also gets how many of its slabs were handed over.
        log: gets a line for each session that opens.

    Attributes:
        early: the Hellos that wait for the feeds to be ready, by connection.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        tell: Callable[[on.Event], None],
        table: SessionTable,
        out: ToConsumers,
        unix: str,
        *,
        feeds: StartingFeeds,
        fail: Callable[[Session, PenstockError], None],
        refuse: Callable[[int, PenstockError], None],
        gone: Callable[[Session, int], None],
        log: RateLimitedLog,
    ) -> None:
        self.early: dict[bytes, m.Hello] = {}
        self._coordinator = coordinator
        self._tell = tell
        self._table = table
        self._out = out
        self._unix = unix
        self._feeds = feeds
        self._fail = fail
        self._refuse = refuse
        self._gone = gone
        self._log = log
        self._numbers = itertools.count(1)

    def hello(self, routing_id: bytes, hello: m.Hello) -> None:
        """Greet a client, or let it wait until the feeds are ready.

        Raises:
            ProtocolError: the client speaks another version of the protocol.
            KeyRefused: the client has a host's key.
            UnknownFeed: there is no such feed; names the feeds that exist.
            ConnectionLost: too many clients wait already.
        """
        check_version(hello.version)
        key = self._out.key(routing_id)
        may_read(key)
        if routing_id in self._table.by_routing_id:
            return
        if hello.feed not in self._coordinator.feeds:
            if self._feeds.ready:
                raise self._coordinator.unknown_feed(hello.feed)
            if len(self.early) >= MOST_EARLY and routing_id not in self.early:
                raise ConnectionLost("too many clients wait for the daemon's feeds to be ready: connect again")
            self.early[routing_id] = hello
            return
        token = secrets.token_bytes(16)
        client = hello.client[:128]
        session = Session(token, hello.feed, client, routing_id, self._out.link(routing_id), time.monotonic(), key)
        feed = self._coordinator.feeds[hello.feed]
        welcome = m.Welcome(token, feed.plan.with_classes(feed.info), self._unix)
        if self._out.answer(routing_id, welcome):
            self._table.greet(session)
            self._make_room(self._table.greeted.add(session, session.heard))

    def take_early(self) -> dict[bytes, m.Hello]:
        """Return the Hellos that came early, and forget them."""
        early, self.early = self.early, {}
        return early

    def end_late(self, now: float) -> None:
        """End the sessions that were not opened in time."""
        for session in self._table.greeted.late(now):
            self._fail(session, greeted.too_late())

    def position_part(self, message: m.PositionPart, session: Session | None) -> None:
        """Add a part to the start position of the session's stream.

        Raises:
            ProtocolError: the session is open already, or does not exist; or the position is too large.
        """
        if session is None or session.consumer is not None or session.token != message.session:
            raise ProtocolError("PositionPart without a session that waits for Open: send Hello first")
        info = self._coordinator.feeds[session.feed].info
        try:
            self._make_room(self._table.greeted.sent(session, message.data, info))
        except ProtocolError:
            self._gone(session, 0)
            raise

    def open(self, message: m.Open, routing_id: bytes, peer: LocalPeer | None) -> None:
        """Open a session, over `peer`, or over the connection on which it was greeted if `peer` is None.

        Raises:
            ConnectionLost: there is no such session.
            ProtocolError: it cannot be opened on this connection, or asks for something impossible.
        """
        session = self._table.by_token.get(message.session)
        if session is None:
            raise ConnectionLost("there is no such session, or it has ended: connect again")
        if session.consumer is not None:
            raise ProtocolError("this session has been opened already")
        if peer is not None and not hmac.compare_digest(message.proof, peer.nonce):
            raise ProtocolError("the proof is wrong: the ledger has not been mapped")
        if peer is None and routing_id != session.routing_id:
            raise ProtocolError("this session was greeted on another connection")
        ask = self._ask(message, session, peer)
        self._take_the_place_of(message)
        number = next(self._numbers)
        self._table.bind(session, number, peer)
        self._tell(on.Open(number, session.feed, ask))
        if session.consumer is None:  # the coordinator refused it
            return
        if number not in self._coordinator.consumers:  # the daemon ends, and decides nothing more
            self._refuse(number, DaemonStopped("the daemon was stopped"))
            return
        self._table.greeted.remove(session)
        if message.world_size:
            group = f" of group {message.group!r}" if message.group else ""
            session.client += f" (rank {message.rank} of {message.world_size}{group})"
        session.identity = message.consumer
        session.shares = bool(message.group) and not message.world_size
        self._table.opened(session)
        if peer is not None:
            peer.opened()
        fields = {"event": "stream_opened", "feed": session.feed, "consumer": session.client}
        self._log.info("feed %s: %s reads it (%s)", session.feed, session.who, session.link.transport, **fields)

    def _ask(self, message: m.Open, session: Session, peer: LocalPeer | None) -> OpenRequest:
        info = self._coordinator.feeds[session.feed].info
        if any(had.lane >= info.lanes or had.batches > info.turn for had in message.had):
            raise ProtocolError("slabs were handed over that this feed cannot have", feed=session.feed)
        return OpenRequest(
            credit=message.credit,
            credit_bytes=message.credit_bytes,
            quota=message.quota if peer is not None else 0,
            position=unpack(session.position) if session.position else None,
            again=message.again,
            group=message.group,
            rank=message.rank,
            world_size=message.world_size,
            pad=message.pad,
            identity=message.consumer,
            had=message.had,
            machine="" if peer is not None else self._out.machine(session.routing_id),
            shares=message.shares,
            start=message.start,
        )

    def _take_the_place_of(self, message: m.Open) -> None:
        """End the older sessions of a consumer that comes back: the daemon may not have noticed yet that their
        connections ended.

        If one of them is the newer one after all (this Open was delayed on its way), its client connects again.
        """
        if not message.consumer:
            return
        error = ConnectionLost("another session of the same client took the place of this one: connect again")
        for session in self._table:
            if session.identity == message.consumer and session.consumer is not None:
                handed = message.handed if session.token == message.last else 0
                self._out.send(session, failed(error))
                if not session.link.maps_slots:
                    self._gone(session, handed)
                else:  # end of file will release its slots
                    session.failed = session.muted = True
                    self._tell(on.Cut(session.consumer, handed))

    def _make_room(self, session: Session | None) -> None:
        if session is not None:
            self._fail(session, greeted.too_many())


def other_version(data: bytes) -> ProtocolError | None:
    """Return the error for the first message of a client of another version, which this version cannot decode. Return
    None for any other message."""
    try:
        raw = msgspec.msgpack.decode(data, type=dict[str, object])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    version = raw.get("version")
    if raw.get("type") in ("hello", "join", "statusrequest") and isinstance(version, int):
        try:
            check_version(version)
        except ProtocolError as error:
            return error
    return None
