"""No peer can stop, starve or end the daemon, and what it leaves behind is taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import zmq
from conftest import Daemon, Serve

import penstock
from penstock_proto import codec
from penstock_proto import messages as m
from penstock_server import control

FEED = """
    import numpy as np
    from penstock_server import Feed

    def big(split):
        for i in range(20):
            yield np.full(1 << 20, i, "uint8")

    feed = Feed(big, splits=range(4), batch_size=1, turn=1)
"""


@contextmanager
def dealer(daemon: Daemon) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    connection = context.socket(zmq.DEALER)
    connection.connect(daemon.url.rpartition("/")[0])
    try:
        yield connection
    finally:
        connection.close(0)
        context.term()


def read(daemon: Daemon) -> int:
    with penstock.connect(daemon.url) as connection:
        return sum(1 for _ in connection.batches())


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
        assert daemon.stop(timeout=10) == 0
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
        connection.send(codec.encode(m.Begin(2**62)))
        connection.send(codec.encode(m.Begin(2**53)))
        assert isinstance(codec.from_server(connection.recv()), m.Begun)
        assert isinstance(codec.from_server(connection.recv()), m.Slab)
        assert read(daemon) == 80
    assert len(daemon.workers()) == 2
    assert "it is started again" not in daemon.stderr()


@pytest.mark.parametrize(
    "message",
    [m.Begin(0), m.Ack(5), m.Leave(3), m.Open(b"x" * 16, b"", 1, 1, 1), m.Ping(), m.StopRequest()],
    ids=lambda message: type(message).__name__,
)
def test_a_message_without_a_session_is_answered_with_an_error(serve: Serve, message: m.ClientMessage) -> None:
    daemon = serve(FEED)
    with dealer(daemon) as connection:
        connection.send(codec.encode(message))
        assert connection.poll(5000)
        assert isinstance(codec.from_server(connection.recv()), m.Failed)
    assert read(daemon) == 80


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
        status = control.status(daemon.url, 5)
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
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 1, 4096))
    with pytest.raises(penstock.PenstockError):
        penstock.connect(daemon.url, transport="local", timeout=1)
    process.rlimit(psutil.RLIMIT_NOFILE, (4096, 4096))
    assert read(daemon) == 80
    assert "cannot take a connection on this host" in daemon.stderr()
