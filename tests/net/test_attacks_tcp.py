"""Attacks over TCP by peers without credentials, against a live daemon, while a victim reads."""

from __future__ import annotations

import itertools
import socket
import struct
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
from penstock_proto.transport import codec, zmtp
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve
from tests.processes.open_files import OpenFiles

FEED = """
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        for i in range(20):
            yield np.full(1 << 18, 20 * split + i, "int32")

    feed = Feed(numbers, splits=range(4), batch_size=1, lanes=1, turn=1)
"""
MIB = 1 << 20


@contextmanager
def victim(daemon: Daemon, keys: Path | None = None) -> Iterator[None]:
    """Run a client that reads epochs over TCP and checks each batch. It must still be reading at the end."""
    over, failed = threading.Event(), []
    read = itertools.count()
    with penstock.connect(daemon.url, transport="tcp", keys=keys) as connection:

        def reading() -> None:
            try:
                while not over.is_set():
                    for expected, batch in enumerate(connection.batches()):
                        assert (batch == expected).all()
                        next(read)
                        if over.is_set():
                            break
                assert connection.stats()["reconnects"] == 0
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=reading)
        thread.start()
        try:
            yield
            before, deadline = next(read), time.monotonic() + 60
            while next(read) < before + 100 and not failed and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            over.set()
            thread.join()
    assert not failed, failed
    assert next(read) >= before + 100


def place(daemon: Daemon) -> tuple[str, int]:
    return "127.0.0.1", int(daemon.url.rpartition("/")[0].rpartition(":")[2])


def raw(daemon: Daemon, says: bytes = b"", identity: bytes = b"", window: int = 0) -> socket.socket:
    """Return a connection that has shaken hands."""
    connection = socket.socket()
    if window:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    connection.settimeout(10)
    connection.connect(place(daemon))
    announced = b"\x08Identity" + struct.pack(">I", len(identity)) + identity
    ready = zmtp.command(b"READY", b"\x0bSocket-Type\0\0\0\6DEALER" + announced)
    with suppress(ConnectionError):  # it may be refused
        connection.sendall(zmtp.GREETING + ready)
        data = b""
        while b"READY" not in data:
            data += connection.recv(4096) or b"READY"
        connection.sendall(says)
    return connection


def talker(daemon: Daemon) -> socket.socket:
    """Yield a connection whose request for the status was answered or refused."""
    connection = raw(daemon)
    with suppress(ConnectionError):
        connection.sendall(frame(m.StatusRequest(m.VERSION)))
        data = b" "
        while data and b"\xa6status" not in data:
            data = connection.recv(MIB)
    return connection


def frame(message: m.Message) -> bytes:
    data = codec.encode(message)
    return zmtp.head_of(len(data)) + data


def memory(daemon: Daemon) -> int:
    return int(psutil.Process(daemon.process.pid).memory_full_info().uss)


def test_peers_that_announce_the_ids_that_libzmq_would_give_next_leave_the_daemon_alive(serve: Serve) -> None:
    daemon = serve(FEED)
    with ExitStack() as stack:
        for number in range(16):
            identity = b"\0" + (0x6B8B4567 + number).to_bytes(4, "big")
            stack.callback(raw(daemon, frame(m.StatusRequest(m.VERSION)), identity).close)
        with victim(daemon):
            for _ in range(8):
                control.status(daemon.url, 5)
    assert daemon.process.poll() is None


def test_a_message_whose_frames_never_end_is_cut_off(serve: Serve) -> None:
    daemon = serve(FEED)
    with victim(daemon):
        before = memory(daemon)
        connection = raw(daemon)
        sent = 0
        with connection, suppress(ConnectionError):
            while sent < 20 * MIB:
                connection.sendall(b"\1\1x" * 10_000)
                sent += 30_000
        assert sent < 20 * MIB  # the kernel has taken all that was sent
        assert memory(daemon) < before + 20 * MIB


def test_who_asks_and_reads_no_answer_is_not_heard_any_longer(serve: Serve) -> None:
    daemon = serve(FEED)
    with victim(daemon):
        before = memory(daemon)
        asked = frame(m.StatusRequest(m.VERSION)) * 100
        with raw(daemon, window=4096) as connection:
            connection.settimeout(1)
            with suppress(TimeoutError):
                for _ in range(1000):
                    connection.sendall(asked)
            assert memory(daemon) < before + 20 * MIB


