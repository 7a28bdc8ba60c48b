"""Anybody on a machine can listen at the port of a daemon that is gone, and name a unix address of their own. So the
client asks the kernel who is at the other end: its own user, root, and a user that it is told may send batches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock
from penstock._stream import connecting
from penstock_proto.messages import HostAt, Reaches
from penstock_proto.security import socket_owner, trusted_users, unix_address
from penstock_server.join import to_head
from tests.client.transport.test_client_fetching import FakeHost, KeepingDaemon
from tests.client.transport.test_client_lending import FakeLender
from tests.fakes.fake_daemon import FakeDaemon, Stall, numbers

OWN = os.geteuid()
OTHER = OWN + 1
ROOT_ONLY = pytest.mark.skipif(OWN != 0, reason="only root can start a process of another user")


@pytest.fixture
def trusts_only_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """To this process, its own daemons are now those of a user whom it does not trust."""
    monkeypatch.setattr(connecting, "users", lambda user: frozenset({OTHER, *([] if user is None else [int(user)])}))


@pytest.mark.parametrize(
    ("bind", "connect"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "127.0.0.2"), ("::1", "::1"), ("::", "127.0.0.1")]
)
def test_the_kernel_knows_who_holds_the_other_end(bind: str, connect: str) -> None:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        if bind == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("0.0.0.0" if connect == "127.0.0.2" else bind, 0))
        listener.listen()
        connection = stack.enter_context(socket.create_connection((connect, listener.getsockname()[1])))
        with pytest.raises(ConnectionResetError):  # nobody has accepted it yet
            socket_owner.owner(connection)
        accepted, _ = listener.accept()
        with accepted:
            assert socket_owner.owner(connection) == socket_owner.owner(accepted) == OWN
            accepted.send(b"bytes that still come")
        with pytest.raises(ConnectionResetError):  # the kernel shows it as root's
            socket_owner.owner(connection)


def test_who_is_on_another_machine_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Remote:
        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.1", 40000

        def getpeername(self) -> tuple[str, int]:
            return "10.0.0.2", 5555

    assert socket_owner.owner(Remote()) is None  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        monkeypatch.setattr(socket_owner, "_TABLES", Path("/nowhere"))
        assert socket_owner.owner(ours) is None
    with pytest.raises(ConnectionResetError):
        socket_owner.owner(ours)


@pytest.mark.parametrize("transport", ["auto", "local", "tcp"])
def test_a_daemon_of_another_user_is_refused_and_named(trusts_only_another_user: None, transport: str) -> None:
    info, epoch = numbers(3, batches=3)
    with FakeDaemon(info, epoch) as daemon:
        with pytest.raises(penstock.Unreachable, match=rf"user {OWN} \(.*\) listens at .*daemon_user={OWN}"):
            penstock.connect(daemon.url, transport=transport)
        assert not daemon.got


@pytest.mark.parametrize("reads", [True, False], ids=["in order", "by a reset"])
def test_who_says_everything_and_closes_is_not_taken_for_root(reads: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as poser, socket.create_connection(poser.getsockname()) as ours:
        ours.sendall(b"greeting")
        connection, _ = poser.accept()
        with connection:
            connection.sendall(b"all of a stream")
            assert connection.recv(100 if reads else 1)
        assert select.select([ours], [], [], 60)[0]
        with pytest.raises(ConnectionResetError):
            socket_owner.owner(ours)


def test_a_daemon_of_another_user_is_read_if_it_is_named(trusts_only_another_user: None) -> None:
    info, epoch = numbers(3, batches=3)
    with FakeDaemon(info, epoch) as daemon, penstock.connect(daemon.url, daemon_user=OWN) as connection:
        assert connection.stats()["transport"] == "local"
        assert len(list(connection.batches())) == 3


def test_the_unix_address_that_a_daemon_names_must_be_of_a_trusted_user(
    trusts_only_another_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_owner, "owner", lambda connection: None)  # as through a port that the kernel passes on
    info, epoch = numbers(3, batches=3)
    with FakeDaemon(info, epoch) as daemon:
        with penstock.connect(daemon.url) as connection:
            assert connection.stats()["transport"] == "tcp"
            assert len(list(connection.batches())) == 3
        with pytest.raises(penstock.Unreachable, match=f"user {OWN} listens at penstock-{OWN}-"):
            penstock.connect(daemon.url, transport="local")


def test_no_slab_is_fetched_from_a_host_of_another_user(
    trusts_only_another_user: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info, epoch = numbers(20, batches=20)
    owners = iter([OTHER])  # of the daemon; then the kernel says
    real = socket_owner.owner
    monkeypatch.setattr(socket_owner, "owner", lambda connection: next(owners, None) or real(connection))
    caplog.set_level("INFO", logger="penstock")
    with (
        FakeLender(lambda host, fetch: None) as here,
        FakeHost(lambda host, fetch: None) as there,
        KeepingDaemon(info, lambda e: [Stall(), *epoch(e)]) as daemon,
        penstock.connect(daemon.url, transport="tcp") as connection,
    ):
        daemon.say(HostAt(7, f"tcp://127.0.0.1:{there.port}", unix=here.name))
        daemon.wait_for(lambda: f"user {OWN}" in caplog.text)
        daemon.go_on()
        batches = connection.batches()
        first = threading.Thread(target=lambda: next(batches))
        first.start()
        daemon.wait_for(daemon.stalled.is_set)
        daemon.go_on()
        first.join()
        assert len(list(batches)) == 19
        assert not daemon.count(Reaches)
        assert not here.fetches
        assert not there.fetches


def test_own_user_root_and_the_named_one_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trusted_users.VARIABLE, raising=False)
    assert trusted_users.users(None) == {0, OWN}
    assert trusted_users.users("root") == {0, OWN}
    assert trusted_users.users(12345) == trusted_users.users("12345") == {0, OWN, 12345}
    monkeypatch.setenv(trusted_users.VARIABLE, "23456")
    assert trusted_users.users(None) == {0, OWN, 23456}
    assert trusted_users.users(12345) == {0, OWN, 12345}
    monkeypatch.setenv(trusted_users.VARIABLE, "")
    assert trusted_users.users(None) == {0, OWN}
    for wrong in ("no such user", "\0", 2**32 - 1, -1):
        with pytest.raises(penstock.StartError, match="daemon_user"):
            trusted_users.users(wrong)


def test_only_a_daemon_at_a_url_has_a_user() -> None:
    with pytest.raises(penstock.StartError, match="private daemon runs as this process's own user"):
        penstock.connect("scenes.py:feed", daemon_user="root")


def test_with_a_known_key_the_user_in_the_address_counts() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        name = unix_address.unused()
        listener.bind("\0" + name)
        listener.listen()
        for users, fine in ((None, True), ({OWN}, True), ({OTHER}, False)):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                if fine:
                    unix_address.connect(connection, name, users)
                    continue
                with pytest.raises(PermissionError):
                    unix_address.connect(connection, name, users)


POSER = """
import os, sys
sys.path[:0] = sys.argv[2].split(os.pathsep)
from tests.fakes.fake_daemon import FakeDaemon, numbers
info, epoch = numbers(20, batches=20)
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
with FakeDaemon(info, lambda e: epoch(e + 7), port=int(sys.argv[1])) as daemon:
    print("listens", flush=True)
    sys.stdin.read()
    print(len(daemon.got), flush=True)
