"""The daemon's TCP side: with libzmq, with our client, and with peers that break the rules.

The router runs on its own loop in this process. Sockets are real.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import uvloop
import zmq

from penstock_proto import StartError
from penstock_proto import messages as m
from penstock_proto.security.keys import client_keys
from penstock_proto.transport import codec, zmtp
from penstock_proto.transport import zmtp_dealer as client
from penstock_server.cli import keygen
from penstock_server.net import accepting, network, network_peer, tcp_peer
from penstock_server.net.keys import ServerKeys, server_keys
from penstock_server.net.network import Router

T = TypeVar("T")

READY = zmtp.ready(b"DEALER")
uvloop.new_event_loop().close()  # the first loop opens a pipe that stays
SIZES = [0, 1, 255, 256, 16 * 1024, codec.MAX_MESSAGE]


class Host:
    """A router on its own loop, in its own thread.

    Attributes:
        frames: the received messages, as (peer, message).
        ended: peers whose connections have ended.
        answer: called on the loop with each (peer, message).
    """

    def __init__(self, bind: str = "tcp://127.0.0.1:0", keys: ServerKeys | None = None) -> None:
        self.frames: queue.Queue[tuple[bytes, bytes]] = queue.Queue()
        self.ended: queue.Queue[bytes] = queue.Queue()
        self.answer: Callable[[bytes, bytes], None] = lambda peer, data: None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="router")
        self._thread.start()
        try:
            self.router = self.call(lambda: Router(bind, self._came, self.ended.put, keys))
        except BaseException:
            self._stop()
            raise
        self.endpoint = self.router.endpoint
        self.port = int(self.endpoint.rpartition(":")[2])

    def call(self, function: Callable[[], T]) -> T:
        """Call the function on the loop, and return its result."""

        async def calling() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(calling(), self._loop).result(30)

    def send(self, peer: bytes, message: m.Message) -> bool:
        return self.call(lambda: self.router.send(peer, message))

    def came(self) -> tuple[bytes, bytes]:
        """Return the next message."""
        return self.frames.get(timeout=60)

    def close(self) -> None:
        self.call(self.router.close)
        self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _came(self, peer: bytes, data: bytes) -> None:
        self.frames.put((peer, data))
        self.answer(peer, data)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@contextmanager
def libzmq(host: Host, **options: object) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.setsockopt(zmq.IPV6, 1)
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)  # type: ignore[arg-type]
        dealer.connect(host.endpoint)
        yield dealer


def frame(data: bytes, more: bool = False) -> bytes:
    return zmtp.head_of(len(data), more) + data


class Raw:
    """A peer that sends exactly what it is told to."""

    def __init__(self, host: Host, says: bytes = zmtp.GREETING + READY, window: int = 0) -> None:
        self.socket = socket.socket()
        if window:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        self.socket.settimeout(10)
        self.socket.connect(("127.0.0.1", host.port))
        self._held = b""
        with suppress(ConnectionError):  # it may be refused
            self.say(says)

    def say(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, count: int) -> bytes:
        while len(self._held) < count:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._held += data
        data, self._held = self._held[:count], self._held[count:]
        return data

    def greeted(self) -> Raw:
        """Read the other side's handshake, and return this peer."""
        zmtp.check_greeting(self.read(64))
        head, body = self.frame()
        assert head.command
        assert zmtp.parse_command(body)[0] == b"READY"
        return self

    def frame(self) -> tuple[zmtp.Head, bytes]:
        data = self.read(2)
        if data[0] & zmtp.LONG:
            data += self.read(7)
        head = zmtp.head(data)
        assert head is not None
        return head, self.read(head.size)

    def message(self) -> m.ServerMessage:
        """Return the next message that is not a heartbeat."""
        head, body = self.frame()
        while head.command:
            head, body = self.frame()
        return codec.from_server(body)

    def ended(self) -> bool:
        """Wait until the other side closes the connection. Ignore anything that it sends before. Return True."""
        with suppress(ConnectionError):
            while self.socket.recv(1 << 16):
                pass
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


# --- peers that keep the rules ---


