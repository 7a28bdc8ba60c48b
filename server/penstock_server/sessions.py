"""Sessions of consumers: from Hello to the last slot that comes back, over ZeroMQ or over a connection on this host.

A session is known by a token from Welcome on, gets its stream with Open, and keeps to one transport. Nothing here
decides about batches: what consumers say goes to the coordinator, and what it wants sent is sent here.

What a peer says is handled in one place (`_handle`), and fails its session at the worst: it is told why, and what it
had is taken back. Each message is checked as a whole before anything changes. What is raised all the same and is no
PenstockError is a bug: it is counted, and the stream, of which nobody knows then where it stands, fails with it. What
is sent goes through one place too (`_send`): a message that cannot be encoded fails the stream that it is about.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from penstock_proto import ConnectionLost, PenstockError, ProtocolError, codec
from penstock_proto import messages as m
from penstock_proto.position import unpack

from . import greeted
from .bugs import Bugs
from .coordinator import Coordinator, a_bug
from .coordinator import events as on
from .coordinator.ask import Ask
from .coordinator.commands import SendSlab
from .greeted import Greeted
from .host.arena import Memfd
from .host.local import LocalPeer
from .host.network import Router
from .malformed import Malformed
from .rate_limited_log import RateLimitedLog
from .session import Session

log = logging.getLogger(__name__)

MOST_EARLY = 1024
"""Hellos that may wait for the feeds to be ready."""

SILENT = 2.0
"""Seconds without a sign of life after which a consumer over ZeroMQ is looked for."""

PATIENCE = 30.0
"""Seconds without a sign of life after which a consumer over ZeroMQ counts as gone."""


class Sessions:
    """All sessions.

    Args:
        coordinator: what decides; to look at.
        tell: tells the coordinator of an event, and carries out what it decides.
        router: consumers over ZeroMQ.
        unix: the abstract unix address for consumers on this host.
        ready: tells whether all feeds are ready; until then Hellos wait.
        status: makes the text that answers a StatusRequest.
        stop: called when the daemon's own user asks it to stop, with whether now.
        scale: called when that user asks for so many workers; returns how many there were and will be.
        bugs: where errors are noted that nobody expected.

    Attributes:
        sessions: by token.
        malformed: messages that could not be decoded.
        greeted: the sessions that are not open yet.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        tell: Callable[[on.Event], None],
        router: Router,
        unix: str,
        *,
        ready: Callable[[], bool],
        status: Callable[[], str],
        stop: Callable[[bool], None],
        scale: Callable[[int, bool], tuple[int, int]],
        bugs: Bugs,
    ) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.greeted = Greeted()
        self._bugs = bugs
        self._log = RateLimitedLog(log)
        self.malformed = Malformed(self._log)
        self._coordinator = coordinator
        self._tell = tell
        self._numbers = itertools.count(1)
        self._router = router
        self._unix = unix
        self._ready = ready
        self._status = status
        self._stop = stop
        self._scale = scale
        self._by_routing_id: dict[bytes, Session] = {}
        self._by_peer: dict[LocalPeer, Session] = {}
        self._by_consumer: dict[int, Session] = {}
        self._early: dict[bytes, m.Hello] = {}
        self._asked: dict[bytes, bool] = {}
        """Who was sent a status since the clock was last looked at, and whether it has asked again."""

    # --- what comes ---

    def frame(self, routing_id: bytes, data: bytes) -> None:
        """A message over ZeroMQ."""
        session = self._by_routing_id.get(routing_id)
        if session is not None:
            session.heard = time.monotonic()
        self._handle(session, routing_id, partial(self._from_network, session, routing_id, data))

    def datagram(self, peer: LocalPeer, data: bytes) -> None:
        """A message over a connection on this host."""
        session = self._by_peer.get(peer)
        if session is None or not session.failed:
            self._handle(session, peer, partial(self._from_host, session, peer, data))

    def _handle(self, session: Session | None, to: bytes | LocalPeer, handle: Callable[[], None]) -> None:
        """Handle what a session (or, without one, a stranger) said or did: the one place where that is done."""
        try:
            handle()
        except PenstockError as error:
            failed = error
        except Exception as error:
            failed = a_bug(error)
            stream = None if session is None or session.consumer is None else self.stream_of(session.consumer)
            if stream is None:
                self._bugs.note(error)
            else:
                self._tell(on.StreamFailed(stream, error))
        else:
            return
        if session is None:
            self._answer(to, m.Failed(m.ErrorReport.of(failed)))
        else:
            self._end(session, failed)

    def _from_network(self, session: Session | None, routing_id: bytes, data: bytes) -> None:
        try:
            if not data:
                raise ProtocolError("an empty message, or one of several frames: send each message as one frame")
            message = codec.from_client(data)
        except ProtocolError as error:
            if session is None and self._other_version(routing_id, data):
                return
            if self.malformed.came(routing_id, "TCP", error) or session is not None:
                raise
            return
        match message:
            case m.Hello():
                self._hello(routing_id, message)
            case m.PositionPart():
                self._resume(message, session)
            case m.Open():
                self._open(message, routing_id, None)
            case m.StatusRequest():
                self._asks_for_status(routing_id, message)
            case m.Ping() if session is not None or routing_id in self._early:
                self._answer(routing_id, m.Pong())
            case m.StopRequest() | m.ScaleRequest():
                refused = ProtocolError("a daemon is stopped and scaled from its own host, or by signals")
                self._answer(routing_id, m.Failed(m.ErrorReport.of(refused)))
            case _ if session is not None:
                self._said(session, message)
            case m.Close():
                pass  # of a session that has ended
            case _:
                raise ConnectionLost("there is no session on this connection, or it has ended: send Hello first")

    def _from_host(self, session: Session | None, peer: LocalPeer, data: bytes) -> None:
        try:
            message = codec.from_client(data)
        except ProtocolError as error:
            if self.malformed.came(peer, "a unix connection", error) or session is not None:
                raise
            return
        match message:
            case m.PositionPart() if session is None:
                self._resume(message, self.sessions.get(message.session))
            case m.Open() if session is None:
                self._open(message, b"", peer)
            case m.StopRequest():
                self._stop(message.now)
            case m.ScaleRequest():
                self._answer(peer, m.Scaled(*self._scale(message.workers, message.now)))
            case m.Ping():
                self._answer(peer, m.Pong())
            case _ if session is not None:
                self._said(session, message)
            case _:
                early = ProtocolError(
                    f"{type(message).__name__} before Open: send Hello over TCP, and on this connection Open first"
                )
                if self.malformed.came(peer, "a unix connection", early):
                    raise early

    def peer_ended(self, peer: LocalPeer) -> None:
        """A consumer on this host is gone: this, and nothing else, gives its slots back."""
        session = self._by_peer.pop(peer, None)
        if session is not None:
            self._gone(session, self._handed(session))

    def connection_ended(self, routing_id: bytes) -> None:
        """A connection over ZeroMQ has ended, and its session with it.

        A session that has not been opened may still be, over a unix connection, and the consumer of a group may come
        back and say what it was handed: these are kept for `SILENT` seconds.
        """
        self._early.pop(routing_id, None)
        self._asked.pop(routing_id, None)
        session = self._by_routing_id.get(routing_id)
        if session is None:
            return
        if session.consumer is None or session.shares:
            session.heard = time.monotonic()
        else:
            self._gone(session, self._handed(session))

    def feeds_ready(self) -> None:
        """All feeds are ready: answer the Hellos that came early."""
        early, self._early = self._early, {}
        for routing_id, hello in early.items():
            self._handle(None, routing_id, partial(self._hello, routing_id, hello))

    def look_at_the_clock(self) -> None:
        """Let go of consumers over ZeroMQ that have not been heard for `PATIENCE` seconds, and of sessions that are not
        opened in time."""
        now = time.monotonic()
        for session in self.greeted.late(now):
            self._end(session, greeted.too_late())
        for session in list(self.sessions.values()):
            if session.peer is None:
                self._handle(session, session.routing_id, partial(self._look_for, session, now))
        asked, self._asked = self._asked, {}
        for routing_id, again in asked.items():
            if again:
                self._handle(None, routing_id, partial(self._answer_status, routing_id))
        self.malformed.look_at_the_clock()
        self._log.look_at_the_clock(now)

    def _look_for(self, session: Session, now: float) -> None:
        if now - session.heard > PATIENCE:
            if session.consumer is not None:
                self._log.warning("feed %s: nothing heard of %s for %d s", session.feed, session.client, PATIENCE)
                silence = f"which was silent for more than {PATIENCE:.0f} s"
                error = ConnectionLost(f"the daemon let go of this session, {silence}: connect again")
                self._answer(session.routing_id, m.Failed(m.ErrorReport.of(error)))
            self._gone(session, self._handed(session))
        elif now - session.heard > SILENT and not self._answer(session.routing_id, m.Pong()):
            self._gone(session, self._handed(session))  # its connection has ended

    # --- what goes ---

    def deliver(self, slab: SendSlab, memfd: Memfd) -> None:
        """Send one slab."""
        session = self._by_consumer.get(slab.consumer)
        if session is None:
            return
        local = session.peer is not None
        message = m.Slab(
            seq=slab.seq,
            epoch=slab.epoch,
            lane=slab.lane,
            index=slab.index,
            batches=slab.batches,
            rows=slab.rows,
            nbytes=slab.nbytes,
            memfd=memfd.number if local else 0,
            first=slab.first,
            shapes=slab.shapes,
            record=slab.record,
            repeat=slab.repeat,
        )
        if session.peer is not None and not session.muted:
            session.peer.show(memfd)
        if self._send(session, message) and not local:
            session.sending.append((slab.seq, memfd))
            layout = self._coordinator.feeds[session.feed].layout(slab.shapes)
            for start, stop in layout.regions(slab.first, slab.batches):
                self._router.send_bytes(session.routing_id, slab.seq, start, memfd.view(start, stop))

    def send(self, consumer: int, message: m.Message) -> None:
        """Send a message to a consumer."""
        session = self._by_consumer.get(consumer)
        if session is not None:
            self._send(session, message)

    def refuse(self, consumer: int, error: PenstockError) -> None:
        """End the session of a consumer that said what cannot be."""
        session = self._by_consumer.get(consumer)
        if session is None:
            return
        if session.opened:
            self._end(session, error)
            return
        self._answer(session.peer or session.routing_id, m.Failed(m.ErrorReport.of(error)))
        del self._by_consumer[consumer]
        if session.peer is not None:
            del self._by_peer[session.peer]
        session.consumer = None
        self._gone(session, 0)

    def stream_of(self, consumer: int) -> int | None:
        """The number of the stream that the consumer reads, if its session still exists."""
        reads = self._coordinator.consumers.get(consumer)
        return None if reads is None else reads.stream

    def mute(self, consumers: Iterable[int]) -> None:
        """Send these consumers nothing but why their stream failed, whatever the coordinator has decided by now."""
        for consumer in consumers:
            if (session := self._by_consumer.get(consumer)) is not None:
                session.muted = True

    def memfd_gone(self, memfd: Memfd) -> None:
        """Tell consumers on this host that the memfd was given back."""
        for peer in list(self._by_peer):
            peer.gone(memfd)

    def stop(self, error: PenstockError) -> None:
        """Tell every consumer why nothing more comes."""
        for session in list(self.sessions.values()):
            self._send(session, m.Failed(m.ErrorReport.of(error)))
        for routing_id in self._early:
            self._answer(routing_id, m.Failed(m.ErrorReport.of(error)))

    # --- how ---

    def _asks_for_status(self, routing_id: bytes, request: m.StatusRequest) -> None:
        """Answer at once, or when the clock is looked at, one answer to all that this connection asks until then."""
        if request.version != m.VERSION:
            raise _another_version(request.version)
        again = self._asked[routing_id] = routing_id in self._asked
        if not again:
            self._answer_status(routing_id)

    def _answer_status(self, routing_id: bytes) -> None:
        self._answer(routing_id, m.Status(self._status()))

    def _hello(self, routing_id: bytes, hello: m.Hello) -> None:
        if hello.version != m.VERSION:
            raise _another_version(hello.version)
        if routing_id in self._by_routing_id:
            return
        if hello.feed not in self._coordinator.feeds:
            if self._ready():
                raise self._coordinator.unknown_feed(hello.feed)
            if len(self._early) >= MOST_EARLY and routing_id not in self._early:
                raise ConnectionLost("too many clients wait for the daemon's feeds to be ready: connect again")
            self._early[routing_id] = hello
            return
        token = secrets.token_bytes(16)
        client = "".join(letter for letter in hello.client if letter.isprintable())[:128]
        session = Session(token, hello.feed, client, routing_id, time.monotonic())
        welcome = m.Welcome(token, self._coordinator.feeds[hello.feed].info, self._unix)
        if self._answer(routing_id, welcome):
            self.sessions[token] = self._by_routing_id[routing_id] = session
            self._make_room(self.greeted.add(session, session.heard))

    def _make_room(self, session: Session | None) -> None:
        if session is not None:
            self._end(session, greeted.too_many())

    def _open(self, message: m.Open, routing_id: bytes, peer: LocalPeer | None) -> None:
        session = self.sessions.get(message.session)
        if session is None:
            raise ConnectionLost("there is no such session, or it has ended: connect again")
        if session.consumer is not None:
            raise ProtocolError("this session has been opened already")
        if peer is not None and not hmac.compare_digest(message.proof, peer.nonce):
            raise ProtocolError("the proof is wrong: the ledger has not been mapped")
        if peer is None and routing_id != session.routing_id:
            raise ProtocolError("this session was greeted on another connection")
        ask = self._ask(message, session, peer)
        session.consumer = number = next(self._numbers)
        session.peer = peer
        self._by_consumer[number] = session
        if peer is not None:
            self._by_peer[peer] = session
        self._tell(on.Open(number, session.feed, ask))
        if session.consumer is None:  # it was refused
            return
        session.opened = True
        self.greeted.remove(session)
        if message.world_size:
            group = f" of group {message.group!r}" if message.group else ""
            session.client += f" (rank {message.rank} of {message.world_size}{group})"
        session.identity = message.consumer
        session.shares = bool(message.group) and not message.world_size
        if peer is not None:
            peer.opened()
            self._by_routing_id.pop(session.routing_id, None)
        self._log.info("feed %s: %s reads it (%s)", session.feed, session.client, session.transport)

    def _ask(self, message: m.Open, session: Session, peer: LocalPeer | None) -> Ask:
        """What the message asks for. Once it is known to be whole the consumer's older sessions make room."""
        info = self._coordinator.feeds[session.feed].info
        if any(had.lane >= info.lanes or had.batches > info.turn for had in message.had):
            raise ProtocolError("slabs were handed over that this feed cannot have", feed=session.feed)
        ask = Ask(
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
        )
        self._take_the_place_of(message)
        return ask

    def _take_the_place_of(self, message: m.Open) -> None:
        """Close the older sessions of a consumer that comes anew, though we may not have noticed the end of theirs."""
        if not message.consumer:
            return
        for session in list(self.sessions.values()):
            if session.identity == message.consumer and session.consumer is not None:
                handed = message.handed if session.token == message.last else 0
                if session.peer is None:
                    self._gone(session, handed)
                else:  # its slots come back at end of file
                    self._tell(on.Cut(session.consumer, handed))

    def _resume(self, message: m.PositionPart, session: Session | None) -> None:
        if session is None or session.consumer is not None or session.token != message.session:
            raise ProtocolError("PositionPart without a session that waits for Open: send Hello first")
        info = self._coordinator.feeds[session.feed].info
        try:
            self._make_room(self.greeted.sent(session, message.data, info))
        except ProtocolError:
            self._gone(session, 0)
            raise

    def _said(self, session: Session, message: m.ClientMessage) -> None:
        consumer = session.consumer
        if consumer is None:
            if isinstance(message, m.Close):
                self._gone(session, 0)
            return
        match message:
            case m.Begin():
                self._tell(on.Begin(consumer, message.epoch))
            case m.Ack():
                self._tell(on.Acknowledge(consumer, message.handed, message.released, message.ended))
                while session.sending and session.sending[0][0] < message.handed:
                    session.sending.popleft()
            case m.Leave():
                self._tell(on.Leave(consumer, message.epoch, message.handed))
            case m.Close():
                self._tell(on.Close(consumer, message.handed))  # slots come back as tensors die, or at end of file
                if session.peer is None:
                    self._gone(session, message.handed)
            case _:
                raise ProtocolError(f"{type(message).__name__} in an open session")

    def _end(self, session: Session, error: PenstockError) -> None:
        """The session has failed: its consumer hears why, and nothing more. Others that share its stream go on."""
        error.feed = error.feed or session.feed
        if session.consumer is not None:
            self._log.warning("feed %s: the session of %s failed: %s", session.feed, session.client, error.message)
        self._send(session, m.Failed(m.ErrorReport.of(error)))
        if session.peer is None or session.consumer is None:
            self._gone(session, self._handed(session))
        else:  # tensors may live over its slots
            session.failed = session.muted = True
            self._tell(on.Cut(session.consumer, self._handed(session)))

    def _gone(self, session: Session, handed: int) -> None:
        """The session has ended; the first `handed` slabs that it was sent were handed over."""
        self.sessions.pop(session.token, None)
        self.greeted.remove(session)
        if self._by_routing_id.get(session.routing_id) is session:
            del self._by_routing_id[session.routing_id]
        consumer, session.consumer = session.consumer, None
        if consumer is not None:
            self._log.info("feed %s: %s is gone", session.feed, session.client)
            self._by_consumer.pop(consumer, None)
            for _, memfd in session.sending:
                memfd.retired = True
            if session.sending:  # bytes that still wait must not keep their slots for ever
                self._router.drop(session.routing_id)
            self._tell(on.Lost(consumer, handed))

    def _send(self, session: Session, message: m.Message) -> bool:
        """Send a message to a session; whether that could be done."""
        if session.failed or (session.muted and not isinstance(message, m.Failed)):
            return False
        try:
            return self._put(session.peer or session.routing_id, message)
        except ProtocolError as error:
            stream = None if session.consumer is None else self.stream_of(session.consumer)
            if stream is not None:
                self._tell(on.StreamFailed(stream, error))
            return False

    def _answer(self, to: bytes | LocalPeer, message: m.Message) -> bool:
        """Answer who may have no session; whether that could be done."""
        try:
            return self._put(to, message)
        except ProtocolError as error:
            self._put(to, m.Failed(m.ErrorReport.of(error)))  # which has room in a message
            return False

    def _put(self, to: bytes | LocalPeer, message: m.Message) -> bool:
        if isinstance(to, bytes):
            return self._router.send(to, message)
        to.send(message)
        return True

    def _handed(self, session: Session) -> int:
        """How many slabs a session handed over that has ended without a word, as far as can be known."""
        if session.consumer is None:
            return 0
        said = self._coordinator.consumers[session.consumer].handed
        return said if session.peer is None else max(said, session.peer.handed)

    def _other_version(self, routing_id: bytes, data: bytes) -> bool:
        """Answer a Hello that our version cannot read, so that the other side learns why."""
        try:
            raw = msgspec.msgpack.decode(data, type=dict[str, object])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        version = raw.get("version")
        if raw.get("type") not in ("hello", "statusrequest") or not isinstance(version, int) or version == m.VERSION:
            return False
        self._answer(routing_id, m.Failed(m.ErrorReport.of(_another_version(version))))
        return True


def _another_version(version: int) -> ProtocolError:
    return ProtocolError(
        f"the client speaks protocol version {version}, the daemon version {m.VERSION}: "
        "install the same release of penstock on both sides"
    )
