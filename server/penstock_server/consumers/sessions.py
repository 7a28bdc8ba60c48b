"""Sessions of consumers, from Hello until the last slot is released, over ZeroMQ or over a connection on this host.

A session gets its token with Welcome and its stream with Open, and keeps one transport. Nothing here decides about
batches: consumers' messages go to the coordinator as events, and its commands say what to send.

All messages of peers pass through one method (`_handle`). At worst a message fails its peer's session: the daemon tells
the client why, and takes back its slots. Each message is checked as a whole before anything changes. An exception that
is not a PenstockError is a bug: it is counted, and it fails the stream, whose state is then unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial

from penstock_proto import ConnectionLost, KeyRefused, PenstockError, ProtocolError
from penstock_proto import messages as m
from penstock_proto.transport import codec

from ..coordinator import CoordinatorView, a_bug
from ..coordinator.model import events as on
from ..coordinator.model.commands import SendSlab
from ..logs.bugs import Bugs
from ..logs.rate_limited_log import RateLimitedLog
from ..net.local import LocalPeer
from ..net.version import check_version
from ..shared_memory.arena import Memfd
from ..workers.worker_memory import WorkerMemory
from . import local_requests
from .fetching import Fetching
from .local_requests import LocalRequests
from .malformed import Malformed
from .session import Session
from .session_opening import Opening, other_version
from .session_table import SessionTable
from .starting_feeds import StartingFeeds
from .status_requests import StatusRequests, StatusText
from .to_consumers import ToConsumers, failed

log = logging.getLogger(__name__)

SILENT = 2.0
"""Seconds without a sign of life after which the daemon checks whether a consumer over ZeroMQ is still connected."""

PATIENCE = 30.0
"""Seconds without a sign of life after which a consumer over ZeroMQ counts as lost."""


class Sessions:
    """All sessions.

    Args:
        coordinator: makes the decisions.
        tell: tells the coordinator of an event, and carries out its commands.
        table: where to keep the sessions.
        out: sends messages to consumers.
        fetching: tells consumers from which hosts they can fetch.
        unix: the abstract unix address for consumers on this host.
        feeds: knows whether all feeds are ready; until then Hellos wait.
        status: makes the text that answers a StatusRequest.
        memory: measures the workers' memory for that text.
        requests: answers the requests of programs on this host.
        malformed: counts the messages that cannot be decoded.
        join: called with a peer's id and its Join when a host asks to join; may raise an error.
        epoch_begins: called before a consumer begins an epoch.
        bugs: notes unexpected errors.
    """

    def __init__(
        self,
        coordinator: CoordinatorView,
        tell: Callable[[on.Event], None],
        table: SessionTable,
        out: ToConsumers,
        fetching: Fetching,
        *,
        unix: str,
        feeds: StartingFeeds,
        status: StatusText,
        memory: WorkerMemory,
        requests: LocalRequests,
        malformed: Malformed,
        join: Callable[[bytes, m.Join], None],
        epoch_begins: Callable[[], None],
        bugs: Bugs,
    ) -> None:
        self._table = table
        self._log = RateLimitedLog(log)
        self._malformed = malformed
        self._epoch_begins = epoch_begins
        self._coordinator = coordinator
        self._tell = tell
        self._join = join
        self._requests = requests
        self._bugs = bugs
        self._out = out
        self._feeds = feeds
        self._fetching = fetching
        self._status = StatusRequests(out, status, memory, self._measured)
        self._opening = Opening(
            coordinator,
            tell,
            table,
            out,
            unix,
            feeds=feeds,
            fail=self._end,
            refuse=self.refuse,
            gone=self._gone,
            log=self._log,
        )

    # --- incoming messages ---

    def frame(self, routing_id: bytes, data: bytes) -> None:
        """Handle a message over ZeroMQ."""
        session = self._table.by_routing_id.get(routing_id)
        if session is not None:
            session.heard = time.monotonic()
        self._handle(session, routing_id, partial(self._from_network, session, routing_id, data))

    def datagram(self, peer: LocalPeer, data: bytes) -> None:
        """Handle a message over a connection on this host."""
        session = self._table.by_peer.get(peer)
        if session is None or not session.failed:
            self._handle(session, peer, partial(self._from_host, session, peer, data))

    def _handle(self, session: Session | None, to: bytes | LocalPeer, handle: Callable[[], None]) -> None:
        """Call `handle`, and answer the peer if it raises. All messages, with or without a session, go through here."""
        try:
            handle()
            return
        except PenstockError as problem:
            error = problem
        except Exception as problem:
            error = a_bug(problem)
            stream = None if session is None or session.consumer is None else self._out.stream_of(session.consumer)
            if stream is None:
                self._bugs.note(problem)
            else:
                self._tell(on.StreamFailed(stream, problem))
        if session is None:
            self._out.answer(to, failed(error))
        else:
            self._end(session, error)

    def _from_network(self, session: Session | None, routing_id: bytes, data: bytes) -> None:
        try:
            if not data:
                raise ProtocolError("an empty message, or one of several frames: send each message as one frame")
            message = codec.from_client(data)
        except ProtocolError as error:
            if session is None and (other := other_version(data)) is not None:
                raise other from None
            if self._malformed.came(routing_id, "TCP", error, self._log) or session is not None:
                raise
            return
        match message:
            case m.Hello():
                self._opening.hello(routing_id, message)
            case m.PositionPart():
                self._opening.position_part(message, session)
            case m.Open():
                self._opening.open(message, routing_id, None)
                if session is not None and session.opened and message.fetches:
                    self._fetching.opened(session)
            case m.Join() if session is None:
                self._join(routing_id, message)
            case m.StatusRequest():
                check_version(message.version)
                self._status.came(routing_id)
            case m.Ping() if session is not None or routing_id in self._opening.early:
                self._out.answer(routing_id, m.Pong())
            case m.StopRequest() | m.ScaleRequest() | m.ScaleHostsRequest() | m.StacksRequest() | m.ProfileHosts():
                self._out.answer(routing_id, local_requests.refused())
            case _ if session is not None:
                self._said(session, message)
            case m.Close():
                pass  # its session has already ended
            case _:
                raise ConnectionLost("there is no session on this connection, or it has ended: send Hello first")

    def _from_host(self, session: Session | None, peer: LocalPeer, data: bytes) -> None:
        try:
            message = codec.from_client(data)
        except ProtocolError as error:
            if self._malformed.came(peer, "a unix connection", error, self._log) or session is not None:
                raise
            return
        match message:
            case m.PositionPart() if session is None:
                self._opening.position_part(message, self._table.by_token.get(message.session))
            case m.Open() if session is None:
                self._opening.open(message, b"", peer)
            case m.StopRequest() | m.ScaleRequest() | m.ScaleHostsRequest() | m.StacksRequest():
                self._requests.came(peer, message)
            case m.ProfileHosts() if session is None:
                self._requests.came(peer, message)
            case m.Ping():
                self._out.answer(peer, m.Pong())
            case _ if session is not None:
                self._said(session, message)
            case _:
                early = ProtocolError(
                    f"{type(message).__name__} before Open: send Hello over TCP, and on this connection Open first"
                )
                if self._malformed.came(peer, "a unix connection", early, self._log):
                    raise early

    def peer_ended(self, peer: LocalPeer) -> None:
        """Handle a consumer on this host that is gone. Only this frees the slots under its tensors."""
        self._requests.peer_ended(peer)
        session = self._table.by_peer.pop(peer, None)
        if session is not None:
            self._gone(session, self._handed(session))

    def connection_ended(self, routing_id: bytes) -> None:
        """Handle the end of a connection over ZeroMQ: end its session, too.

        Two kinds of sessions live on for `SILENT` seconds: those that are not open yet, because they may be opened over
        a unix connection, and those of a group's members, because the consumer may come back and say which slabs were
        handed over.
        """
        self._opening.early.pop(routing_id, None)
        self._status.forget(routing_id)
        session = self._table.by_routing_id.get(routing_id)
        if session is None:
            return
        if session.consumer is None or session.shares:
            session.heard = time.monotonic()
        else:
            self._gone(session, self._handed(session))

    def feeds_ready(self) -> None:
        """Answer the Hellos that came before all feeds were ready."""
        for routing_id, hello in self._opening.take_early().items():
            self._handle(None, routing_id, partial(self._opening.hello, routing_id, hello))

    def _measured(self) -> None:
        """Answer the StatusRequests that waited for fresh figures."""
        self._answer(self._status.refreshed())

    def _answer(self, asked: Iterable[bytes]) -> None:
        for routing_id in asked:
            self._handle(None, routing_id, partial(self._status.answer, routing_id))

    def look_at_the_clock(self) -> None:
        """End the sessions over ZeroMQ that were silent for `PATIENCE` seconds, and those that were not opened in time.
        Called once a second."""
        now = time.monotonic()
        self._opening.end_late(now)
        for session in self._table:
            if not session.link.maps_slots:
                self._handle(session, session.routing_id, partial(self._look_for, session, now))
        self._answer(self._status.another_second())
        self._malformed.look_at_the_clock()
        self._log.look_at_the_clock(now)

    def _look_for(self, session: Session, now: float) -> None:
        if now - session.heard > PATIENCE:
            if session.consumer is not None:
                text = "feed %s: nothing heard of %s for %d s"
                self._log.warning(text, session.feed, session.who, PATIENCE, **_about(session, "consumer_silent"))
                said = f"the daemon ended this session after {PATIENCE:.0f} s of silence: connect again"
                error = ConnectionLost(said)
                self._out.answer(session.routing_id, failed(error))
            self._gone(session, self._handed(session))
        elif now - session.heard > SILENT and not self._out.answer(session.routing_id, m.Pong()):
            self._gone(session, self._handed(session))  # its connection has ended

    # --- outgoing messages ---

    def deliver(self, slab: SendSlab, memfd: Memfd) -> None:
        """Send one slab."""
        session = self._table.by_consumer.get(slab.consumer)
        if session is not None:
            self._out.slab(session, slab, memfd)

    def look_at_slabs(self, look: Callable[[str, SendSlab, Memfd], None] | None) -> None:
        """Call `look` for each slab before it is sent, see `ToConsumers.look`. None: stop that."""
        self._out.look = look

    def send(self, consumer: int, message: m.Message) -> None:
        """Send a message to a consumer."""
        session = self._table.by_consumer.get(consumer)
        if session is not None:
            self._out.send(session, message)

    def refuse(self, consumer: int, error: PenstockError) -> None:
        """End the session of a consumer that is not opened, or whose request the coordinator refuses."""
        session = self._table.by_consumer.get(consumer)
        if session is None:
            return
        if session.opened:
            self._end(session, error)
            return
        self._out.send(session, failed(error))
        self._table.unbind(session)
        self._gone(session, 0)

    def mute(self, consumers: Iterable[int]) -> None:
        """Send these consumers nothing more, except why their stream failed. Their pending commands are ignored."""
        for consumer in consumers:
            if (session := self._table.by_consumer.get(consumer)) is not None:
                session.muted = True

    def forget_memfd(self, memfd: Memfd) -> None:
        """Tell consumers on this host that the memfd no longer exists."""
        for peer in list(self._table.by_peer):
            peer.gone(memfd)

    def revoke(self, keys: Collection[bytes]) -> None:
        """End the sessions of clients with these public keys, over a connection on this host too."""
        for session in self._table:
            if session.key is not None and session.key.public in keys:
                self._end(session, KeyRefused(f"the key {session.key.name} was removed from the daemon's keys"))

    def stop(self, error: PenstockError) -> None:
        """Tell every client why it gets nothing more, and if the feeds never were ready, also those that wait for
        that."""
        for session in self._table:
            self._out.send(session, failed(error))
        watching = set() if self._feeds.ready else self._status.watching
        for routing_id in watching | self._opening.early.keys():
            self._out.answer(routing_id, failed(error))

    # --- internals ---

    def _said(self, session: Session, message: m.ClientMessage) -> None:
        consumer = session.consumer
        if consumer is None:
            if not isinstance(message, m.Close):
                raise ProtocolError(f"{type(message).__name__} before Open")
            self._gone(session, 0)
            return
        match message:
            case m.Begin():
                self._epoch_begins()
                self._tell(on.Begin(consumer, message.epoch))
            case m.Ack():
                self._tell(on.Acknowledge(consumer, message.handed, message.released, message.ended))
                session.link.on_acknowledged(message.handed)
                while session.fetching and (seq := next(iter(session.fetching))) < message.handed:
                    del session.fetching[seq]
            case m.Reaches() if session.fetches:
                self._fetching.said(session, message)
            case m.Resend():
                self._out.resend(session, message.seq)
            case m.Leave():
                self._tell(on.Leave(consumer, message.epoch, message.handed))
            case m.Close():
                self._tell(on.Close(consumer, message.handed))  # tensors, or end of file, release the slots
                if not session.link.maps_slots:
                    self._gone(session, message.handed)
            case _:
                raise ProtocolError(f"{type(message).__name__} in an open session")

    def _end(self, session: Session, error: PenstockError) -> None:
        """Fail the session: tell its consumer why, and send nothing more. Other consumers of its stream go on."""
        error.feed = error.feed or session.feed
        if session.consumer is not None:
            text = "feed %s: the session of %s failed: %s"
            self._log.warning(text, session.feed, session.who, error.message, **_about(session, "consumer_failed"))
        self._out.send(session, failed(error))
        if not session.link.maps_slots or session.consumer is None:
            self._gone(session, self._handed(session))
        else:  # tensors may live over its slots
            session.failed = session.muted = True
            self._tell(on.Cut(session.consumer, self._handed(session)))

    def _gone(self, session: Session, handed: int) -> None:
        """Remove a session that has ended. Of the slabs that it was sent, the first `handed` were handed over."""
        self._table.greeted.remove(session)
        consumer = self._table.remove(session)
        if consumer is not None:
            self._log.info("feed %s: %s is gone", session.feed, session.who, **_about(session, "stream_closed"))
            self._out.drop(session)
            self._tell(on.Lost(consumer, handed))

    def _handed(self, session: Session) -> int:
        """Return how many slabs were handed over, as far as is known, in a session that ended without Close."""
        if session.consumer is None:
            return 0
        return max(self._coordinator.consumers[session.consumer].handed, session.link.handed)


def _about(session: Session, event: str) -> dict[str, object]:
    """Return the fields of a log line about a session."""
    return {"event": event, "feed": session.feed, "consumer": session.client}
