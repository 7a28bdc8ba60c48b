"""Attacks over TCP on a daemon with keys, by strangers and by a client that it admits, while a victim reads."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import zmq

import penstock
from penstock_proto import messages as m
from penstock_proto.security.keys import ClientKeys, client_keys
from penstock_proto.status.status_shape import Status
from penstock_proto.transport import codec, zmtp
from penstock_server.cli import keygen
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve
from tests.net.test_attacks_tcp import FEED, MIB, memory, place, victim

CURVE_GREETING = zmtp.GREETING.replace(b"NULL\0", b"CURVE")
HELLO_OF_NOBODY = zmtp.command(b"HELLO", b"\1\0" + bytes(72) + bytes(32) + bytes(8) + bytes(80))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    keygen.generate(tmp_path / "keys", ["victim", "eve"])
    return tmp_path / "keys"


def state(daemon: Daemon, folder: Path) -> Status:
    return control.status(daemon.url, 60, client_keys(folder / "clients/victim"))


def eve_of(folder: Path) -> ClientKeys:
    eve = client_keys(folder / "clients/eve")
    assert eve is not None
    return eve


def connections(process: psutil.Process) -> int:
    """Return how many sockets and eventfds a process has."""
    found = 0
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(path).startswith(("socket:", "anon_inode:[eventfd"))
    return found


@contextmanager
def admitted(daemon: Daemon, eve: ClientKeys, **options: object) -> Iterator[zmq.Socket[bytes]]:
    """Yield a libzmq socket with eve's keys, which does not reconnect."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        dealer.setsockopt(zmq.SNDTIMEO, 1000)
        dealer.curve_serverkey = eve.server
        dealer.curve_publickey, dealer.curve_secretkey = eve.own
        for name, value in options.items():
            dealer.setsockopt(getattr(zmq, name), value)  # type: ignore[arg-type]
        dealer.connect(daemon.url.rpartition("/")[0])
        yield dealer


def ask(dealer: zmq.Socket[bytes], message: m.Message) -> m.ServerMessage:
    dealer.send(codec.encode(message))
    return codec.from_server(dealer.recv())


def closed(connection: socket.socket) -> bool:
    """Return whether the daemon closes the connection within 30 s."""
    connection.settimeout(30)
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def test_strangers_are_cut_off_and_leave_nothing_behind(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED, keys=folder, patched={"net.network_peer.HANDSHAKE": 3})
    process = psutil.Process(daemon.process.pid)
    with victim(daemon, folder / "clients/victim"), ExitStack() as stack:
        before = connections(process), memory(daemon)

        def stranger(says: bytes) -> socket.socket:
            made = stack.enter_context(socket.create_connection(place(daemon)))
            with suppress(ConnectionError):
                made.sendall(says)
            return made

        rude = [
            stranger(says)
            for says in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n".ljust(100),
                zmtp.GREETING[:11],
                zmtp.GREETING + zmtp.ready(b"DEALER") + zmtp.head_of(1 << 40),
                CURVE_GREETING,
                CURVE_GREETING + zmtp.ready(b"DEALER"),
                CURVE_GREETING + HELLO_OF_NOBODY,
                CURVE_GREETING + b"\6" + (1 << 40).to_bytes(8, "big") + b"x" * 1000,
                CURVE_GREETING + zmtp.head_of(100_000) + b"x" * 100_000,
                CURVE_GREETING + b"\4\5\4PING" * 100_000,
            )
            for _ in range(3)
        ]
        assert all(closed(connection) for connection in rude)
        assert memory(daemon) < before[1] + 20 * MIB
        stack.close()
        deadline = time.monotonic() + 30
        while connections(process) > before[0] and time.monotonic() < deadline:
            time.sleep(0.1)
        assert connections(process) <= before[0]


def test_a_client_that_goes_before_it_is_answered_is_forgotten_at_once(serve: Serve, folder: Path) -> None:
    """A closed connection always looks writable, and takes nothing. So no answer may wait for it."""
    bounds = {f"net.network_peer.{name}": 1_000_000 for name in ("HANDSHAKE", "PATIENCE")}
    daemon, eve = serve(FEED, keys=folder, patched=bounds), eve_of(folder)
    process = psutil.Process(daemon.process.pid)
    with victim(daemon, folder / "clients/victim"):
        before = connections(process)
        for _ in range(20):
            with admitted(daemon, eve, LINGER=10_000) as dealer:
                for _ in range(20):
                    dealer.send(codec.encode(m.StatusRequest(m.VERSION)))
        deadline = time.monotonic() + 60
        while connections(process) > before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert connections(process) <= before