"""


@ROOT_ONLY
def test_another_user_who_takes_the_port_of_a_dead_daemon_does_not_feed_the_waiting_trainer() -> None:
    info, epoch = numbers(20, batches=20)
    seen: list[float] = []
    daemon = FakeDaemon(info, lambda e: [*epoch(e)[:5], Stall()])
    port = daemon.port
    with contextlib.ExitStack() as stack:
        with daemon:
            connection = stack.enter_context(penstock.connect(daemon.url, reconnect=60))

            def read() -> None:
                seen.extend(float(x[0, 0]) for x, _ in connection.batches())

            reader = threading.Thread(target=read)
            reader.start()
            daemon.wait_for(lambda: len(seen) == 5)
        poser = subprocess.Popen(
            [
                sys.executable,
                "-c",
                POSER,
                str(port),
                os.pathsep.join([str(Path(__file__).resolve().parents[3]), *sys.path]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(poser.communicate)
        assert poser.stdout is not None
        assert poser.stdout.readline() == "listens\n"
        reader.join(2)
        assert reader.is_alive()
        assert len(seen) == 5
        said, _ = poser.communicate("")
        assert said == "0\n", "not even Hello was sent to it"
        with FakeDaemon(info, epoch, port=port):
            reader.join(60)
        assert seen == list(range(20))


def test_a_host_does_not_join_a_head_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_head, "users", lambda user: frozenset({OTHER}))
    info, epoch = numbers(3, batches=3)

    async def join(port: int) -> None:
        def nothing(*_: object) -> memoryview:
            raise AssertionError("nothing comes")

        await to_head.connect("127.0.0.1", port, None, on_message=nothing, place=nothing, on_end=nothing)

    with FakeDaemon(info, epoch) as daemon:
        with pytest.raises(PermissionError, match=rf"user {OWN} \(.*\) listens at tcp://127.0.0.1:{daemon.port}"):
            asyncio.run(join(daemon.port))
