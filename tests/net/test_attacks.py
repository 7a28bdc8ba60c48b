"""No peer can stop, starve or end the daemon, and the daemon frees everything that a peer leaves behind.

These are the attacks of docs/security.md, each against a live daemon. Meanwhile a *victim*, another process, reads
epoch after epoch. It must read the same batches as in a quiet run, and never wait for long. Afterwards the daemon must
have the same memory, slots and descriptors as before.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

import penstock
from penstock._state.consumer_state import ConsumerState
from penstock_proto import messages as m
from penstock_proto.batches.position import EndedLane, Place, Position
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec, seqpacket
from penstock_server.logs import rate_limited_log
from penstock_server.logs.rate_limited_log import RateLimitedLog
from penstock_server.status.json_text import json_text
from penstock_server.to_daemon import control
from tests.conftest import Daemon, DaemonLauncher, Serve, wait_until
from tests.processes.free_ports import free_address
from tests.processes.open_files import OpenFiles

FEED = """
    import numpy as np
    from penstock_server import Feed

    def big(split):
        for i in range(20):
            yield np.full(1 << 20, i, "uint8")

    feed = Feed(big, splits=range(4), batch_size=1, turn=1)
"""

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def rows(split, rng):
        for i in range(100):
            yield rng.integers(0, 256, 1 << 14, "uint8"), np.int64(100 * split + i)

    victim = Feed(rows, splits=range(4), batch_size=4, shuffle=40, turn=2, seed=5)
    feed = Feed(rows, splits=range(8), batch_size=4, turn=2, seed=6)
    wide = Feed(rows, splits=range(256), batch_size=4, turn=2, lanes=256, seed=7)
"""

VICTIM = """
import hashlib, json, sys, threading, time
import penstock

over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
url, transport = sys.argv[1:]
digests, longest, last = [], 0.0, None
with penstock.connect(url, transport=transport, reconnect=0) as connection:
    while not over.is_set():
        digest = hashlib.sha256()
        for x, number in connection.batches():
            now = time.monotonic()
            longest, last = max(longest, now - (last or now)), now
            digest.update(x.tobytes() + number.tobytes())
            time.sleep(0.002)
        digests.append(digest.hexdigest())
        if len(digests) == 1:
            print("reading", flush=True)
            longest, last = 0.0, None
print(json.dumps([digests, longest]))
"""