def test_idle_connections_take_no_more_than_half_of_the_descriptors(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED, keys=folder)
    process = psutil.Process(daemon.process.pid)
    limit = 4 * process.num_fds() + 300
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, 4096))
    with victim(daemon, folder / "clients/victim"), ExitStack() as stack:
        for _ in range(limit // 5):
            stack.enter_context(socket.create_connection(place(daemon))).sendall(CURVE_GREETING[:12])
        time.sleep(0.5)
        assert process.num_fds() < limit - 30
        assert state(daemon, folder).ready  # silent ones make room
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 2, 4096))
    with ExitStack() as stack:  # no descriptors are left: the daemon waits, and does not spin
        for _ in range(20):
            stack.enter_context(socket.create_connection(place(daemon)))
        time.sleep(0.5)
        began = sum(process.cpu_times()[:2])
        time.sleep(1)
        assert sum(process.cpu_times()[:2]) - began < 0.5
        process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
    with penstock.connect(daemon.url, transport="tcp", timeout=60, keys=folder / "clients/victim") as connection:
        assert sum(1 for _ in connection.batches()) == 80


def test_an_admitted_client_gets_no_further_than_one_without_encryption(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED, keys=folder, patched={"consumers.sessions.SILENT": 1.0, "consumers.sessions.PATIENCE": 4.0})
    eve = eve_of(folder)
    with victim(daemon, folder / "clients/victim"):
        before = memory(daemon)
        (victims,) = state(daemon, folder).streams
        assert victims.key == "victim"

        # ids that libzmq would give next, and one in use: the daemon ignores them
        with ExitStack() as stack:
            for identity in (*(b"\0" + (0x6B8B4567 + i).to_bytes(4, "big") for i in range(8)), b"same", b"same"):
                dealer = stack.enter_context(admitted(daemon, eve, ROUTING_ID=identity))
                assert isinstance(ask(dealer, m.StatusRequest(m.VERSION)), m.Status)

        # a session belongs to the connection on which it was greeted
        with admitted(daemon, eve) as one, admitted(daemon, eve) as other:
            welcome = ask(one, m.Hello(m.VERSION, "feed"))
            assert isinstance(welcome, m.Welcome)
            assert isinstance(ask(other, m.Open(welcome.session, b"", 4, 4 * MIB, 0)), m.Failed)
            assert isinstance(ask(one, m.StopRequest(True)), m.Failed)

        # a message of endless frames, and one that is too large
        for frames in ([b"x"] * 400_000, [bytes(codec.MAX_MESSAGE + 1000)]):
            with admitted(daemon, eve) as dealer:
                assert isinstance(ask(dealer, m.StatusRequest(m.VERSION)), m.Status)
                with dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                    dealer.send_multipart(frames)
                    cut_off = monitor.poll(30_000)
                    dealer.disable_monitor()
                assert cut_off, (len(frames), daemon.stderr())
        assert memory(daemon) < before + 30 * MIB

        # several frames within the bounds, and an empty message: malformed, and the connection stays usable
        with admitted(daemon, eve) as dealer:
            dealer.send_multipart([b"a", b"b"])
            failed = codec.from_server(dealer.recv())
            assert isinstance(failed, m.Failed)
            assert "several frames" in failed.error.message
            assert isinstance(ask(dealer, m.StatusRequest(m.VERSION)), m.Status)

        # requests whose answers nobody reads: in the end the daemon stops reading them
        with admitted(daemon, eve, RCVHWM=1, RCVBUF=4096, SNDHWM=10, SNDTIMEO=3000) as dealer:
            assert isinstance(ask(dealer, m.Hello(m.VERSION, "feed")), m.Welcome)
            asked, most = codec.encode(m.Ping()), 0
            with pytest.raises(zmq.Again):
                for number in range(400_000):
                    dealer.send(asked)
                    if number % 10_000 == 0:
                        most = max(most, memory(daemon))
            assert most < before + 30 * MIB

        # slabs that nobody reads
        with admitted(daemon, eve, RCVHWM=1, RCVBUF=4096) as dealer:
            welcome = ask(dealer, m.Hello(m.VERSION, "feed"))
            assert isinstance(welcome, m.Welcome)
            assert isinstance(ask(dealer, m.Open(welcome.session, b"", 16, 64 * MIB, 0)), m.Opened)
            dealer.send(codec.encode(m.Begin(0)))
            deadline = time.monotonic() + 30
            while "nothing heard of" not in daemon.stderr() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert len(state(daemon, folder).streams) == 1
    assert "nothing heard of" in daemon.stderr()
    assert "internal" not in daemon.stderr()
    with admitted(daemon, eve, RCVHWM=1, RCVBUF=4096) as dealer:  # the daemon ends, although the client does not read
        ask(dealer, m.Hello(m.VERSION, "feed"))
        stopping = threading.Thread(target=daemon.stop)
        began = time.monotonic()
        stopping.start()
        stopping.join()
        assert time.monotonic() - began < 20
