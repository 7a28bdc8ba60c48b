"""Sessions of consumers: from Hello to the last slot that comes back, over ZeroMQ or over a connection on this host.

A session is known by a token from Welcome on, gets its stream with Open, and keeps to one transport. Nothing here
decides about batches: what consumers say goes to the coordinator, and what it wants sent is sent here.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from penstock_proto import ConnectionLost, PenstockError, ProtocolError, codec
from penstock_proto import messages as m
from penstock_proto.position import MAX_POSITION, unpack

from .coordinator import Coordinator
from .coordinator.commands import Deliver
from .coordinator.gathering import Ask
from .coordinator.reader import Reader
from .host.arena import Segment
from .host.local import LocalPeer
from .host.network import Router

log = logging.getLogger(__name__)

MOST_EARLY = 1024
"""Hellos that may wait for the feeds to be ready."""

SILENT = 2.0
"""Seconds without a sign of life after which a consumer over ZeroMQ is looked for."""

PATIENCE = 30.0
"""Seconds without a sign of life after which a consumer over ZeroMQ counts as gone."""


@dataclass(eq=False)
class Session:
    """One consumer: where it is, what it reads, and when it was last heard."""

    token: bytes
    feed: str
    client: str
    routing_id: bytes
    heard: float
    peer: LocalPeer | None = None
    reader: Reader | None = None
    position: bytearray = field(default_factory=bytearray)
    """What has come of the packed position from which its stream shall begin."""
    consumer: bytes = b""
    """The same in all sessions of one consumer."""
    shares: bool = False
    """It takes from a group's stream. When its connection breaks, it may come back and tell what it was handed."""
    sending: deque[tuple[int, Segment]] = field(default_factory=deque)
    """Slabs that went out over ZeroMQ and are not acknowledged, by number."""

    @property
    def transport(self) -> str:
        """How its batches go: `local` or `tcp`."""
        return "tcp" if self.peer is None else "local"