class Victim:
    """A process that reads a feed until `check`."""

    def __init__(self, daemon: Daemon, transport: str, feed: str = "victim") -> None:
        self._url, self._transport = daemon.urls[feed], transport
        self._process = subprocess.Popen(
            [sys.executable, "-c", VICTIM, self._url, transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "reading\n"

    def check(self) -> None:
        """Check that it has read the same batches as in a quiet run, and never waited for long."""
        said, _ = self._process.communicate("", timeout=60)
        assert self._process.returncode == 0, "the victim failed"
        digests, longest = json.loads(said.splitlines()[-1])
        assert longest < 5  # seconds; without an attack it is a few hundredths
        assert digests == quiet(self._url, len(digests), self._transport)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def quiet(url: str, epochs: int, transport: str = "local") -> list[str]:
    """Return the SHA-256 of each of the first `epochs` epochs, read undisturbed."""
    digests = []
    with penstock.connect(url, transport=transport) as connection:
        for _ in range(epochs):
            digest = hashlib.sha256()
            for x, number in connection.batches():
                digest.update(x.tobytes() + number.tobytes())
            digests.append(digest.hexdigest())
    return digests


def state(daemon: Daemon) -> Status:
    return control.status(next(iter(daemon.urls.values())), 60)


def holds(daemon: Daemon) -> dict[str, int]:
    """Return how much the daemon has of each scarce resource. (The number of slots that a reader uses varies.)"""
    now, process = state(daemon), psutil.Process(daemon.process.pid)
    files = OpenFiles.of(daemon.process.pid)
    return {
        "streams": len(now.streams) + now.more_streams,
        "reserved": now.memory.reserved,
        "slots that nobody has reserved": max(0, now.memory.arena - now.memory.reserved),
        "positions": now.memory.positions,
        "greeted": now.greeted,
        "descriptors": files.others,
        "slots that the arena has lost": files.slot_bytes - now.memory.arena,
        "rss": process.memory_info().rss,
    }


MARGIN = {"rss": 48 << 20}
"""Memory that malloc may keep."""


@contextmanager
def watched(daemon: Daemon, transport: str = "tcp") -> Iterator[None]:
    """Have a victim read during the block. Check afterwards that the daemon has the same resources as before."""
    victim = Victim(daemon, transport)
    try:
        before = holds(daemon)
        yield
        deadline = time.monotonic() + 60
        while True:
            after = holds(daemon)
            more = {key: (was, after[key]) for key, was in before.items() if after[key] > was + MARGIN.get(key, 0)}
            if not more:
                break
            assert time.monotonic() < deadline, f"not freed (before, after): {more}"
            time.sleep(0.1)
        victim.check()
    finally:
        victim.kill()
    assert state(daemon).internal_errors == 0


@contextmanager
def dealer(daemon: Daemon) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.connect(next(iter(daemon.urls.values())).rpartition("/")[0])
    try:
        yield connection
    finally:
        connection.close(0)
        context.term()


@contextmanager
def beside(daemon: Daemon) -> Iterator[socket.socket]:
    """A connection of a consumer on this host that has been greeted."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect("\0" + state(daemon).unix)
        _, ledger = seqpacket.receive(connection)
        assert ledger is not None
        os.close(ledger)
        yield connection


def answer(connection: zmq.Socket[bytes]) -> m.ServerMessage:
    assert connection.poll(60_000)
    return codec.from_server(connection.recv())


def greeted(connection: zmq.Socket[bytes], feed: str = "feed") -> m.Welcome:
    connection.send(codec.encode(m.Hello(m.VERSION, feed)))
    welcome = answer(connection)
    assert isinstance(welcome, m.Welcome)
    return welcome


def opened(connection: zmq.Socket[bytes], feed: str = "feed", **asked: Any) -> m.Welcome:
    welcome = greeted(connection, feed)
    connection.send(msgspec.msgpack.encode(m.Open(welcome.session, b"", 1, 1 << 20, 0, **asked)))
    return welcome


def resume(connection: zmq.Socket[bytes], session: bytes, data: bytes) -> None:
    for start in range(0, len(data), 64 * 1024):
        connection.send(codec.encode(m.PositionPart(session, data[start : start + 64 * 1024])))


def refused(connection: zmq.Socket[bytes], words: str) -> None:
    """Check that the next message says why the session has failed."""
    failed = answer(connection)
    assert isinstance(failed, m.Failed), failed
    assert words in failed.error.message


def read(daemon: Daemon) -> int:
    with penstock.connect(daemon.url) as connection:
        return sum(1 for _ in connection.batches())


class TestWithAVictim:
    """Attacks while another process reads."""

    def test_more_ranks_than_a_message_can_name(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        with watched(daemon), dealer(daemon) as most, dealer(daemon) as more:
            opened(more, rank=0, world_size=45_000)
            refused(more, "world_size")
            opened(most, rank=0, world_size=m.MAX_WORLD, group="many")
            assert isinstance(answer(most), m.Opened)
            missing = answer(most)
            assert isinstance(missing, m.MissingRanks)
            assert len(missing.ranks) == m.MAX_WORLD  # also the one that has only connected
            most.send(codec.encode(m.Close()))

    @pytest.mark.parametrize("transport", ["tcp", "local"])
    def test_forged_positions(self, serve: Serve, transport: str) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        with watched(daemon, transport):
            for forge in (deep, wide, far, nonsense, damaged):
                with dealer(daemon) as connection:
                    welcome = greeted(connection)
                    resume(connection, welcome.session, forge(welcome.feed))
                    connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1 << 20, 0)))
                    refused(connection, "position")
                    connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1 << 20, 0)))
                    refused(connection, "no such session")  # and the position is not read again

    def test_positions_of_sessions_that_never_open(self, serve: Serve) -> None:
        patched = {"consumers.greeted.MOST_BYTES": 24 << 20, "consumers.greeted.SECONDS": 4.0}
        daemon = serve(FEEDS, "victim", "wide", patched=patched)
        with watched(daemon), ExitStack() as stack:
            for _ in range(12):
                connection = stack.enter_context(dealer(daemon))
                resume(connection, greeted(connection, "wide").session, bytes(7 << 20))
            assert state(daemon).memory.positions <= 24 << 20
            with penstock.connect(daemon.urls["wide"]) as honest:
                next(honest.batches())
                saved = honest.state_dict()
            with penstock.connect(daemon.urls["wide"]) as honest:
                honest.load_state_dict(saved)
                next(honest.batches())

    def test_a_position_larger_than_the_feed_can_have(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        with watched(daemon), dealer(daemon) as connection:
            resume(connection, greeted(connection).session, bytes(1 << 20))
            refused(connection, "which this feed cannot have")

    def test_a_flood_of_questions_for_the_status(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        with watched(daemon), flood(daemon, m.StatusRequest(m.VERSION)):
            time.sleep(1.5)

    def test_a_flood_on_this_host_whose_answers_nobody_reads(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        ping = codec.encode(m.Ping())
        with watched(daemon, "local"), beside(daemon) as connection:
            with pytest.raises(ConnectionError):  # the daemon closes it
                for _ in range(20_000_000):
                    connection.send(ping)

    def test_garbage_and_half_conversations_on_this_host(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed")
        with watched(daemon, "local"):
            for number in range(30):
                with beside(daemon) as connection, dealer(daemon) as friend:
                    welcome = greeted(friend)
                    for said in (b"\xc1" * 100, os.urandom(1000), codec.encode(m.Ack(5)), codec.encode(m.Begin(0))):
                        connection.send(said)
                    connection.send(codec.encode(m.PositionPart(welcome.session, b"half of a position")))
                    with Path(__file__).open() as ours:
                        socket.send_fds(connection, [codec.encode(m.Ping())], [ours.fileno()])
                        if number % 3 == 0:
                            socket.send_fds(connection, [codec.encode(m.Ping())], [ours.fileno()] * 100)
                    if number % 3 == 1:
                        connection.send(codec.encode(m.Open(welcome.session, bytes(16), 4, 1 << 20, 4)))
            assert state(daemon).malformed >= 30
            friends = [control.status(daemon.urls["feed"], 5)]
            assert friends

    def test_silent_connections_on_this_host(self, serve: Serve) -> None:
        daemon = serve(FEEDS, "victim", "feed", patched={"net.local.SECONDS": 3.0})
        name = "\0" + state(daemon).unix
        silent = []
        with watched(daemon, "local"):
            try:
                for _ in range(600):
                    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    silent.append(connection)
                    connection.connect(name)
                assert OpenFiles.of(daemon.process.pid).others < 400  # the daemon has closed the first ones
                assert len(quiet(daemon.urls["feed"], 1)) == 1
                deadline = time.monotonic() + 60
                while OpenFiles.of(daemon.process.pid).others > 60:  # the others end in time
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            finally:
                for connection in silent:
                    connection.close()

    def test_a_member_of_a_group_that_breaks_the_protocol_fails_alone(self, serve: Serve, tmp_path: Path) -> None:
        daemon = serve(FEEDS, "victim", "feed", state=tmp_path / "state")
        breaches = {
            "handed": m.Ack(1000),
            "released": m.Ack(0, (7,)),
            "ended": m.Ack(0, (), 9),
            "begun": m.Begin(0),
            "resume": m.PositionPart(bytes(16), b""),
            "garbage": None,
        }
        with watched(daemon):
            for group, breach in breaches.items():
                self._break_the_protocol(daemon, group, breach)

    def _break_the_protocol(self, daemon: Daemon, group: str, breach: m.ClientMessage | None) -> None:
        """Join a group, and break the protocol there. The other member must read all batches."""
        with penstock.connect(daemon.urls["feed"], group=group, reconnect=0) as member:
            batches = member.batches()
            seen = [next(batches)[1].tolist()]
            with dealer(daemon) as connection:
                opened(connection, group=group)
                assert isinstance(answer(connection), m.Opened), group
                connection.send(codec.encode(m.Begin(0)))
                assert isinstance(answer(connection), m.Begun), group
                connection.send(b"nonsense" if breach is None else codec.encode(breach))
                connection.send(codec.encode(m.Ack(1)))
                while not isinstance(said := codec.from_server(connection.recv_multipart()[0]), m.Failed):
                    assert isinstance(said, m.Slab | m.Chunk), group
                assert said.error.kind == "ProtocolError", group
                seen += [numbers.tolist() for _, numbers in batches]
            assert sorted(number for numbers in seen for number in numbers) == list(range(800)), group

    def test_consumers_of_a_state_file_that_claim_to_have_been_handed_very_much(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        grouped = "grouped = Feed(lambda split: iter(range(9999)), splits=[1], batch_size=1, turn=4096)\n"
        source = textwrap.dedent(FEEDS) + grouped
        options = {"state": tmp_path / "state", "patched": {"coordinator.admission.groups.PATIENCE": 5.0}}
        names = [bytes([number] * 16) for number in range(20)]
        daemon = serve(source, "victim", "grouped", **options)
        with ExitStack() as stack:
            for name in names:
                connection = stack.enter_context(dealer(daemon))
                opened(connection, "grouped", group="g", consumer=name)
                assert isinstance(answer(connection), m.Opened)
            daemon.stop(signal.SIGKILL)
        daemon = serve(source, "victim", "grouped", **options)
        with watched(daemon), ExitStack() as stack:
            for name in names[:-1]:  # the group waits for the last one
                had = tuple(m.Had(0, 0, 5000 * number, 4096) for number in range(4096))
                connection = stack.enter_context(dealer(daemon))
                opened(connection, "grouped", group="g", consumer=name, again=True, had=had)
                assert isinstance(answer(connection), m.Opened | m.Failed)
            with dealer(daemon) as connection:
                had = (m.Had(0, 0, 0, 4097),)
                opened(connection, "grouped", group="g", consumer=names[-1], again=True, had=had)
                refused(connection, "")

    @pytest.mark.parametrize(
        ("fault", "bugs"),
        [
            ("broken(Consumer, 'acknowledge')", 1),
            ("broken(Consumer, 'send')", 1),
            ("broken(Stream, 'begin')", 1),
            ("broken(Stream, 'start')", 1),
            ("broken(Production, 'on_made')", 1),
            ("broken(Production, 'on_slot_found')", 1),
            ("local.encode = too_large", 0),
        ],
        ids=lambda value: str(value).translate(str.maketrans("(,')", "    ")).replace(" ", ""),
    )
    def test_a_bug_fails_the_stream_that_it_is_of_and_is_not_hidden(
        self, faulty: Callable[[str], Daemon], fault: str, bugs: int
    ) -> None:
        daemon = faulty(fault)
        victim = Victim(daemon, "tcp")
        try:
            with pytest.raises(penstock.PenstockError, match=r"the daemon failed.*KeyError" if bugs else "too large"):
                quiet(daemon.urls["feed"], 1)
            victim.check()
        finally:
            victim.kill()
        deadline = time.monotonic() + 60
        while state(daemon).streams:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert min(state(daemon).internal_errors, 1) == bugs
        assert ("KeyError: 'a bug'" in daemon.stderr()) is bool(bugs)


def test_peers_cannot_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    spare = RateLimitedLog(logging.getLogger("penstock_server.test"))
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            spare.info("%s comes", number)
            spare.look_at_the_clock(100.0)
        spare.warning("another")
        assert len(caplog.messages) == rate_limited_log.MOST + 2
        spare.look_at_the_clock(100.0 + rate_limited_log.MINUTE)
        assert caplog.messages[-1] == f"left out {999 - rate_limited_log.MOST} more lines of this kind: %s comes"
        spare.info("%s comes", "again")
        assert caplog.messages[-1] == "again comes"


FAULTY = """
import sys
from penstock_proto import ProtocolError
from penstock_proto.transport import codec
from penstock_proto import messages as m
from penstock_server.cli import main as cli
from penstock_server.coordinator.production.production import Production
from penstock_server.coordinator.model.consumer import Consumer
from penstock_server.coordinator.stream.stream import Stream
from penstock_server.net import local

def broken(kind, name):
    right = getattr(kind, name)
    def wrong(self, *values, **others):
        found = right(self, *values, **others)
        if (self._feed if kind is Consumer else self.feed.name) == "feed":
            raise KeyError("a bug")
        return found
    setattr(kind, name, wrong)

def too_large(message):
    if isinstance(message, m.Slab):
        raise ProtocolError("a message that is too large")
    return codec.encode(message)

exec(sys.argv.pop(1))
cli.main(prog_name="penstock")
"""
"""A daemon with a bug that concerns the feed "feed"."""


@pytest.fixture
def faulty(tmp_path: Path, daemon_launchers: list[DaemonLauncher]) -> Iterator[Callable[[str], Daemon]]:
    daemons: list[Daemon] = []

    def start(fault: str) -> Daemon:
        (tmp_path / "feeds.py").write_text(textwrap.dedent(FEEDS))
        command = [FAULTY, fault, "serve", "feeds.py:victim", "feeds.py:feed", "--workers", "2"]
        command += ["--bind", "tcp://127.0.0.1:0"]
        daemon = Daemon(command, tmp_path, tmp_path / "log", {**os.environ}, launcher=daemon_launchers[0])
        daemons.append(daemon)
        daemon.wait_ready(2)
        return daemon

    yield start
    for daemon in daemons:
        assert daemon.stop() == 0, daemon.stderr()


def deep(feed: m.FeedInfo) -> bytes:
    """Return a position whose spec is nested so deeply that recursion cannot make its text."""
    spec: dict[str, object] = {"type": "leaf", "dtype": "int8", "shape": []}
    for _ in range(246):
        spec = {"type": "tuple", "items": [spec]}
    return msgspec.msgpack.encode({"feed": {**msgspec.to_builtins(feed), "spec": spec}, "epoch": 0})


def wide(feed: m.FeedInfo) -> bytes:
    few = {"type": "tuple", "items": [{"type": "tuple", "items": []}] * 64}
    spec = {"type": "tuple", "items": [few] * 64}
    return msgspec.msgpack.encode({"feed": {**msgspec.to_builtins(feed), "spec": spec}, "epoch": 0})


def far(feed: m.FeedInfo) -> bytes:
    """Return a position with numbers so large that no worker can count on from them."""
    return msgspec.msgpack.encode(Position(feed, 0, 1, 4, bytes(32), (Place(0, 2**62, b"record"),)))


def nonsense(feed: m.FeedInfo) -> bytes:
    return os.urandom(1000)


def damaged(feed: m.FeedInfo) -> bytes:
    return msgspec.msgpack.encode(Position(feed, 0, ended=(EndedLane(0, 0, 2**40),)))


@contextmanager
def flood(daemon: Daemon, message: m.ClientMessage) -> Iterator[None]:
    """Run a process that sends `message` as fast as it can, and reads nothing."""
    source = """
import sys, zmq
connection = zmq.Context().socket(zmq.DEALER)
connection.connect(sys.argv[1])
data = bytes.fromhex(sys.argv[2])
while True:
    connection.send(data)
"""
    endpoint = next(iter(daemon.urls.values())).rpartition("/")[0]
    process = subprocess.Popen([sys.executable, "-c", source, endpoint, codec.encode(message).hex()])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def test_a_flood_of_messages_keeps_nobody_from_reading_nor_the_daemon_from_stopping(serve: Serve) -> None:
    daemon = serve(FEED)
    over = threading.Event()

    def flood() -> None:
        with dealer(daemon) as connection:
            connection.setsockopt(zmq.SNDTIMEO, 100)
            for _ in range(2_000_000):
                if over.is_set():
                    return
                try:
                    connection.send(codec.encode(m.StatusRequest(m.VERSION)))
                except zmq.Again:
                    continue

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert read(daemon) == 80
        assert daemon.stop() == 0
    finally:
        over.set()
        thread.join()


def test_an_epoch_that_no_worker_could_count_on_from_is_not_begun(serve: Serve) -> None:
    daemon = serve(FEED)
    with dealer(daemon) as connection:
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        welcome = codec.from_server(connection.recv())
        assert isinstance(welcome, m.Welcome)
        connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1, 0)))
        assert isinstance(codec.from_server(connection.recv()), m.Opened)
        connection.send(codec.encode(m.Begin(2**53)))
        assert isinstance(codec.from_server(connection.recv()), m.Begun)
        assert isinstance(codec.from_server(connection.recv()), m.Slab)
        assert read(daemon) == 80
    assert len(daemon.workers()) == 2
    assert "it is started again" not in daemon.stderr()


@pytest.mark.parametrize(
    "message",
    [
        m.Begin(0),
        m.Ack(5),
        m.Leave(3),
        m.Open(b"x" * 16, b"", 1, 1, 1),
        m.Ping(),
        m.StopRequest(),
        m.StacksRequest(),
        m.ProfileHosts(1, 100),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_without_a_session_is_answered_with_an_error(serve: Serve, message: m.ClientMessage) -> None:
    daemon = serve(FEED)
    with dealer(daemon) as connection:
        connection.send(codec.encode(message))
        assert connection.poll(5000)
        assert isinstance(codec.from_server(connection.recv()), m.Failed)
    assert read(daemon) == 80


@pytest.mark.parametrize(
    ("opened", "message", "fails"),
    [
        (False, m.Begin(0), True),
        (False, m.Ack(0), True),
        (False, m.Leave(0), True),
        (False, m.Reaches(1, True), True),
        (True, m.Reaches(1, True), True),
        (True, m.Resend(0), True),
        (True, m.Leave(0), False),  # it may have crossed the End on the way
        (True, m.Leave(7), False),
        (True, m.Leave(0, 1), True),
    ],
    ids=str,
)
def test_a_message_that_its_session_does_not_allow_fails_the_session(
    serve: Serve, opened: bool, message: m.ClientMessage, fails: bool
) -> None:
    with dealer(serve(FEED)) as connection:
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        welcome = codec.from_server(connection.recv())
        assert isinstance(welcome, m.Welcome)
        if opened:
            connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1, 0)))
            assert isinstance(codec.from_server(connection.recv()), m.Opened)
        connection.send(codec.encode(message))
        connection.send(codec.encode(m.Ping()))
        answer = codec.from_server(connection.recv())
        assert isinstance(answer, m.Failed if fails else m.Pong)
        assert not isinstance(answer, m.Failed) or answer.error.kind == "ProtocolError"


def test_a_ping_is_answered_while_hello_waits_for_the_feeds(serve: Serve, tmp_path: Path) -> None:
    waits = f"import time, os\nwhile not os.path.exists({str(tmp_path / 'go')!r}):\n    time.sleep(0.01)\n"
    bind = free_address()
    serve(waits + textwrap.dedent(FEED), ready=False, bind=bind)
    with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
        connection.linger = 0
        connection.connect(bind)
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        connection.send(codec.encode(m.Ping()))
        assert isinstance(codec.from_server(connection.recv()), m.Pong)
        (tmp_path / "go").touch()
        assert isinstance(codec.from_server(connection.recv()), m.Welcome)


def test_a_status_fits_whatever_clients_call_themselves(serve: Serve) -> None:
    daemon = serve(FEED, memory="2G")
    context = zmq.Context()
    connections = []
    try:
        for _ in range(60):
            connection = context.socket(zmq.DEALER)
            connections.append(connection)
            connection.connect(daemon.url.rpartition("/")[0])
            connection.send(codec.encode(m.Hello(m.VERSION, "feed", "\n\U0001f600" * 512)))
            welcome = codec.from_server(connection.recv())
            assert isinstance(welcome, m.Welcome)
            connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1, 0)))
            connection.recv()
        status = json_text(control.status(daemon.url, 5))
        assert len(status.encode()) < 1000 * 1024
        assert "\\n" not in status
    finally:
        for connection in connections:
            connection.close(0)
        context.term()
    assert read(daemon) == 80


def test_connections_that_are_closed_give_their_share_back_though_an_array_lives_on(serve: Serve) -> None:
    daemon = serve(FEED, memory=str(30 << 20))
    kept = []
    for _ in range(8):
        connection = penstock.connect(daemon.url)
        kept.append(next(connection.batches()))
        connection.close()
        del connection
    assert read(daemon) == 80
    assert all((array == 0).all() for array in kept)
    del kept


def test_a_daemon_without_file_descriptors_goes_on(serve: Serve) -> None:
    daemon = serve(FEED)
    process = psutil.Process(daemon.process.pid)

    def refused() -> bool:
        """Leave one descriptor, for the connection over TCP. (The daemon may hold another one for a moment.)"""
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 1, 4096))
        try:
            penstock.connect(daemon.url, transport="local", timeout=1).close()
        except penstock.PenstockError:
            return "cannot take a connection on this host" in daemon.stderr()
        return False

    wait_until(refused, 60, daemon.stderr)
    process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
    assert read(daemon) == 80


FORGED = {
    "a place at 2^62": {"places": ((0, 2**62, b""),)},
    "a place that no record stands at": {"places": ((0, 2**40, b""),)},
    "a record of another kind": {"places": ((0, 1, b"\x81\xa1x\x01"),)},
    "rows left over": {"ended": ((0, 2**62, 2**62, b"x"),)},
    "batches": {"batches": 2**62, "rows": 2**62},
    "merged": {"merged": 2**62},
    "skip": {"skip": 10**12},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_a_forged_position_fails_its_own_session_and_costs_no_worker(serve: Serve, forged: dict[str, Any]) -> None:
    daemon = serve(FEED, workers=2)
    with penstock.connect(daemon.url) as victim, dealer(daemon) as connection:
        batches = victim.batches()
        next(batches)
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        welcome = codec.from_server(connection.recv())
        assert isinstance(welcome, m.Welcome)
        position = msgspec.msgpack.encode({"feed": welcome.feed, "epoch": 0, **forged})
        connection.send(codec.encode(m.PositionPart(welcome.session, position)))
        connection.send(codec.encode(m.Open(welcome.session, b"", 1, 1 << 20, 0)))
        answer = codec.from_server(connection.recv())
        if isinstance(answer, m.Opened):
            connection.send(codec.encode(m.Begin(0)))
            while not isinstance(answer := codec.from_server(connection.recv_multipart()[0]), m.Failed):
                assert not isinstance(answer, m.End)
                if isinstance(answer, m.Slab):  # of another lane
                    connection.send(codec.encode(m.Ack(answer.seq + 1)))
        assert answer.error.kind in ("StateMismatch", "ProtocolError", "SpecError", "FeedError")
        assert 1 + sum(1 for _ in batches) == 80
    assert "other workers take over its work" not in daemon.stderr()


@pytest.mark.parametrize("transport", ["tcp", "local"])
def test_what_cannot_be_acknowledged_pins_no_slot(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, memory=str(24 << 20))
    sent: list[m.Ack] = []
    honest = ConsumerState.ack

    def forged(self: ConsumerState) -> m.Ack | None:
        ack = honest(self)
        if ack is None or sent or not ack.handed:
            return ack
        sent.append(m.Ack(ack.handed, (0, 0) if transport == "local" else (0,)))
        return sent[0]

    with pytest.MonkeyPatch.context() as patch, penstock.connect(daemon.url, transport=transport) as connection:
        patch.setattr(ConsumerState, "ack", forged)
        with pytest.raises(penstock.ProtocolError, match=r"slab 0 is released (before|twice)"):
            list(connection.batches())
    deadline = time.monotonic() + 60
    while control.status(daemon.url, 5).memory.reserved:
        assert time.monotonic() < deadline, "slots are pinned"
        time.sleep(0.05)


def test_a_member_of_a_group_that_breaks_the_protocol_goes_alone(serve: Serve, tmp_path: Path) -> None:
    daemon = serve(FEED, memory="1G", state=tmp_path / "state")
    with penstock.connect(daemon.url, group="g") as victim, dealer(daemon) as connection:
        batches = victim.batches()
        next(batches)
        connection.send(codec.encode(m.Hello(m.VERSION, "feed")))
        welcome = codec.from_server(connection.recv())
        assert isinstance(welcome, m.Welcome)
        connection.send(codec.encode(m.Open(welcome.session, b"", 4, 1 << 30, 0, group="g")))
        connection.send(codec.encode(m.Begin(0)))
        count = 0
        while count < 2:  # before the victim reads on
            count += isinstance(codec.from_server(connection.recv_multipart()[0]), m.Slab)
        for handed in (2**62, 2, 1):
            connection.send(codec.encode(m.Ack(handed, (0,))))
            connection.send(codec.encode(m.Leave(0, handed)))
        while not isinstance(answer := codec.from_server(connection.recv_multipart()[0]), m.Failed):
            pass
        assert answer.error.kind == "ProtocolError"
        assert 1 + sum(1 for _ in batches) == 80
