"""A small scripted daemon for tests of the client. It speaks the protocol over both transports, and makes no data.

It sends the slabs that a test gives it, within credit and slots, and records every message that it receives. It
overwrites each slot as soon as it is released, so that a test notices a slot that is released too early.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import zmq

from penstock_proto import VERSION, PenstockError, ProtocolError, UnknownFeed
from penstock_proto.batches.inferring import infer
from penstock_proto.batches.layout import SlotLayout, fixed_layout, is_fixed, lay_out
from penstock_proto.batches.position import EndedLane, Place, Position, unpack
from penstock_proto.messages import (
    Ack,
    Begin,
    Begun,
    Chunk,
    Close,
    End,
    ErrorReport,
    Failed,
    FeedInfo,
    Greeting,
    Hello,
    LaneEnded,
    Leave,
    Map,
    Message,
    Open,
    Opened,
    Ping,
    Pong,
    PositionPart,
    SentElsewhere,
    Slab,
    Welcome,
)
from penstock_proto.security import unix_address
from penstock_proto.spec import Spec, flatten, leaf_list
from penstock_proto.transport import ledger, seqpacket
from penstock_proto.transport.codec import encode, from_client

RUBBISH = 0xEE


def sealed_memfd(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """Return a memfd of `nbytes` bytes with these seals."""
    fd = os.memfd_create("fake", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@dataclass
class Made:
    """A slab to send: the bytes of its slot, and the fields of its message.

    `lane` None: lane 0, with batches numbered in the order of sending, and without records.
    """

    data: bytes
    layout: SlotLayout
    batches: int
    rows: int
    shapes: tuple[tuple[int, ...], ...] = ()
    lane: int | None = None
    index: int = 0
    first: int = 0

    def record(self) -> bytes:
        """Return the restart record after this slab."""
        return b"" if self.lane is None or self.lane < 0 else record(self.lane, self.index + self.batches)

    def split(self, batches: int) -> tuple[Made, Made]:
        """Return two slabs: the first `batches` batches, and the others."""
        rows = batches * self.rows // self.batches
        return (
            replace(self, batches=batches, rows=rows),
            replace(
                self,
                batches=self.batches - batches,
                rows=self.rows - rows,
                index=self.index + batches,
                first=self.first + batches,
            ),
        )


def record(lane: int, index: int) -> bytes:
    """Return a made-up restart record after `index` batches of a lane."""
    return f"lane {lane} at {index}".encode() + bytes(100)


@dataclass
class Fail:
    """Instead of a slab, send this error."""

    error: PenstockError


class Vanish:
    """Instead of a slab, close the session's connection without a message, and accept new connections."""


class Stall:
    """Instead of a slab, send nothing until `FakeDaemon.go_on`."""


def feed_info(
    spec: Spec,
    batch_size: int | None,
    *,
    turn: int = 1,
    batches: int | None = None,
    epochs: int | None = None,
    **more: bool,
) -> FeedInfo:
    return FeedInfo(
        name="feed",
        spec=spec,
        batch_size=batch_size,
        turn=turn,
        drop_remainder=more.get("drop_remainder", False),
        order="exact",
        lanes=1,
        seed=0,
        epochs=epochs,
        batches=batches,
        samples=None,
    )


def slab(info: FeedInfo, *batches: object) -> Made:
    """Return a slab of these batches. Each has the feed's structure, and rows as its first dimension."""
    flats = [flatten(info.spec, batch) for batch in batches]
    rows = [len(flat[0]) if flat[0].ndim else 1 for flat in flats]
    dtypes = [leaf.dtype for leaf in leaf_list(info.spec)]
    if is_fixed(info.spec, info.batch_size):
        layout, shapes = fixed_layout(info.spec, info.batch_size, info.turn), ()
    else:
        shapes = tuple(array.shape for array in flats[0])
        layout = lay_out(dtypes, shapes)
    slot = np.zeros(layout.nbytes, np.uint8)
    for i, (flat, count) in enumerate(zip(flats, rows, strict=True)):
        layout.headers(slot)[i, 0] = count
        for leaf, array in zip(layout.leaves(slot), flat, strict=True):
            (leaf[i, : len(array)] if array.ndim else leaf[i : i + 1])[...] = array
    return Made(slot.tobytes(), layout, len(batches), sum(rows), shapes)