def test_messages_and_slabs_of_all_sizes_go_both_ways_with_libzmq(host: Host) -> None:
    with libzmq(host) as dealer:
        for size in SIZES:
            data = bytes(i % 251 for i in range(size))
            dealer.send(data)
            peer, got = host.came()
            assert got == data
        for size in (1, 255, 256, 100_000, codec.MAX_CHUNK, 2 * codec.MAX_CHUNK + 5):
            slab = np.arange(size, dtype=np.uint8)
            assert host.call(lambda slab=slab: host.router.send_bytes(peer, 7, 64, slab))
            for at in range(0, size, codec.MAX_CHUNK):
                head, body = dealer.recv_multipart()
                assert codec.from_server(head) == m.Chunk(7, 64 + at)
                assert body == slab[at : at + codec.MAX_CHUNK].tobytes()
        assert host.send(peer, m.Status("x" * 1000 * 1024))
        assert codec.from_server(dealer.recv()) == m.Status("x" * 1000 * 1024)


def test_our_client_and_the_router_understand_each_other(host: Host) -> None:
    dealer = client.connected("127.0.0.1", host.port, 10, lambda: None)
    for size in SIZES:
        data = bytes(i % 251 for i in range(size))
        while not dealer.send(data):
            dealer.wait(1)
        while dealer.unsent:
            dealer.wait(1)
            dealer.flush()
        peer, got = host.came()
        assert got == data
    slab = np.arange(10_000_000, dtype=np.uint8)
    host.call(lambda: host.router.send_bytes(peer, 0, 0, slab))
    got = b""
    while len(got) < len(slab):
        for expected in (True, False):
            while (begun := dealer.begin()) is None:
                assert dealer.wait(60)
            data = memoryview(bytearray(begun[0]))
            assert begun[1] == expected
            while dealer.left:
                if not dealer.read_into(data[len(data) - dealer.left :]):
                    assert dealer.wait(60)
        got += data
    assert got == slab.tobytes()
    dealer.close(1)
    assert host.ended.get(timeout=60) == peer


@pytest.mark.parametrize(
    "says",
    [
        zmtp.GREETING.replace(b"\x7f\3\1", b"\x7f\3\0") + zmtp.command(b"READY", b"\x0bSocket-Type\0\0\0\6DEALER"),
        zmtp.GREETING.replace(b"\x7f\3\1", b"\x7f\4\7") + READY,
        zmtp.GREETING + zmtp.command(b"READY", b"\x0bsocket-type\0\0\0\6DEALER\1X\0\0\1\x90" + bytes(400)),
    ],
    ids=["3.0", "a later one", "READY in a long frame"],
)
def test_peers_of_other_minor_versions_are_served(host: Host, says: bytes) -> None:
    with Raw(host, says).greeted() as raw:
        raw.say(frame(b"hello"))
        peer, data = host.came()
        assert data == b"hello"
        host.send(peer, m.Pong())
        assert raw.message() == m.Pong()


def test_bytes_that_come_one_by_one_are_the_same(host: Host) -> None:
    long_frame = b"\2" + (5).to_bytes(8, "big") + b"short"
    commands = zmtp.command(b"WHATEVER", bytes(600)) + zmtp.PING
    stream = zmtp.GREETING + READY + frame(b"a") + long_frame + commands + frame(b"x" * 300) + frame(b"")
    with Raw(host, b"") as raw:
        raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for i in range(len(stream)):
            raw.say(stream[i : i + 1])
        assert [host.came()[1] for _ in range(4)] == [b"a", b"short", b"x" * 300, b""]


def test_a_ping_is_answered_with_its_context_and_its_patience_is_taken_seriously(host: Host) -> None:
    with Raw(host).greeted() as raw:
        for context in (b"", b"sixteen bytes ok"):
            raw.say(zmtp.command(b"PING", b"\0\0" + context))
            assert raw.frame()[1] == b"\4PONG" + context
        raw.say(zmtp.command(b"PING", b"\0\1") + frame(b"hello"))
        peer, _ = host.came()
        assert raw.ended()
        assert host.ended.get(timeout=60) == peer


def test_the_heartbeats_of_libzmq_are_answered(host: Host) -> None:
    with libzmq(host, HEARTBEAT_IVL=50, HEARTBEAT_TIMEOUT=1500) as dealer:
        dealer.send(b"hello")
        peer, _ = host.came()
        with pytest.raises(queue.Empty):
            host.ended.get(timeout=2)
        assert host.send(peer, m.Pong())
        assert dealer.recv() == codec.encode(m.Pong())