class Consumers:
    """All sessions.

    Args:
        coordinator: what decides.
        router: consumers over ZeroMQ.
        unix: the abstract unix address for consumers on this host.
        ready: tells whether all feeds are ready; until then Hellos wait.
        status: makes the text that answers a StatusRequest.
        stop: called when the daemon's own user asks it to stop, with whether now.
        scale: called when that user asks for so many workers; returns how many there were and will be.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        router: Router,
        unix: str,
        *,
        ready: Callable[[], bool],
        status: Callable[[], str],
        stop: Callable[[bool], None],
        scale: Callable[[int, bool], tuple[int, int]],
    ) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.malformed = 0
        self._coordinator = coordinator
        self._router = router
        self._unix = unix
        self._ready = ready
        self._status = status
        self._stop = stop
        self._scale = scale
        self._by_routing_id: dict[bytes, Session] = {}
        self._by_peer: dict[LocalPeer, Session] = {}
        self._by_reader: dict[int, Session] = {}
        self._early: dict[bytes, m.Hello] = {}
        self._complained: set[str] = set()

    # --- what comes ---

    def frame(self, routing_id: bytes, data: bytes) -> None:
        """A message over ZeroMQ."""
        try:
            message = codec.from_client(data)
        except ProtocolError as error:
            if not self._other_version(routing_id, data):
                self._complain("zmq", error)
            return
        session = self._by_routing_id.get(routing_id)
        if session is not None:
            session.heard = time.monotonic()
        match message:
            case m.Hello():
                self._hello(routing_id, message)
            case m.Resume():
                self._resume(message, session, None)
            case m.Open():
                self._open(message, routing_id, None)
            case m.StatusRequest() if message.version != m.VERSION:
                self._refuse_version(routing_id, message.version)
            case m.StatusRequest():
                self._answer_status(routing_id)
            case m.Ping() if session is not None or routing_id in self._early:
                self._router.send(routing_id, m.Pong())
            case m.StopRequest() | m.ScaleRequest():
                refused = ProtocolError("a daemon is stopped and scaled from its own host, or by signals")
                self._router.send(routing_id, m.Failed(m.ErrorReport.of(refused)))
            case _ if session is not None and session.peer is None:
                self._said(session, message)
            case m.Bye():
                pass  # of a session that has ended
            case _:
                self._say_gone(routing_id)

    def datagram(self, peer: LocalPeer, data: bytes) -> None:
        """A message over a connection on this host."""
        try:
            message = codec.from_client(data)
        except ProtocolError as error:
            self._complain("unix", error)
            return
        session = self._by_peer.get(peer)
        match message:
            case m.Resume() if session is None:
                self._resume(message, self.sessions.get(message.session), peer)
            case m.Open() if session is None:
                self._open(message, b"", peer)
            case m.StopRequest():
                self._stop(message.now)
            case m.ScaleRequest():
                peer.send(m.Scaled(*self._scale(message.workers, message.now)))
            case m.Ping():
                peer.send(m.Pong())
            case _ if session is not None:
                self._said(session, message)
            case _:
                self._complain("unix", ProtocolError(f"{type(message).__name__} before Open"))

    def peer_ended(self, peer: LocalPeer) -> None:
        """A consumer on this host is gone: this, and nothing else, gives its slots back."""
        session = self._by_peer.pop(peer, None)
        if session is not None:
            self._gone(session, _handed(session))

    def connection_ended(self, routing_id: bytes) -> None:
        """A connection over ZeroMQ has ended, and its session with it.

        A session that has not been opened may still be, over a unix connection, and the consumer of a group may come
        back and say what it was handed: these are kept for `SILENT` seconds.
        """
        self._early.pop(routing_id, None)
        session = self._by_routing_id.get(routing_id)
        if session is None:
            return
        if session.reader is None or session.shares:
            session.heard = time.monotonic()
        else:
            self._gone(session, _handed(session))

    def feeds_ready(self) -> None:
        """All feeds are ready: answer the Hellos that came early."""
        early, self._early = self._early, {}
        for routing_id, hello in early.items():
            self._hello(routing_id, hello)

    def look_at_the_clock(self) -> None:
        """Let go of consumers over ZeroMQ that have not been heard for `PATIENCE` seconds."""
        for session in list(self.sessions.values()):
            if session.peer is None and time.monotonic() - session.heard > PATIENCE:
                if session.reader is not None:
                    log.warning("feed %s: nothing heard of %s for %d s", session.feed, session.client, PATIENCE)
                    self._say_gone(session.routing_id)
                self._gone(session, _handed(session))
            elif (
                session.peer is None
                and time.monotonic() - session.heard > SILENT
                and not self._router.send(session.routing_id, m.Pong())  # its connection has ended
            ):
                self._gone(session, _handed(session))

    # --- what goes ---

    def deliver(self, slab: Deliver, segment: Segment) -> None:
        """Send one slab."""
        session = self._by_reader.get(slab.reader)
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
            segment=segment.number if local else 0,
            first=slab.first,
            shapes=slab.shapes,
            record=slab.record,
            repeat=slab.repeat,
        )
        if session.peer is not None:
            session.peer.show(segment)
            session.peer.send(message)
        elif self._router.send(session.routing_id, message):
            session.sending.append((slab.seq, segment))
            layout = self._coordinator.feeds[session.feed].layout(slab.shapes)
            for start, stop in layout.regions(slab.first, slab.batches):
                self._router.send_bytes(session.routing_id, slab.seq, start, segment.view(start, stop))

    def send(self, reader: int, message: m.Message) -> None:
        """Send a message to a reader."""
        session = self._by_reader.get(reader)
        if session is not None:
            self._send(session, message)

    def segment_gone(self, segment: Segment) -> None:
        """Tell consumers on this host that the segment was given back."""
        for peer in list(self._by_peer):
            peer.gone(segment)

    def stop(self, error: PenstockError) -> None:
        """Tell every consumer why nothing more comes."""
        for session in self.sessions.values():
            self._send(session, m.Failed(m.ErrorReport.of(error)))
        for routing_id in self._early:
            self._router.send(routing_id, m.Failed(m.ErrorReport.of(error)))

    # --- how ---

    def _answer_status(self, routing_id: bytes) -> None:
        try:
            self._router.send(routing_id, m.Status(self._status()))
        except ProtocolError as error:
            self._router.send(routing_id, m.Failed(m.ErrorReport.of(error)))

    def _hello(self, routing_id: bytes, hello: m.Hello) -> None:
        if hello.version != m.VERSION:
            self._refuse_version(routing_id, hello.version)
        elif hello.feed not in self._coordinator.feeds and not self._ready():
            if len(self._early) < MOST_EARLY:
                self._early[routing_id] = hello
        elif hello.feed not in self._coordinator.feeds:
            error = self._coordinator.unknown_feed(hello.feed)
            self._router.send(routing_id, m.Failed(m.ErrorReport.of(error)))
        elif routing_id not in self._by_routing_id:
            token = secrets.token_bytes(16)
            client = "".join(letter for letter in hello.client if letter.isprintable())[:128]
            session = Session(token, hello.feed, client, routing_id, time.monotonic())
            self.sessions[token] = session
            self._by_routing_id[routing_id] = session
            self._router.send(routing_id, m.Welcome(token, self._coordinator.feeds[hello.feed].info, self._unix))

    def _open(self, message: m.Open, routing_id: bytes, peer: LocalPeer | None) -> None:
        try:
            session = self._opened(message, routing_id, peer)
        except PenstockError as error:
            report = m.Failed(m.ErrorReport.of(error))
            if peer is not None:
                peer.send(report)
            else:
                self._router.send(routing_id, report)
        else:
            log.info("feed %s: %s reads it (%s)", session.feed, session.client, session.transport)

    def _opened(self, message: m.Open, routing_id: bytes, peer: LocalPeer | None) -> Session:
        session = self.sessions.get(message.session)
        if session is None or session.reader is not None:
            raise ProtocolError("this session is not waiting to be opened")
        if peer is not None and not hmac.compare_digest(message.proof, peer.nonce):
            raise ProtocolError("the proof is wrong: the ledger has not been mapped")
        if peer is None and routing_id != session.routing_id:
            raise ProtocolError("this session was greeted on another connection")
        self._take_the_place_of(message)
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
            consumer=message.consumer,
            had=message.had,
        )
        session.reader = self._coordinator.open(session.feed, ask)
        if message.world_size:
            group = f" of group {message.group!r}" if message.group else ""
            session.client += f" (rank {message.rank} of {message.world_size}{group})"
        session.consumer = message.consumer
        session.shares = bool(message.group) and not message.world_size
        session.position.clear()
        session.peer = peer
        self._by_reader[session.reader.number] = session
        if peer is not None:
            self._by_peer[peer] = session
            self._by_routing_id.pop(session.routing_id, None)
        return session

    def _take_the_place_of(self, message: m.Open) -> None:
        """Close the older sessions of a consumer that comes anew, though we may not have noticed the end of theirs."""
        if not message.consumer:
            return
        for session in list(self.sessions.values()):
            if session.consumer == message.consumer and session.reader is not None:
                handed = message.handed if session.token == message.last else 0
                if session.peer is None:
                    self._gone(session, handed)
                else:
                    self._coordinator.cut(session.reader, handed)  # its slots come back at end of file

    def _resume(self, message: m.Resume, session: Session | None, peer: LocalPeer | None) -> None:
        where = "zmq" if peer is None else "unix"
        if session is None or session.reader is not None or session.token != message.session:
            self._complain(where, ProtocolError("Resume in a session that is not waiting to be opened"))
        elif len(session.position) + len(message.data) > MAX_POSITION:
            self._complain(where, ProtocolError("a position that is too large"))
        else:
            session.position += message.data

    def _said(self, session: Session, message: m.ClientMessage) -> None:
        reader = session.reader
        if reader is None:
            if isinstance(message, m.Bye):
                self._gone(session, 0)
            return
        try:
            match message:
                case m.Begin():
                    self._coordinator.begin(reader, message.epoch)
                case m.Ack():
                    while session.sending and session.sending[0][0] < message.handed:
                        session.sending.popleft()
                    self._coordinator.acknowledge(reader, message.handed, message.released, message.ended)
                case m.Leave():
                    self._coordinator.leave(reader, message.epoch, message.handed)
                case m.Bye():
                    self._coordinator.close(reader, message.handed)  # slots come back as tensors die, or at end of file
                    if session.peer is None:
                        self._gone(session, message.handed)
                case _:
                    raise ProtocolError(f"{type(message).__name__} in an open session")
        except ProtocolError as error:
            log.warning("feed %s: %s breaks the protocol: %s", session.feed, session.client, error.message)
            reader.stream.fail(error)

    def _gone(self, session: Session, handed: int) -> None:
        """The session has ended; the first `handed` slabs that it was sent were handed over."""
        self.sessions.pop(session.token, None)
        if self._by_routing_id.get(session.routing_id) is session:
            del self._by_routing_id[session.routing_id]
        if session.reader is not None:
            log.info("feed %s: %s is gone", session.feed, session.client)
            self._by_reader.pop(session.reader.number, None)
            for _, segment in session.sending:
                segment.retired = True
            self._coordinator.lost(session.reader, handed)
            session.reader = None

    def _say_gone(self, routing_id: bytes) -> None:
        """Tell a consumer over ZeroMQ that its session has ended, so that it does not wait for more."""
        silence = f"which was silent for more than {PATIENCE:.0f} s"
        error = ConnectionLost(f"the daemon let go of this session, {silence}: connect again")
        self._router.send(routing_id, m.Failed(m.ErrorReport.of(error)))

    def _send(self, session: Session, message: m.Message) -> None:
        if session.peer is not None:
            session.peer.send(message)
        else:
            self._router.send(session.routing_id, message)

    def _other_version(self, routing_id: bytes, data: bytes) -> bool:
        """Answer a Hello that our version cannot read, so that the other side learns why."""
        try:
            raw = msgspec.msgpack.decode(data, type=dict[str, object])
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        version = raw.get("version")
        if raw.get("type") not in ("hello", "statusrequest") or not isinstance(version, int) or version == m.VERSION:
            return False
        self._refuse_version(routing_id, version)
        return True

    def _refuse_version(self, routing_id: bytes, version: int) -> None:
        error = ProtocolError(
            f"the client speaks protocol version {version}, the daemon version {m.VERSION}: "
            "install the same release of penstock on both sides"
        )
        self._router.send(routing_id, m.Failed(m.ErrorReport.of(error)))

    def _complain(self, where: str, error: ProtocolError) -> None:
        self.malformed += 1
        if where not in self._complained:
            self._complained.add(where)
            log.warning("dropped what came over %s: %s; further ones are only counted", where, error.message)


def _handed(session: Session) -> int:
    """How many slabs a session handed over that has ended without a word, as far as can be known."""
    if session.reader is None:
        return 0
    said = session.reader.handed
    return said if session.peer is None else max(said, session.peer.handed)