def numbers(
    count: int, *, rows: int = 4, width: int = 16, turn: int = 1, **more: object
) -> tuple[FeedInfo, Callable[[int], list[Made]]]:
    """Return a feed of (x, y), x float32 (width,), y int64 (), and the slabs of each epoch.

    An epoch has `count` batches. All values of batch i of epoch e are 100 e + i.
    """
    info = feed_info(infer((np.zeros(width, np.float32), np.int64(0))), rows, turn=turn, **more)

    def epoch(e: int) -> list[Made]:
        batches = [
            (np.full((rows, width), 100 * e + i, np.float32), np.full(rows, 100 * e + i, np.int64))
            for i in range(count)
        ]
        return [slab(info, *batches[i : i + turn]) for i in range(0, count, turn)]

    return info, epoch


def dealt(
    rows: list[int], *, turn: int = 1, batch_size: int = 4, width: int = 16, **more: object
) -> tuple[FeedInfo, Callable[[int], list[Made | LaneEnded]]]:
    """Return a feed as `numbers`, but with lanes of `rows` rows, in exact order, with lanes' ends and merged batches.

    All values of batch i of epoch e, in stream order, are 1000 e + i.
    """
    total = -(-sum(rows) // batch_size)
    info = feed_info(infer((np.zeros(width, np.float32), np.int64(0))), batch_size, turn=turn, batches=total, **more)
    info = msgspec.structs.replace(info, lanes=len(rows))

    def epoch(e: int) -> list[Made | LaneEnded]:
        out: list[Made | LaneEnded] = []
        at = [0] * len(rows)
        live = list(range(len(rows)))
        number = left = merged = sent = 0

        def put(lane: int, index: int, counts: list[int]) -> None:
            nonlocal sent
            batches = [
                (np.full((c, width), 1000 * e + sent + i, np.float32), np.full(c, 1000 * e + sent + i, np.int64))
                for i, c in enumerate(counts)
            ]
            made = slab(info, *batches)
            made.lane, made.index = lane, index
            sent += len(counts)
            out.append(made)

        while live:
            for lane in list(live):
                full = rows[lane] // batch_size
                count = min(turn, full - at[lane])
                if count:
                    put(lane, at[lane], [batch_size] * count)
                    at[lane] += count
                if at[lane] == full:
                    live.remove(lane)
                    leftover = rows[lane] % batch_size
                    out.append(LaneEnded(e, number, lane, full, leftover, record(lane, full)))
                    number += 1
                    left += leftover
                    while left >= batch_size or (left and not live):
                        put(-1, merged, [min(left, batch_size)])
                        merged, left = merged + 1, left - min(left, batch_size)
        return out

    return info, epoch


def standing(info: FeedInfo, epoch: int, plan: Sequence[object], batches: int, *, within: bool = False) -> Position:
    """Return the position right after the first `batches` batches of the plan. `within`: it is within the slab after
    them, so it has the ends of lanes before that slab, too."""
    places: dict[int, Place] = {}
    ended: list[EndedLane] = []
    done = rows = merged = 0
    for item in plan:
        if done == batches and not (within and isinstance(item, LaneEnded)):
            break
        if isinstance(item, LaneEnded):
            places.pop(item.lane, None)
            ended.append(EndedLane(item.lane, item.index, item.leftover, item.record))
        elif isinstance(item, Made):
            some = item if item.batches <= batches - done else item.split(batches - done)[0]
            done, rows = done + some.batches, rows + some.rows
            if item.lane is not None and item.lane < 0:
                merged += 1
            elif item.lane is not None:
                places[item.lane] = Place(item.lane, some.index + some.batches, some.record())
            if some is not item:
                break  # the rest of the turn comes before anything else
    behind = merged * (info.batch_size or 0)
    kept = []
    for lane in ended:
        behind -= lane.leftover
        kept.append(lane if behind < 0 else EndedLane(lane.lane, lane.index, lane.leftover))
    return Position(info, epoch, done, rows, b"", tuple(places[lane] for lane in sorted(places)), tuple(kept), merged)


@dataclass
class _Session:
    """One session of the fake daemon."""

    token: bytes
    routing_id: bytes
    connection: socket.socket | None = None
    page: np.ndarray | None = None
    credit: int = 0
    epoch: int | None = None
    todo: list[object] = field(default_factory=list)
    totals: list[int] = field(default_factory=lambda: [0, 0, 0])
    sent: int = 0
    handed: int = 0
    acked_end: int = 0
    ended: int = 0
    slots: dict[int, int] = field(default_factory=dict)
    gone: bool = False
    resume: bytes = b""
    position: Position | None = None
    grouped: bool = False
    """Whether it is a group's stream, which has no records and no ends of lanes."""


class FakeDaemon:
    """Serves one feed: `epoch(e)` returns the items to send in epoch e. A context manager.

    Attributes:
        got: all messages that came, in order.
        marked: for each same-host session that ended, the number of slabs that its ledger marks as handed over.
        ended_sessions: the number of sessions that ended, by end of file or Close.
        positions: the positions at which sessions asked to begin.
    """

    def __init__(
        self,
        info: FeedInfo,
        epoch: Callable[[int], Sequence[object]],
        *,
        slots: int = 32,
        unix: bool = True,
        answer: bool = True,
        chunk: int = 1 << 20,
        quota: int | None = None,
        credit: int | None = None,
        port: int | None = None,
        digest: bytes | None = None,
    ) -> None:
        self.info = info
        self.positions: list[Position] = []
        self._digest = digest
        self.got: list[Message] = []
        self.stalled = threading.Event()
        self.ended_sessions = 0
        self.marked: list[int] = []
        self.wrong_end = False
        self._epoch = epoch
        self._answer = answer
        self._chunk = chunk
        self._quota = quota
        self._credit = credit
        self._context = zmq.Context()
        self._router, self.port = self._bound(port)
        self.url = f"tcp://127.0.0.1:{self.port}/feed"
        self.unix = unix_address.unused()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if unix:
            self._listener.bind("\0" + self.unix)
            self._listener.listen()
        self._wake, self._waker = socket.socketpair()
        self._sessions: list[_Session] = []
        self._fresh: list[tuple[socket.socket, np.ndarray]] = []
        first = [made for made in epoch(0) if isinstance(made, Made)]
        self._slot = max([len(made.data) for made in first] or [64])
        self.free = list(range(slots))
        self.memfds = [sealed_memfd(self._slot) for _ in self.free]
        self._stop = False
        self._commands: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="fake-daemon")
        self._thread.start()

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self.do(lambda: None)
        self._thread.join()
        for session in self._sessions:
            if session.connection is not None:
                session.connection.close()
        for connection, _ in self._fresh:
            connection.close()
        for end in (self._listener, self._wake, self._waker):
            end.close()
        self._router.close()
        self._context.term()
        for memfd in self.memfds:
            os.close(memfd)

    def _bound(self, port: int | None) -> tuple[zmq.Socket[bytes], int]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if port is None:
            return router, router.bind_to_random_port("tcp://127.0.0.1")
        for _ in range(500):
            try:
                router.bind(f"tcp://127.0.0.1:{port}")
                break
            except zmq.ZMQError:  # ZeroMQ may still be closing the old socket
                time.sleep(0.01)
        return router, port

    def do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._waker.send(b"\0")

    def go_on(self) -> None:
        """Continue after a Stall."""

        def command() -> None:
            for session in self._sessions:
                if session.todo and isinstance(session.todo[0], Stall):
                    session.todo.pop(0)

        self.do(command)

    def say(self, message: Message) -> None:
        """Send a message to every session now, out of turn. After `Failed` it sends nothing more."""

        def command() -> None:
            for session in self._sessions:
                if not session.gone:
                    self._send(session, message)
                    if isinstance(message, Failed):
                        session.todo.clear()

        self.do(command)

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(message, kind) for message in self.got)

    def wait_for(self, true: Callable[[], object], timeout: float = 60) -> None:
        """Wait until `true()`; fail after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < deadline, "still not true when the time was up"
            time.sleep(0.005)

    @property
    def in_use(self) -> int:
        """The number of slots that are not free."""
        return sum(len(session.slots) for session in self._sessions if not session.gone)

    # --- the thread ---

    def _run(self) -> None:
        while not self._stop:
            poller = zmq.Poller()
            poller.register(self._router, zmq.POLLIN)
            poller.register(self._wake.fileno(), zmq.POLLIN)
            with contextlib.suppress(OSError):
                self._listener.getsockname() and poller.register(self._listener.fileno(), zmq.POLLIN)
            local = {s.connection.fileno(): s for s in self._sessions if s.connection is not None and not s.gone}
            fresh = {c.fileno(): (c, page) for c, page in self._fresh}
            for fd in [*local, *fresh]:
                poller.register(fd, zmq.POLLIN)
            ready = dict(poller.poll(1000))
            if self._wake.fileno() in ready:
                self._wake.recv(4096)
            while self._commands:
                self._commands.pop(0)()
            if self._router in ready:
                self._from_router()
            if self._listener.fileno() in ready:
                self._greet()
            for fd in ready:
                if fd in local:
                    self._from_unix(local[fd])
                elif fd in fresh:
                    self._from_fresh(*fresh[fd])
            for session in self._sessions:
                self._pump(session)

    def _greet(self) -> None:
        connection, _ = self._listener.accept()
        fd = sealed_memfd(ledger.NBYTES)
        os.pwrite(fd, secrets.token_bytes(16), ledger.NONCE.start)
        page = np.frombuffer(mmap.mmap(fd, ledger.NBYTES), np.uint8)
        with contextlib.suppress(OSError):  # the client does not want to be greeted
            seqpacket.send(connection, encode(Greeting(VERSION)), fd)
        os.close(fd)
        self._fresh.append((connection, page))

    def _from_fresh(self, connection: socket.socket, page: np.ndarray) -> None:
        try:
            data, _ = seqpacket.receive(connection)
        except ConnectionResetError:  # the client did not read the greeting
            data = b""
        message = from_client(data) if data else None
        if isinstance(message, PositionPart):
            self.got.append(message)
            next(s for s in self._sessions if s.token == message.session).resume += message.data
            return
        self._fresh = [(c, p) for c, p in self._fresh if c is not connection]
        if message is None:
            connection.close()
            return
        self.got.append(message)
        assert isinstance(message, Open)
        assert message.proof == page[ledger.NONCE].tobytes()
        session = next(s for s in self._sessions if s.token == message.session)
        session.connection, session.page = connection, page
        self._open(session, message)
        with contextlib.suppress(OSError):
            for number, memfd in enumerate(self.memfds, 1):
                seqpacket.send(connection, encode(Map(number, self._slot)), memfd)

    def _open(self, session: _Session, message: Open) -> None:
        if session.resume:
            session.position = unpack(session.resume)
            self.positions.append(session.position)
        session.grouped = bool(message.group) and not message.world_size
        session.credit = self._credit or message.credit
        quota = message.quota if self._quota is None else self._quota
        self._send(session, Opened(session.credit, quota))

    def _from_router(self) -> None:
        routing_id, data = self._router.recv_multipart()
        message = from_client(data)
        self.got.append(message)
        if not self._answer:
            return
        if isinstance(message, Hello):
            if message.version != VERSION:
                error: PenstockError = ProtocolError("versions differ")
            elif message.feed != self.info.name:
                error = UnknownFeed(f"no feed {message.feed!r}; there is: {self.info.name}")
            else:
                session = _Session(secrets.token_bytes(16), routing_id)
                self._sessions.append(session)
                self._router.send_multipart([routing_id, encode(Welcome(session.token, self.info, self.unix))])
                return
            self._router.send_multipart([routing_id, encode(Failed(ErrorReport.of(error)))])
            return
        session = next(s for s in self._sessions if s.routing_id == routing_id)
        if isinstance(message, Open):
            self._open(session, message)
        elif isinstance(message, PositionPart):
            session.resume += message.data
        else:
            self.heard(session, message)

    def _from_unix(self, session: _Session) -> None:
        assert session.connection is not None
        try:
            data, _ = seqpacket.receive(session.connection)
        except ConnectionResetError:
            data = b""
        if not data:
            assert session.page is not None
            self.marked.append(int(session.page[:8].view(np.uint64)[0]))
            session.gone = True
            self.ended_sessions += 1
            session.connection.close()
            for seq in list(session.slots):
                self._free(session, seq)
            return
        message = from_client(data)
        self.got.append(message)
        self.heard(session, message)

    def heard(self, session: _Session, message: Message) -> None:
        if isinstance(message, Begin):
            session.epoch, session.totals = message.epoch, [0, 0, 0]
            plan = list(self._epoch(message.epoch))
            if session.position is not None and session.position.epoch == message.epoch:
                plan = self._rest(session, session.position, plan)
            if session.grouped:
                plan = [item for item in plan if not isinstance(item, LaneEnded)]
            if self._digest is not None:
                self._send(session, Begun(message.epoch, self._digest))
            session.todo = [*plan, "end"]
        elif isinstance(message, Leave):
            assert message.epoch == session.epoch
            session.todo = []
        elif isinstance(message, Ack):
            assert session.handed <= message.handed <= session.sent
            session.handed, session.acked_end = message.handed, message.ended
            if session.page is not None:
                for seq in message.released:
                    assert seq < message.handed
                    self._free(session, seq)
        elif isinstance(message, Ping):
            self._send(session, Pong())
        elif isinstance(message, Close):
            session.todo = []
            if session.connection is None:
                session.gone = True
                self.ended_sessions += 1

    def _rest(self, session: _Session, position: Position, plan: list[object]) -> list[object]:
        """Return the items of the plan after the position. The position must be a place in the plan."""
        want = standing(self.info, position.epoch, plan, position.batches, within=position.skip > 0)
        ended = {lane.lane for lane in position.ended}
        assert (position.batches, position.rows, position.merged) == (want.batches, want.rows, want.merged)
        if any(isinstance(item, Made) and item.lane is not None for item in plan):
            places = tuple(msgspec.structs.replace(place, ahead=b"") for place in position.places if place.record)
            assert places == want.places
            ahead = {place.lane: place.ahead for place in position.places if place.ahead}
            at = 0
            for item in plan:  # the position must name a later place for each lane that it passes batches of
                if isinstance(item, Made):
                    first, at = at, at + item.batches
                    passed = at > position.batches and first < position.batches + position.skip
                    if passed and item.lane is not None and item.lane >= 0:
                        later = range(item.index + 1, item.index + item.batches + 1)
                        assert ahead.pop(item.lane) in [record(item.lane, index) for index in later]
            assert not ahead
            assert position.ended == want.ended
        session.totals = [0, position.batches, position.rows]
        rest: list[object] = []
        done, skip = 0, position.batches + position.skip
        for item in plan:
            if isinstance(item, LaneEnded):
                if item.lane not in ended:
                    rest.append(item)
            elif isinstance(item, Made) and done < skip:
                done += item.batches
                for border in (position.batches, skip):  # the ends of what was read, and of what is passed over
                    over = done - border
                    if isinstance(item, Made) and 0 < over < item.batches:
                        head, tail = item.split(item.batches - over)
                        rest += self._cut(head, done - over, position.batches, skip)
                        item = tail
                rest += self._cut(item, done, position.batches, skip)
            elif done >= skip:
                rest.append(item)
        return rest

    def _cut(self, made: Made, done: int, read: int, skip: int) -> list[object]:
        if done <= read:
            return []
        if done > skip:
            return [made]
        lane = 0 if made.lane is None else made.lane
        return [SentElsewhere(0, lane, made.index, made.batches, made.rows, made.record())]

    def _free(self, session: _Session, seq: int) -> None:
        slot = session.slots.pop(seq)
        os.pwrite(self.memfds[slot], bytes([RUBBISH]) * self._slot, 0)
        self.free.append(slot)

    def _send(self, session: _Session, message: Message, payload: bytes | None = None) -> None:
        data = encode(message)
        if session.connection is not None:
            with contextlib.suppress(OSError):  # its end of file will end the session
                session.connection.send(data)
            return
        try:
            self._router.send_multipart([session.routing_id, data, *([] if payload is None else [payload])])
        except zmq.ZMQError:
            session.gone = True

    def _pump(self, session: _Session) -> None:
        while session.todo and not session.gone:
            head = session.todo[0]
            if isinstance(head, Stall):
                self.stalled.set()
                return
            if isinstance(head, Fail):
                self._send(session, Failed(ErrorReport.of(head.error)))
                session.todo = []
                return
            if isinstance(head, Vanish):
                session.todo = []
                session.gone = True
                if session.connection is not None:
                    session.connection.close()
                else:
                    self._router.close()
                    self._router, _ = self._bound(self.port)
                return
            if isinstance(head, LaneEnded):
                self._send(session, head)
                session.todo.pop(0)
                continue
            if isinstance(head, SentElsewhere):
                assert session.epoch is not None
                self._send(session, msgspec.structs.replace(head, epoch=session.epoch))
                session.totals[1] += head.batches
                session.totals[2] += head.rows
                session.todo.pop(0)
                continue
            if head == "end":
                if session.handed < session.sent:
                    return
                slabs, batches, rows = session.totals
                assert session.epoch is not None
                self._send(session, End(session.epoch, slabs, batches, rows + self.wrong_end))
                session.ended += 1
                session.todo.pop(0)
                continue
            assert isinstance(head, Made)
            if session.sent - session.handed >= session.credit:
                return
            if session.connection is not None and not self.free:
                return
            session.todo.pop(0)
            self.send_slab(session, head)

    def send_slab(self, session: _Session, made: Made) -> None:
        assert session.epoch is not None
        seq, memfd = session.sent, 0
        if session.connection is not None:
            slot = self.free.pop(0)
            session.slots[seq] = slot
            memfd = slot + 1
            os.pwrite(self.memfds[slot], made.data, 0)
        session.sent += 1
        for i, more in enumerate((1, made.batches, made.rows)):
            session.totals[i] += more
        lane, index = (0, session.totals[1] - made.batches) if made.lane is None else (made.lane, made.index)
        message = Slab(
            seq,
            session.epoch,
            lane,
            index,
            made.batches,
            made.rows,
            made.layout.nbytes_of(made.batches),
            memfd,
            made.first,
            made.shapes,
            b"" if session.grouped else made.record(),
        )
        self._send(session, message)
        if session.connection is None:
            for start, stop in made.layout.regions(made.first, made.batches):
                for at in range(start, stop, self._chunk):
                    self._send(session, Chunk(seq, at), made.data[at : min(at + self._chunk, stop)])