def test_a_peer_that_answers_heartbeats_stays_and_a_silent_one_is_let_go(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_peer, "PING_EVERY", 1)
    monkeypatch.setattr(network_peer, "PATIENCE", 3)
    with libzmq(host) as dealer, Raw(host) as silent:
        dealer.send(b"hello")
        stays, _ = host.came()
        silent.say(frame(b"hello"))
        goes, _ = host.came()
        assert silent.ended()
        assert host.ended.get(timeout=60) == goes
        assert host.send(stays, m.Pong())
        assert dealer.recv() == codec.encode(m.Pong())


def test_heartbeats_are_sent_before_what_waits_but_not_into_a_message(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_peer, "PING_EVERY", 1)
    slab = np.zeros(1 << 20, np.uint8)
    with Raw(host, window=4096).greeted() as raw:
        raw.say(frame(b"hello"))
        peer, _ = host.came()
        host.call(lambda: [host.router.send_bytes(peer, i, 0, slab) for i in range(4)])
        time.sleep(2.5)
        kinds = []
        while len([kind for kind in kinds if kind != "ping"]) < 8:
            head, _ = raw.frame()
            kinds.append("ping" if head.command else "chunk" if head.more else "bytes")
        assert "ping" in kinds[:5]
        rest = [kind for kind in kinds if kind != "ping"]
        assert rest == ["chunk", "bytes"] * 4
        assert all(kinds[i + 1] == "bytes" for i, kind in enumerate(kinds) if kind == "chunk")


# --- who is who ---


def test_what_a_peer_announces_as_its_identity_counts_for_nothing(host: Host) -> None:
    with libzmq(host, ROUTING_ID=b"me") as one, libzmq(host, ROUTING_ID=b"me") as other:
        peers = set()
        for dealer in (one, other):
            dealer.send(b"hello")
            peers.add(host.came()[0])
        assert len(peers) == 2
        assert b"me" not in peers
        for peer in peers:
            assert host.send(peer, m.Pong())
        assert one.recv() == other.recv() == codec.encode(m.Pong())


def test_the_id_of_a_peer_that_is_gone_is_never_given_again(host: Host) -> None:
    peers = []
    for _ in range(20):
        with Raw(host, zmtp.GREETING + READY + frame(b"hello")):
            peers.append(host.came()[0])
        assert host.ended.get(timeout=60) == peers[-1]
        assert not host.send(peers[-1], m.Pong())
    assert len(set(peers)) == 20


def test_last_words_before_a_reset_are_heard(host: Host) -> None:
    host.answer = lambda peer, data: host.router.send_bytes(peer, 0, 0, np.zeros(1 << 20, np.uint8)) and None
    for _ in range(10):
        raw = Raw(host)
        raw.say(frame(b"hello"))
        peer, _ = host.came()
        raw.read(500_000)

        def leave(raw: Raw = raw) -> None:  # while the loop is blocked, and with bytes unread: a reset
            time.sleep(0.05)
            raw.say(frame(b"bye"))
            raw.socket.close()

        host.call(leave)
        assert host.came() == (peer, b"bye")
        assert host.ended.get(timeout=60) == peer


# --- peers that break the rules ---