def test_no_peer_speaks_for_the_session_of_one_that_was_cut(serve: Serve) -> None:
    daemon = serve(FEED)
    with zmq.Context() as context:

        def dealer() -> zmq.Socket[bytes]:
            made = context.socket(zmq.DEALER)
            made.setsockopt(zmq.ROUTING_ID, b"trainer")
            made.setsockopt(zmq.RCVTIMEO, 60_000)
            made.connect(daemon.url.rpartition("/")[0])
            return made

        with dealer() as first:
            first.send(codec.encode(m.Hello(m.VERSION, "feed")))
            welcome = codec.from_server(first.recv())
            assert isinstance(welcome, m.Welcome)
            first.send(codec.encode(m.Open(welcome.session, b"", 4, 4 * MIB, 0)))
            assert isinstance(codec.from_server(first.recv()), m.Opened)
            first.close(0)
        with dealer() as second:
            second.send(codec.encode(m.Begin(0)))
            assert isinstance(codec.from_server(second.recv()), m.Failed)
            second.close(0)


def test_idle_connections_take_no_more_than_half_of_the_descriptors(serve: Serve) -> None:
    daemon = serve(FEED)
    process = psutil.Process(daemon.process.pid)
    limit = 4 * process.num_fds() + 200
    before = OpenFiles.of(process.pid).others
    process.rlimit(psutil.RLIMIT_NOFILE, (limit, 4096))
    with victim(daemon):
        with ExitStack() as stack:
            for _ in range(limit // 2 + 20):
                stack.callback(talker(daemon).close)
            time.sleep(0.5)
            assert process.num_fds() < limit - 30
        deadline = time.monotonic() + 60
        while (after := OpenFiles.of(process.pid).others) > before + 10 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert after <= before + 10  # that of the victim
        with penstock.connect(daemon.url, transport="tcp", timeout=60) as connection:
            assert sum(1 for _ in connection.batches()) == 80
    assert "cannot take a connection over TCP" in daemon.stderr()


def test_a_daemon_without_descriptors_idles_and_takes_connections_again_when_there_are_some(serve: Serve) -> None:
    daemon = serve(FEED)
    process = psutil.Process(daemon.process.pid)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 4, 4096))
    with ExitStack() as stack:
        for _ in range(20):
            stack.callback(talker(daemon).close)
        time.sleep(0.5)
        began = sum(process.cpu_times()[:2])
        time.sleep(1)
        assert sum(process.cpu_times()[:2]) - began < 0.5
        process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
    with penstock.connect(daemon.url, transport="tcp", timeout=60) as connection:
        assert sum(1 for _ in connection.batches()) == 80
    assert "cannot take a connection over TCP" in daemon.stderr()


def opened(daemon: Daemon, group: str = "", window: int = 0) -> socket.socket:
    """A connection with an open session."""
    connection = raw(daemon, frame(m.Hello(m.VERSION, "feed")), window=window)
    data = b""
    while (at := data.find(b"\xa7session\xc4\x10")) < 0 or len(data) < at + 26:
        data += connection.recv(MIB)
    session = data[at + 10 : at + 26]
    connection.sendall(frame(m.Open(session, b"", 4, 64 * MIB, 0, group=group)))
    while b"opened" not in connection.recv(MIB):
        pass
    return connection


def test_slabs_that_nobody_reads_do_not_outlive_their_session_for_long(serve: Serve) -> None:
    daemon = serve(FEED, patched={"consumers.sessions.SILENT": 1000.0, "consumers.sessions.PATIENCE": 2.0})
    with opened(daemon, window=4096) as connection:
        connection.sendall(frame(m.Begin(0)))
        with pytest.raises(ConnectionError):
            for _ in range(100):  # it sends meaningless frames, so it is not silent
                connection.sendall(zmtp.command(b"PONG"))
                time.sleep(0.2)
    assert "nothing heard of" in daemon.stderr()


def test_who_finds_no_room_at_the_daemon_is_told_so(serve: Serve) -> None:
    daemon = serve(FEED, patched={"net.network._MOST": 0})
    with pytest.raises(penstock.Unreachable, match="connections are closed at once: the daemon may have too many"):
        penstock.connect(daemon.url, timeout=5)


@pytest.mark.parametrize(("group", "stays"), [("", False), ("team", True)])
def test_a_session_ends_with_its_connection_but_a_member_of_a_group_may_come_back(
    serve: Serve, group: str, stays: bool
) -> None:
    daemon = serve(FEED, patched={"consumers.sessions.SILENT": 5.0, "consumers.sessions.PATIENCE": 1000.0})
    with penstock.connect(daemon.url, transport="tcp") as other:
        batches = other.batches()
        next(batches)
        opened(daemon, group).close()
        log_deadline = time.monotonic() + (1.5 if stays else 60)
        while (gone := " is gone" in daemon.stderr()) is False and time.monotonic() < log_deadline:
            time.sleep(0.05)
        assert gone is not stays
        next(batches)
