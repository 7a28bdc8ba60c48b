"""Connecting: the values that both sides agree on, and the message if it fails."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import penstock
from penstock._state import deadline
from penstock._transport import tcp_connection
from penstock_proto import DictSpec, Leaf
from penstock_proto.batches.inferring import infer
from penstock_proto.messages import ErrorReport, Failed
from penstock_proto.status import readiness
from penstock_proto.transport.codec import encode
from tests.fakes import fake_daemon
from tests.processes.free_ports import free_port
from tests.simulation.clock import Clock


def test_a_connection_says_what_the_feed_is() -> None:
    info = fake_daemon.feed_info(infer({"x": np.zeros((2, 3), np.uint8)}), 5, batches=7, drop_remainder=True)
    with fake_daemon.FakeDaemon(info, lambda _: []) as daemon, penstock.connect(daemon.url) as connection:
        assert connection.element_spec == DictSpec(("x",), (Leaf("uint8", (5, 2, 3)),))
        assert connection.cardinality == 7
        assert connection.info == info
        assert connection.error is None
        assert connection.stats()["transport"] == "local"
        assert daemon.url in repr(connection)


def test_without_a_unix_socket_auto_goes_on_over_tcp() -> None:
    info, epoch = fake_daemon.numbers(3)
    with fake_daemon.FakeDaemon(info, epoch, unix=False) as daemon, penstock.connect(daemon.url) as connection:
        assert connection.stats()["transport"] == "tcp"
        assert len(list(connection.batches())) == 3


def test_local_without_a_unix_socket_says_why() -> None:
    info, epoch = fake_daemon.numbers(3)
    with (
        fake_daemon.FakeDaemon(info, epoch, unix=False) as daemon,
        pytest.raises(penstock.Unreachable, match=r"shares no memory .*refused.*another host or in another container"),
    ):
        penstock.connect(daemon.url, transport="local")


def test_nobody_there_names_the_address_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, port = Clock(), free_port()
    for module in (tcp_connection, deadline, readiness):
        monkeypatch.setattr(module, "time", clock)
    with pytest.raises(penstock.Unreachable) as caught:
        penstock.connect(f"tcp://127.0.0.1:{port}/feed", timeout=0.5)
    assert 1000.4 <= clock.now <= 1000.6
    assert f"no daemon listens at tcp://127.0.0.1:{port}, tried for 0.5 s" in str(caught.value)
    assert "penstock serve" in str(caught.value)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(penstock.Unreachable, match="the host name is unknown"):
        penstock.connect("tcp://no-such-host.invalid:5555/feed", timeout=0.3)


def test_something_that_does_not_answer_is_told_from_nothing() -> None:
    info, epoch = fake_daemon.numbers(1)
    with (
        fake_daemon.FakeDaemon(info, epoch, answer=False) as daemon,
        pytest.raises(penstock.Unreachable, match=r"at tcp://.* accepts connections but does not answer"),
    ):
        penstock.connect(daemon.url, timeout=0.5)


def test_a_daemon_that_starts_late_is_waited_for() -> None:
    info, epoch = fake_daemon.numbers(1)
    with fake_daemon.FakeDaemon(info, epoch) as daemon:
        url = daemon.url
    connections: list[penstock.Connection] = []
    trainer = threading.Thread(target=lambda: connections.append(penstock.connect(url, timeout=60)))
    trainer.start()
    time.sleep(0.5)
    with fake_daemon.FakeDaemon(info, epoch, port=daemon.port):
        trainer.join()
        with connections.pop() as connection:
            assert len(list(connection.batches())) == 1


def test_what_is_no_daemon_is_named_at_once() -> None:
    def refuse() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n" + b"X-Long: yes\r\n" * 10)
            while connection.recv(4096):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(penstock.Unreachable, match=r"tcp://.* is not a Penstock daemon: .*HTTP"):
            penstock.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}/feed", timeout=1000)
        thread.join()


def test_what_came_of_a_connection_that_broke_does_not_count_in_the_next() -> None:
    refusal = encode(Failed(ErrorReport.of(penstock.UnknownFeed("no such feed"))))
    answers = [b"\0\x60half of an answer", b"\0" + bytes([len(refusal)]) + refusal]

    def answer() -> None:
        for said in answers:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL".ljust(64, b"\0") + b"\4\6\5READY" + said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(4096):
                    pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(penstock.UnknownFeed, match="no such feed"):
            penstock.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}/feed", timeout=60)
        thread.join()


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_unknown_feed_is_answered_with_those_there_are(transport: str) -> None:
    info, epoch = fake_daemon.numbers(1)
    with (
        fake_daemon.FakeDaemon(info, epoch) as daemon,
        pytest.raises(penstock.UnknownFeed, match="no feed 'trian'; there is: feed"),
    ):
        penstock.connect(daemon.url.replace("/feed", "/trian"), transport=transport)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_connection, "VERSION", 99)
    info, epoch = fake_daemon.numbers(1)
    with (
        fake_daemon.FakeDaemon(info, epoch) as daemon,
        pytest.raises(penstock.ProtocolError, match="versions differ"),
    ):
        penstock.connect(daemon.url)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transport": "udp"}, "transport='udp': must be one of auto, local, tcp"),
        ({"timeout": 0}, "timeout=0: must be more than 0 seconds"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        penstock.connect("tcp://h:1/f", **options)  # type: ignore[arg-type]


def test_options_of_a_private_daemon_do_not_hinder_a_url() -> None:
    info, epoch = fake_daemon.numbers(1)
    with fake_daemon.FakeDaemon(info, epoch) as daemon:
        penstock.connect(daemon.url, workers=4, memory=1 << 30).close()


def test_the_public_names_are_there_and_tensorflow_is_not() -> None:
    code = (
        "import sys, penstock\n"
        "assert all(hasattr(penstock, name) for name in set(penstock.__all__) - {*penstock._OF_THE_SERVER})\n"
        "assert isinstance(penstock.__version__, str)\n"
        "print(sorted({'tensorflow', 'click', 'uvloop', 'penstock_server'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[]"