@pytest.mark.parametrize(
    "says",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(64),
        zmtp.GREETING.replace(b"\x7f\3", b"\x7f\1"),
        zmtp.GREETING.replace(b"NULL\0", b"CURVE"),
        zmtp.GREETING + frame(b"hello"),
        zmtp.GREETING + zmtp.PING,
        zmtp.GREETING + zmtp.command(b"ERROR", b"\3no!"),
        zmtp.GREETING + zmtp.ready(b"REQ"),
        zmtp.GREETING + zmtp.command(b"READY", b"\x0bSocket-Type\0\0\1\6DEALER"),
        zmtp.GREETING + zmtp.command(b"READY", b"\x0b"),
        zmtp.GREETING + zmtp.command(b"READY", b"\0\0\0\0\0"),
        zmtp.GREETING + b"\4\0",
        zmtp.GREETING + b"\4\5\xffREAD",
        zmtp.GREETING + b"\6" + (zmtp.MAX_COMMAND + 1).to_bytes(8, "big"),
        zmtp.GREETING + READY + b"\5\1x",
        zmtp.GREETING + READY + b"\xff",
        zmtp.GREETING + READY + zmtp.command(b"PING", b"x"),
        zmtp.GREETING + READY + b"\2" + (codec.MAX_MESSAGE + 1).to_bytes(8, "big"),
        zmtp.GREETING + READY + b"\2" + b"\xff" * 8,
        zmtp.GREETING + READY + frame(b"x" * 100_000, True) + b"\2" + (100_000).to_bytes(8, "big"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_closed_at_once_and_others_are_not(host: Host, says: bytes) -> None:
    with libzmq(host) as dealer, Raw(host, says) as raw:
        assert raw.ended()
        dealer.send(b"hello")
        assert host.came()[1] == b"hello"


def test_frames_that_never_end_are_cut_at_the_bound(host: Host) -> None:
    with Raw(host) as raw:
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                raw.say(frame(b"x", True) * 1000)
                time.sleep(0.001)
    assert host.frames.empty()


def test_a_message_of_a_few_frames_is_passed_on_as_malformed(host: Host) -> None:
    with libzmq(host) as dealer:
        dealer.send_multipart([b"one", b"two"])
        dealer.send_multipart([b"", b"", b"", b""])
        dealer.send(b"one")
        assert [host.came()[1] for _ in range(3)] == [b"", b"", b"one"]


def test_who_does_not_come_to_the_end_of_the_handshake_is_closed_however_slowly_it_drips(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_peer, "HANDSHAKE", 1)
    with Raw(host, b"") as silent, Raw(host, b"") as dripping:
        with pytest.raises(ConnectionError):
            for byte in itertools.cycle(zmtp.GREETING[:1]):
                dripping.say(bytes((byte,)))
                time.sleep(0.2)
        assert silent.ended()
    assert host.ended.get(timeout=60)
    assert host.ended.get(timeout=60)


def test_who_does_not_read_its_answers_is_not_read_and_gets_them_all_when_it_reads(host: Host) -> None:
    status = m.Status("x" * 100_000)
    host.answer = lambda peer, data: host.router.send(peer, status) and None
    count = 600
    with Raw(host, window=4096).greeted() as raw:
        writer = threading.Thread(target=lambda: [raw.say(frame(b"status?")) for _ in range(count)])
        writer.start()
        time.sleep(1)
        assert host.frames.qsize() < 200  # the messages that the kernel's buffers took, and a few
        with libzmq(host) as other:
            other.send(b"hello")
            assert codec.from_server(other.recv()) == status
        for _ in range(count):
            assert raw.message() == status
        writer.join()
    assert host.frames.qsize() == count + 1


def test_pings_of_who_reads_no_answer_take_no_memory(host: Host) -> None:
    with Raw(host, window=4096) as raw:
        raw.socket.settimeout(1)
        with pytest.raises(TimeoutError):
            while True:
                raw.say(zmtp.command(b"PING", b"\0\0" + b"x" * 16) * 1000)
        (peer,) = host.router._peers.values()
        assert peer._outgoing.cost < 300_000


def test_a_peer_for_which_too_much_waits_is_closed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_peer, "QUEUED", 1 << 20)
    slab = m.Slab(0, 0, 0, 0, 1, 1, 1, record=b"x" * 30_000)
    with Raw(host, zmtp.GREETING + READY + frame(b"hello"), window=4096) as raw:
        peer, _ = host.came()
        sent = 0
        while host.send(peer, slab):
            sent += 1
        assert 30 < sent < 1000
        assert host.ended.get(timeout=60) == peer
        assert raw.ended()


def test_others_have_their_turn_beside_a_flood(host: Host) -> None:
    with Raw(host).greeted() as flood, Raw(host).greeted() as victim:

        def both() -> None:  # while the loop is blocked, so that everything is there when it goes on
            for _ in range(10):
                flood.say(frame(b"f") * 2000)
            victim.say(frame(b"v"))
            time.sleep(0.2)

        host.call(both)
        came = [host.came()[1] for _ in range(20_001)]
        assert came.count(b"f") == 20_000
        assert came.index(b"v") < 100


def test_what_is_sent_to_one_that_does_not_read_holds_up_nobody(host: Host) -> None:
    slab = np.zeros(64 << 20, np.uint8)
    with Raw(host, zmtp.GREETING + READY + frame(b"hello"), window=4096) as deaf, libzmq(host) as other:
        peer, _ = host.came()
        assert host.call(partial(host.router.send_bytes, peer, 0, 0, slab))
        for _ in range(100):
            other.send(b"hello")
            assert host.came()[1] == b"hello"
        freed = threading.Event()
        weakref.finalize(slab, freed.set)
        del slab
        assert not freed.wait(0.2)  # it may still be sent
        deaf.socket.close()
        assert host.ended.get(timeout=60) == peer
        assert freed.wait(60)


def test_a_peer_that_is_dropped_has_a_moment_to_read_what_waits_and_is_not_read(host: Host) -> None:
    slab = np.zeros(16 << 20, np.uint8)
    hello = zmtp.GREETING + READY + frame(b"hello")
    with Raw(host, hello, window=4096).greeted() as reads, Raw(host, hello, window=4096).greeted() as deaf:
        peers = [host.came()[0] for _ in range(2)]
        for peer in peers:
            host.call(partial(host.router.send_bytes, peer, 0, 0, slab))
            host.send(peer, m.Pong())
        reads.say(frame(b"unheard"))  # the router drops this peer before it reads this
        host.call(lambda: [host.router.drop(peer) for peer in peers])
        assert not host.send(peers[0], m.Pong())
        del slab
        with suppress(ConnectionError, EOFError):
            for _ in range(8):
                reads.frame()
            assert reads.message() == m.Pong()
            assert reads.ended()
        assert deaf.ended()
        assert {host.ended.get(timeout=60) for _ in range(2)} == set(peers)


def test_the_connection_of_a_dropped_peer_ends_without_a_reset(host: Host) -> None:
    with Raw(host, zmtp.GREETING + READY + frame(b"hello")).greeted() as raw:
        peer, _ = host.came()
        host.send(peer, m.Pong())

        def drop() -> None:
            raw.say(frame(b"unheard"))  # if the router closed the connection with this unread, it would be reset
            time.sleep(0.1)
            host.router.drop(peer)

        host.call(drop)
        raw.say(frame(b"unheard"))
        assert raw.message() == m.Pong()
        with pytest.raises(EOFError):
            while True:
                raw.frame()
        raw.say(frame(b"unheard"))
        raw.socket.close()
        assert host.ended.get(timeout=60) == peer
    assert host.frames.empty()


@pytest.mark.parametrize("keys", [False, True], ids=["plain", "keys"])
def test_a_dropped_client_that_reads_late_gets_all_that_was_sent(
    keys: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_peer, "LAST_WORDS", 60)
    options: dict[str, object] = {"RCVHWM": 1, "RECONNECT_IVL": -1}
    server = None
    if keys:
        keygen.generate(tmp_path / "keys", ["late"])
        server, own = server_keys(str(tmp_path / "keys")), client_keys(tmp_path / "keys/clients/late")
        assert own is not None
        options |= {"CURVE_SERVERKEY": own.server, "CURVE_PUBLICKEY": own.own[0], "CURVE_SECRETKEY": own.own[1]}
    with closing(Host(keys=server)) as host, libzmq(host, **options) as late:
        late.send(b"hello")
        peer, _ = host.came()

        def drop() -> None:
            for number in range(60):
                host.router.send_piece(peer, m.Chunk(number, 0), memoryview(bytes(100_000)))
            host.router.drop(peer)

        host.call(drop)
        for _ in range(30):
            late.send(b"unheard")
            time.sleep(0.01)
        assert [codec.from_server(late.recv_multipart()[0]) for _ in range(60)] == [m.Chunk(n, 0) for n in range(60)]


def test_the_bytes_of_a_slab_are_let_go_when_they_are_sent(host: Host) -> None:
    slab = np.zeros(8 << 20, np.uint8)
    freed = threading.Event()
    weakref.finalize(slab, freed.set)
    with libzmq(host) as dealer:
        dealer.send(b"hello")
        peer, _ = host.came()
        host.call(partial(host.router.send_bytes, peer, 0, 0, slab))
        del slab
        for _ in range(2):
            dealer.recv_multipart()
        assert freed.wait(60)


# --- how many ---


def test_at_the_limit_half_open_connections_go_first_then_those_that_said_nothing_then_newcomers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_MOST", 3)
    with Raw(host).greeted() as mute, Raw(host, zmtp.GREETING + READY + frame(b"hello")).greeted() as talker:
        peer, _ = host.came()
        with Raw(host, b"") as half_open:
            half_open.read(64)
            with Raw(host).greeted() as third:
                assert half_open.ended()
                third.say(frame(b"third"))
                assert host.came()[1] == b"third"
                with Raw(host).greeted() as fourth:
                    assert mute.ended()
                    fourth.say(frame(b"fourth"))
                    assert host.came()[1] == b"fourth"
                    with Raw(host, b"") as refused:
                        assert refused.ended()
        deadline = time.monotonic() + 60
        while True:  # there is room again
            with suppress(ConnectionError, EOFError), Raw(host) as fifth:
                fifth.greeted().say(frame(b"fifth"))
                assert host.came()[1] == b"fifth"
                break
            assert time.monotonic() < deadline
        assert host.send(peer, m.Pong())
        assert talker.message() == m.Pong()


@pytest.mark.parametrize("number", ["EMFILE", "ENFILE", "ENOMEM", "ENOBUFS"])
def test_a_listener_that_cannot_accept_looks_away_and_recovers(
    host: Host, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    import errno

    monkeypatch.setattr(accepting, "_EXHAUSTED", 0.3)
    real, asked = host.router._acceptor._socket, []

    class Failing:
        def accept(self) -> tuple[socket.socket, object]:
            asked.append(time.monotonic())
            if broken:
                raise OSError(getattr(errno, number), "no more")
            return real.accept()

        def fileno(self) -> int:
            return real.fileno()

        def close(self) -> None:
            real.close()

    broken = True
    host.call(lambda: setattr(host.router._acceptor, "_socket", Failing()))
    with Raw(host) as raw:
        time.sleep(0.7)
        assert 1 <= len(asked) < 20  # a listener that is woken again and again would be asked thousands of times
        broken = False
        raw.greeted().say(frame(b"hello"))
        assert host.came()[1] == b"hello"


def test_many_connections_that_come_and_go_leave_nothing(host: Host) -> None:
    for _ in range(5):
        raws = [Raw(host, says) for says in (b"", zmtp.GREETING, zmtp.GREETING + READY) for _ in range(30)]
        for raw in raws:
            raw.socket.close()
    for _ in range(450):
        host.ended.get(timeout=60)
    assert not host.router._peers
    assert not host.router._half_open
    assert not host.router._mute


# --- where it listens, and the end ---


@pytest.mark.parametrize(
    "bind",
    [
        "nonsense",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:65536",
        "tcp://256.0.0.1:5",
        "ipc://x:1",
    ],
)
def test_what_cannot_be_bound_is_refused_by_name(bind: str) -> None:
    with pytest.raises(StartError) as caught:
        Host(bind)
    assert f"cannot listen on {bind}: " in caught.value.message


def test_a_port_in_use_is_refused_and_one_that_was_just_closed_is_not(host: Host) -> None:
    with pytest.raises(StartError, match="the port is in use, perhaps by another daemon"):
        Host(host.endpoint)
    first = Host()
    with Raw(first).greeted():
        first.close()
        Host(first.endpoint).close()


@pytest.mark.parametrize("address", ["[::1]", "localhost", "*", "0.0.0.0", "[::]"])
def test_addresses_of_all_kinds_are_listened_on(address: str) -> None:
    host = Host(f"tcp://{address}:0")
    try:
        assert host.port > 0
        assert ("[" in host.endpoint) == (":" in address)
        to = "::1" if address == "[::1]" else "127.0.0.1"
        dealer = client.connected(to, host.port, 10, lambda: None)
        dealer.send(b"hello")
        assert host.came()[1] == b"hello"
        dealer.close(1)
    finally:
        host.close()


def test_what_was_said_last_still_gets_out_for_half_a_second_beside_one_that_reads_nothing() -> None:
    host = Host()
    with Raw(host, zmtp.GREETING + READY + frame(b"deaf"), window=4096), Raw(host, window=4096).greeted() as raw:
        deaf, _ = host.came()
        raw.say(frame(b"hello"))
        peer, _ = host.came()

        def last() -> None:
            host.router.send_bytes(deaf, 0, 0, np.zeros(32 << 20, np.uint8))
            host.router.send(peer, m.Status("x" * 1000_000))
            host.router.close()

        began = time.monotonic()
        closing = threading.Thread(target=lambda: host.call(last))
        closing.start()
        assert raw.message() == m.Status("x" * 1000_000)
        assert raw.ended()
        closing.join()
        assert time.monotonic() - began > 0.4  # the other one had its half second
    host.close()


def test_a_router_that_is_closed_still_knows_its_address() -> None:
    """A status whose figures have to be measured first is made after the daemon has stopped."""
    host = Host()
    host.close()
    assert host.router.endpoint == host.endpoint
