"""Keys: who may connect over TCP, what the others are told, and what crosses the network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

import penstock
from penstock._transport import tcp_transport
from penstock._transport.daemon_status import DaemonStatus
from penstock_proto import KeyRefused, StartError, distribution
from penstock_proto import messages as m
from penstock_proto.security.keys import client_keys, host_keys
from penstock_proto.transport import codec, libzmq
from penstock_server.cli import keygen, main
from penstock_server.daemon.config import DaemonConfig
from penstock_server.daemon.peer_keys import PeerKeys
from penstock_server.net import keys
from penstock_server.net.accepting import only_this_host
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.inside import handle_of
from tests.processes.free_ports import free_address

FEED = """
    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        for i in range(20):
            yield np.full(1 << 16, 20 * split + i, "int32")

    feed = Feed(numbers, splits=range(4), batch_size=1, lanes=1, turn=1)
"""
BATCH = b"\x07\0\0\0" * 4096
"""Bytes of a batch."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a daemon and of two clients, alice and bob."""
    keygen.generate(tmp_path / "keys", ["alice", "bob"])
    return tmp_path / "keys"


def until(condition: Callable[[], bool]) -> None:
    """Wait as long as it takes; pytest's timeout ends a test that waits in vain."""
    while not condition():
        time.sleep(0.02)


def digest(connection: penstock.Connection) -> str:
    """Return the SHA-256 of the rest of an epoch."""
    found = hashlib.sha256()
    for batch in connection.batches():
        found.update(batch.tobytes())
    return found.hexdigest()


# --- files ---


def test_keygen_makes_a_folder_for_each_side_that_nobody_else_can_read_and_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    run = CliRunner()
    made = run.invoke(main.main, ["keygen", str(folder)])
    assert made.exit_code == 0, made.output
    assert f'penstock.connect(url, keys="{folder / "clients/trainer"}")' in made.output
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    assert sorted(files) == [
        "clients",
        "clients/trainer",
        "clients/trainer/client.key_secret",
        "clients/trainer/server.key",
        "server",
        "server/clients",
        "server/clients/trainer.key",
        "server/server.key_secret",
    ]
    assert {path.stat().st_mode & 0o777 for path in (folder, *files.values()) if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in files.values() if path.is_file()} == {0o600}

    own = keys.server_keys(str(folder))
    trainer = client_keys(folder / "clients/trainer")
    assert trainer is not None
    assert own.admitted == {trainer.own.public: keys.ClientKey(trainer.own.public, "trainer", host=False)}
    assert trainer.server == own.own.public
    for path in (files["clients/trainer/server.key"], files["server/clients/trainer.key"]):
        assert "secret-key" not in path.read_text()

    before = {path: path.read_bytes() for path in files.values() if path.is_file()}
    again = run.invoke(main.main, ["keygen", str(folder)])
    assert again.exit_code == 1
    assert f"exists already. To add a client: penstock keygen {folder} --client NAME" in again.output
    taken = run.invoke(main.main, ["keygen", str(folder), "--client", "eve", "--client", "trainer"])
    assert taken.exit_code == 1
    assert "clients/trainer exists already" in taken.output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert run.invoke(main.main, ["keygen", str(folder), "--client", "eve"]).exit_code == 0
    assert sorted(key.name for key in keys.admitted(folder / "server").values()) == ["eve", "trainer"]
    odd = run.invoke(main.main, ["keygen", str(folder), "--client", "../eve"])
    assert odd.exit_code == 1
    assert "a name has 1 to 64 letters" in odd.output


def test_a_folder_that_cannot_be_used_is_refused_with_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, server = folder / "clients/alice", folder / "server"

    def refused(client: str | Path) -> str:
        with pytest.raises(StartError) as raised:
            penstock.connect("tcp://127.0.0.1:9/feed", keys=client)
        return str(raised.value)

    def daemon_refused(path: Path) -> str:
        with pytest.raises(StartError) as raised:
            PeerKeys("tcp://0.0.0.0:5555", str(path))
        return str(raised.value)

    assert "there is no folder" in refused(tmp_path / "none")
    assert f"give one client's folder, such as {alice}" in refused(folder)
    assert "is the daemon's folder" in refused(server)
    assert "has no client.key_secret" in refused(tmp_path)
    assert "keys=''" in refused("")
    monkeypatch.setenv("PENSTOCK_KEYS", str(tmp_path / "none"))
    with pytest.raises(StartError, match="PENSTOCK_KEYS: there is no folder"):
        penstock.connect("tcp://127.0.0.1:9/feed")
    with pytest.raises(StartError, match="keys= is for the daemon at a URL"):
        penstock.connect("feeds.py:feed", keys=alice)

    (tmp_path / "private_feeds.py").write_text(textwrap.dedent(FEED))  # other tests of this process load feeds.py
    with penstock.connect(f"{tmp_path}/private_feeds.py:feed", workers=0) as private:  # PENSTOCK_KEYS is ignored
        next(private.batches())

    assert "To make keys: penstock keygen" in daemon_refused(tmp_path / "none")
    assert "is a client's folder" in daemon_refused(alice)
    assert "has no server.key_secret" in daemon_refused(tmp_path)

    (alice / "client.key_secret").chmod(0o644)
    assert f"(mode 644): chmod 600 {alice / 'client.key_secret'}" in refused(alice)
    (alice / "client.key_secret").chmod(0o640)  # as Kubernetes mounts a secret for a group
    (alice / "server.key").unlink()
    assert "cannot read the key" in refused(alice)
    (alice / "server.key").write_text('public-key = "too short"')
    assert "is not a key file, or is damaged" in refused(alice)
    (server / "clients").chmod(0o777)
    assert f"so admit others: chmod 700 {server / 'clients'}" in daemon_refused(server)
    (server / "clients").chmod(0o700)
    (server / "clients/again.key").write_bytes((server / "clients/alice.key").read_bytes())
    assert "are the same key" in daemon_refused(folder)
    secret = server / "server.key_secret"
    secret.write_text(secret.read_text().replace("public-key", "public-key = 'x' #"))
    assert "is damaged" in daemon_refused(folder)

    monkeypatch.setitem(sys.modules, "zmq", None)
    assert f"needs pyzmq for encryption: {distribution.pip_install('keys')}" in refused(folder / "clients/bob")


def test_hosts_have_keys_of_their_own_and_a_name_belongs_to_one_client_or_host(folder: Path, tmp_path: Path) -> None:
    run = CliRunner()
    first = run.invoke(main.main, ["keygen", str(tmp_path / "new"), "--host", "box"])
    assert first.exit_code == 0, first.output
    assert sorted(path.name for path in (tmp_path / "new").rglob("*.key_secret")) == [  # the first call adds a client
        "client.key_secret",
        "host.key_secret",
        "server.key_secret",
    ]
    made = run.invoke(main.main, ["keygen", str(folder), "--host", "box", "--client", "carol", "--host", "big-box"])
    assert made.exit_code == 0, made.output
    assert f"copy it there: penstock join URL ... --keys {folder / 'hosts/box'}" in made.output
    assert made.output.endswith("after `kill -HUP PID`.\n")
    box, big, own = host_keys(folder / "hosts/box"), host_keys(folder / "hosts/big-box"), keys.server_keys(str(folder))
    assert box is not None
    assert big is not None
    assert own.admitted[box.own.public] == keys.ClientKey(box.own.public, "box", host=True)
    assert {key.name: key.host for key in own.admitted.values()} == {
        "alice": False,
        "bob": False,
        "carol": False,
        "big-box": True,
        "box": True,
    }
    assert box.server == big.server == own.own.public
    inside = [*(folder / "hosts").rglob("*"), *(folder / "server/hosts").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in inside if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in inside if path.is_file()} == {0o600}
    assert "secret-key" not in (folder / "server/hosts/box.key").read_text()

    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for options, said in (
        (["--host", "eve", "--host", "box"], "hosts/box exists already: choose another name, or remove the old host's"),
        (
            ["--host", "alice"],
            "clients/alice exists already: choose another name, or remove the old client's key first",
        ),
        (["--client", "box"], "hosts/box exists already"),
        (["--client", "eve", "--host", "eve"], "--client eve and --host eve: give each a name of its own"),
        (["--host", "../eve"], "--host '../eve': a name has 1 to 64 letters"),
        ([], f"To add a host that joins: penstock keygen {folder} --host NAME"),
    ):
        refused = run.invoke(main.main, ["keygen", str(folder), *options])
        assert refused.exit_code == 1
        assert said in refused.output
    below = run.invoke(main.main, ["keygen", str(folder / "server"), "--host", "eve"])
    assert f"is the daemon's own folder: give the one above, {folder}" in below.output
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before

    clients, hosts = folder / "server/clients", folder / "server/hosts"
    for source, copy, said in (
        (hosts / "box.key", clients / "again.key", "are the same key"),
        (clients / "alice.key", hosts / "again.key", "are the same key"),
        (tmp_path / "new/server/hosts/box.key", clients / "box.key", "have the same name"),
    ):
        copy.write_bytes(source.read_bytes())
        with pytest.raises(StartError, match=f"{copy} .*{said}: remove one of them|.* and {copy} {said}"):
            keys.admitted(folder / "server")
        copy.unlink()
    hosts.chmod(0o777)
    with pytest.raises(StartError, match=f"every user of this host can change {hosts}"):
        keys.admitted(folder / "server")


def test_a_host_is_told_which_folder_it_needs_and_a_client_that_was_given_a_hosts_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: str | Path | None, read: Callable[[str | Path | None], object] = host_keys) -> str:
        with pytest.raises(StartError) as raised:
            read(path)
        return str(raised.value)

    assert f"has no host's keys. To make some: penstock keygen {folder} --host NAME" in refused(folder)
    keygen.generate(folder, hosts=["box"])
    box = folder / "hosts/box"
    assert f"--keys {tmp_path / 'none'}: there is no folder" in refused(tmp_path / "none")
    assert "--keys : give the host's folder" in refused("")
    assert "is a client's folder, and `penstock join` needs a host's: on the daemon's" in refused(
        folder / "clients/bob"
    )
    assert "is the daemon's folder: give a host's" in refused(folder / "server")
    for above in (folder, folder / "hosts"):
        assert f"give one host's folder, such as {box}" in refused(above)
    assert "is not a host's folder: it has no host.key_secret" in refused(folder / "clients")
    assert "is a host's folder, which is for `penstock join` only: give a client's" in refused(box, client_keys)
    with pytest.raises(StartError, match=r"is a host's folder: give the daemon's"):
        keys.server_keys(str(box))

    monkeypatch.setenv("PENSTOCK_KEYS", str(folder / "clients/bob"))
    assert refused(None).startswith("PENSTOCK_KEYS: ")
    monkeypatch.setenv("PENSTOCK_KEYS", str(box))
    assert host_keys(None) == host_keys(box)
    monkeypatch.delenv("PENSTOCK_KEYS")
    assert host_keys(None) is None

    (box / "host.key_secret").chmod(0o604)
    assert f"(mode 604): chmod 600 {box / 'host.key_secret'}" in refused(box)
    (box / "host.key_secret").chmod(0o600)
    (box / "server.key").unlink()
    assert "cannot read the key" in refused(box)


def test_keys_that_this_user_may_not_read_are_refused_and_do_not_count_as_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keygen.generate(folder, hosts=["box"])
    monkeypatch.chdir(folder)  # another user cannot enter pytest's folders
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    reads: dict[str, Callable[[], object]] = {
        "clients/alice": lambda: client_keys("clients/alice"),
        "hosts/box": lambda: host_keys("hosts/box"),
        "server": lambda: keys.server_keys("."),
        "server/clients": lambda: keys.admitted(Path("server")),
        "server/hosts": lambda: keys.admitted(Path("server")),
    }
    root = os.geteuid() == 0
    for place, read in reads.items():
        Path(place).chmod(0o700 if root else 0)
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(StartError, match=f"^cannot read the keys in {place}.*: Permission denied"):
                read()
        finally:
            if root:
                os.seteuid(0)
            Path(place).chmod(0o755)


def test_which_key_may_join_and_which_may_read_and_which_no_longer_counts() -> None:
    client, host = keys.ClientKey(b"c", "alice", host=False), keys.ClientKey(b"h", "box", host=True)
    keys.may_join(host, True)
    keys.may_join(None, False)
    keys.may_read(client)
    keys.may_read(None)
    with pytest.raises(
        KeyRefused, match=r"alice is the key of a client, and `penstock join` needs a host's\. .*--host"
    ):
        keys.may_join(client, True)
    with pytest.raises(KeyRefused, match="this connection has no key"):
        keys.may_join(None, True)
    with pytest.raises(KeyRefused, match="box is the key of a host, which is for `penstock join` only: use a client's"):
        keys.may_read(host)
    assert keys.revoked(host, {})
    assert keys.revoked(host, {b"h": keys.ClientKey(b"h", "box", host=False)})  # its file was moved to clients/
    assert not keys.revoked(host, {b"h": keys.ClientKey(b"h", "renamed", host=True)})


def test_a_bind_beyond_this_host_needs_keys_or_insecure(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here = ["tcp://127.0.0.1:0", "tcp://127.1.2.3:0", "tcp://localhost:0", "tcp://[::1]:0"]
    assert all(only_this_host(bind) for bind in here)
    for bind in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555", "tcp://10.0.0.1:5555"):
        assert not only_this_host(bind)
        with pytest.raises(StartError, match=r"can be reached from other hosts\. Give --keys DIR"):
            DaemonConfig(feeds=("feeds.py:feed",), bind=bind)
    PeerKeys(here[0], None).say("tcp://127.0.0.1:5555")
    assert not caplog.records
    PeerKeys("tcp://0.0.0.0:5555", None).say("tcp://0.0.0.0:5555")
    assert "without keys (--insecure): nothing is encrypted" in caplog.text
    assert DaemonConfig(feeds=("feeds.py:feed",), bind="tcp://0.0.0.0:5555", keys=str(folder))
    both = CliRunner().invoke(main.main, ["serve", "feeds.py:feed", "--keys", str(folder), "--insecure"])
    assert both.exit_code == 2
    assert "give --keys or --insecure, not both" in both.output


# --- connections ---


class Wire:
    """Records what crosses the connections to a daemon, in each direction."""

    def __init__(self, daemon: Daemon) -> None:
        endpoint, _, feed = daemon.url.rpartition("/")
        self._to = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.up, self.down = bytearray(), bytearray()
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"tcp://127.0.0.1:{self._sockets[0].getsockname()[1]}/{feed}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                daemon = socket.create_connection(self._to)
                self._sockets += [client, daemon]
                for source, sink, seen in ((client, daemon, self.up), (daemon, client, self.down)):
                    self._threads.append(threading.Thread(target=self._carry, args=(source, sink, seen)))
                    self._threads[-1].start()

    @staticmethod
    def _carry(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def replayed(daemon: Daemon, recorded: bytes) -> bytes:
    """Return what a daemon answers to a replay of a client's bytes."""
    heard = b""
    with socket.create_connection(("127.0.0.1", int(daemon.url.rpartition("/")[0].rpartition(":")[2]))) as connection:
        connection.settimeout(1)
        connection.sendall(recorded)
        try:
            while data := connection.recv(1 << 16):
                heard += data
        except OSError:
            pass
    return heard


def test_with_keys_the_stream_is_the_same_and_neither_batches_nor_sessions_can_be_had_from_the_wire(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = []
    for keyed in (False, True):
        daemon = serve(FEED, **({"keys": folder} if keyed else {}))
        monkeypatch.setenv("PENSTOCK_KEYS", str(folder / "clients/alice") if keyed else "")
        with Wire(daemon) as wire:
            with penstock.connect(wire.url, transport="tcp") as connection:
                digests.append(digest(connection))
                status = control.status(daemon.url, 60, client_keys(None))
                asked = DaemonStatus(daemon.url, handle_of(connection).handoff.keys)
                asked.ask()
                asked.wait(60)
                assert asked.latest is not None
                assert asked.latest.streams[0].key == ("alice" if keyed else None)
                shown = CliRunner().invoke(main.main, ["status", daemon.url]).output
            assert len(wire.down) > 80 * (1 << 18)
            assert (BATCH in wire.down) is not keyed
            assert (b"welcome" in wire.down) is not keyed
        assert (status.streams[0].key == "alice") is keyed
        assert ("with the key alice (tcp)" in shown) is keyed
        assert (b"welcome" in replayed(daemon, bytes(wire.up))) is not keyed  # the handshake stops it
        until(lambda daemon=daemon, keyed=keyed: not keyed or "cannot be deciphered" in daemon.stderr())
        assert ("with the key alice reads it (tcp)" in daemon.stderr()) is keyed
    assert digests[0] == digests[1]


def test_who_may_not_connect_is_told_so_at_once(serve: Serve, folder: Path, tmp_path: Path) -> None:
    keyed, plain = serve(FEED, keys=folder), serve(FEED)
    keygen.generate(tmp_path / "other", ["alice"])
    mixed = tmp_path / "mixed"
    mixed.mkdir(0o700)
    for source, name in ((tmp_path / "other", "client.key_secret"), (folder, "server.key")):
        (mixed / name).write_bytes((source / "clients/alice" / name).read_bytes())
    (mixed / "client.key_secret").chmod(0o600)
    alice = folder / "clients/alice"
    for daemon, path, said, logged in (
        (keyed, None, "the daemon admits only clients with keys: give keys=", "it has no keys"),
        (keyed, mixed, "the daemon does not know the key .*mixed/client.key_secret", r"its key \S{40} is not in"),
        (keyed, tmp_path / "other/clients/alice", "the daemon is another one than", "given another daemon's key"),
        (plain, alice, "has keys .*, and the daemon uses none", ""),
    ):
        for ask in (
            lambda daemon=daemon, path=path: penstock.connect(daemon.url, keys=path, timeout=60),
            lambda daemon=daemon, path=path: control.status(daemon.url, 60, path and client_keys(path)),
        ):
            began = time.monotonic()
            with pytest.raises(KeyRefused, match=rf"^{daemon.url.rpartition('/')[0]}: .*{said}"):
                ask()
            assert time.monotonic() - began < 20  # long before the timeout
        until(lambda daemon=daemon, logged=logged: bool(re.search(logged, daemon.stderr())))
    with pytest.raises(penstock.Unreachable, match="no daemon listens at"):
        penstock.connect(f"{free_address()}/feed", keys=alice, timeout=0.5)
    with penstock.connect(keyed.url, keys=alice) as connection:  # on one host, with keys: shared memory
        assert connection.stats()["transport"] == "local"
        assert digest(connection) == digest(connection)


def test_sighup_admits_added_keys_and_cuts_off_removed_ones_and_the_others_read_on(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED, keys=folder)
    allowed = folder / "server/clients"

    def hangup(said: str) -> None:
        seen = daemon.stderr().count(said)
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: daemon.stderr().count(said) > seen)

    def connect(name: str, transport: str) -> penstock.Connection:
        return penstock.connect(daemon.url, keys=folder / "clients" / name, transport=transport, timeout=60)

    with connect("alice", "tcp") as alice, connect("bob", "tcp") as bob, connect("bob", "local") as near:
        readers = [connection.batches() for connection in (alice, bob, near)]
        first, *_ = [next(batches) for batches in readers]
        (allowed / "broken.key").write_text("nothing")
        hangup("the keys were not read again, and those from before still count")
        (allowed / "broken.key").unlink()
        (allowed / "bob.key").unlink()
        keygen.generate(folder, ["carol"])
        hangup("read the keys again: alice, carol may connect")
        for batches in readers[1:]:
            with pytest.raises(KeyRefused, match="the key bob was removed from the daemon's keys"):
                list(batches)
        with pytest.raises(KeyRefused, match="the daemon does not know the key"):
            connect("bob", "auto")
        with connect("carol", "tcp") as carol:
            assert (next(carol.batches()) == first).all()
        assert sum(1 for _ in readers[0]) == 79
        assert alice.stats()["reconnects"] == 0


def test_a_hosts_key_reads_nothing_and_its_connection_ends_when_the_key_is_removed(
    serve: Serve, folder: Path, tmp_path: Path
) -> None:
    keygen.generate(folder, hosts=["box"])
    daemon = serve(FEED, keys=folder)
    assert "with keys: alice, bob may connect; hosts: box may join" in daemon.stderr()
    posing = tmp_path / "posing"  # a host's key, used as a client's
    posing.mkdir(0o700)
    for name, copy in (("host.key_secret", "client.key_secret"), ("server.key", "server.key")):
        (posing / copy).write_bytes((folder / "hosts/box" / name).read_bytes())
        (posing / copy).chmod(0o600)
    with pytest.raises(KeyRefused, match="box is the key of a host, which is for `penstock join` only"):
        penstock.connect(daemon.url, keys=posing, timeout=60)

    port = int(daemon.url.rpartition("/")[0].rpartition(":")[2])

    def connect() -> libzmq.LibzmqDealer:
        return libzmq.dealer(host_keys(folder / "hosts/box"), "127.0.0.1", port, 60, lambda: None)

    def ask(message: m.Message) -> m.ServerMessage:
        assert host.send(codec.encode(message))
        said = host.message(60)
        assert said is not None
        return codec.from_server(said)

    host = connect()
    try:
        with penstock.connect(daemon.url, keys=folder / "clients/alice", transport="tcp", timeout=60) as alice:
            batches = alice.batches()
            next(batches)
            assert isinstance(ask(m.StatusRequest(m.VERSION)), m.Status)
            refused = ask(m.Hello(m.VERSION, "feed"))
            assert isinstance(refused, m.Failed)
            assert refused.error.kind == "KeyRefused"
            assert isinstance(ask(m.StatusRequest(m.VERSION)), m.Status)  # the connection is still there
            (folder / "server/hosts/box.key").unlink()
            daemon.process.send_signal(signal.SIGHUP)
            with pytest.raises(ConnectionResetError):
                while host.message(60) is not None:
                    pass
            assert "read the keys again: alice, bob may connect\n" in daemon.stderr()
            with pytest.raises(KeyRefused, match=r"does not know the key .*hosts/box/host\.key_secret: .*server/hosts"):
                connect()
            assert sum(1 for _ in batches) == 79
            assert alice.stats()["reconnects"] == 0
    finally:
        host.close(0)


def test_a_stream_goes_on_over_a_restart_with_keys_and_ends_if_the_key_is_gone(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED, keys=folder)
    bind = daemon.url.rpartition("/")[0]
    with penstock.connect(daemon.url, keys=folder / "clients/alice", transport="tcp") as connection:
        whole = digest(connection)
        found = hashlib.sha256()
        for number, batch in enumerate(connection.batches()):
            found.update(batch.tobytes())
            if number == 30:
                daemon.process.kill()
                daemon.stop()
                daemon = serve(FEED, keys=folder, bind=bind)
        assert found.hexdigest() == whole
        assert connection.stats()["reconnects"] == 1
        batches = connection.batches()
        next(batches)
        daemon.process.kill()
        daemon.stop()
        (folder / "server/clients/alice.key").unlink()
        serve(FEED, keys=folder, bind=bind)
        with pytest.raises(KeyRefused, match="the daemon does not know the key"):
            list(batches)


def test_connections_that_break_or_freeze_are_noticed_at_both_ends_and_the_stream_goes_on(
    serve: Serve, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = serve(FEED, keys=folder, patched={"net.network_peer.PATIENCE": 5})
    monkeypatch.setattr(tcp_transport, "LOST_AFTER", 5.0)
    monkeypatch.setattr(tcp_transport, "PING_AFTER", 0.5)
    endpoint, _, feed = daemon.url.rpartition("/")
    with FaultProxy(int(endpoint.rpartition(":")[2])) as proxy:
        url = f"tcp://127.0.0.1:{proxy.port}/{feed}"
        with penstock.connect(url, keys=folder / "clients/alice", transport="tcp") as connection:
            whole = digest(connection)
            time.sleep(6)  # nothing is read, but both sides hear from each other
            found = hashlib.sha256()
            for number, batch in enumerate(connection.batches()):
                found.update(batch.tobytes())
                if number == 20:
                    assert connection.stats()["reconnects"] == 0
                    proxy.cut()
                elif number == 40:
                    proxy.freeze()
            assert found.hexdigest() == whole
            assert connection.stats()["reconnects"] == 2
            until(lambda: daemon.stderr().count("with the key alice is gone") == 2)


def test_a_forked_child_holds_no_encrypted_connection_and_a_closed_one_leaves_at_once(
    serve: Serve, folder: Path
) -> None:
    daemon = serve(FEED, keys=folder)
    port = int(daemon.url.rpartition("/")[0].rpartition(":")[2])

    def connections(pid: int) -> int:
        found = psutil.Process(pid).net_connections("tcp")
        return sum(1 for one in found if one.raddr and one.raddr.port == port)

    with penstock.connect(daemon.url, keys=folder / "clients/alice", transport="tcp") as connection:
        next(connection.batches())
        assert connections(os.getpid()) == 1
        child = os.fork()
        if child == 0:
            os._exit(connections(os.getpid()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        began = time.monotonic()
    assert time.monotonic() - began < 5
    until(lambda: "with the key alice is gone" in daemon.stderr())
    assert control.status(daemon.url, 60, client_keys(folder / "clients/alice")).streams == []


def test_what_a_member_of_a_group_was_handed_before_it_left_is_given_to_nobody_else(serve: Serve, folder: Path) -> None:
    daemon = serve(FEED.replace("range(4)", "range(20)"), keys=folder)

    def member() -> penstock.Connection:
        return penstock.connect(daemon.url, keys=folder / "clients/alice", transport="tcp", group="team")

    seen = []
    with member() as stays:
        rest = stays.batches()
        seen.append(int(next(rest).flat[0]))
        for _ in range(30):
            with member() as leaves:  # while slabs are under way to it
                batches = leaves.batches()
                seen += [int(next(batches).flat[0]) for _ in range(5)]
        seen += [int(batch.flat[0]) for batch in rest]
    assert sorted(seen) == list(range(400))


# --- users of this host ---

READ_AND_STOP = """
import encodings.idna, json, os, sys
import penstock
from penstock_server.to_daemon import control
from penstock_server import coordinator
os.setuid(65534)
with penstock.connect(sys.argv[1], transport="auto") as connection:
    print(connection.stats()["transport"], sum(1 for _ in connection.batches()), flush=True)
    try:
        control.stop(sys.argv[1], now=True, timeout=3, still_waiting=print)
    except penstock.PenstockError as error:
        print(error)
    try:
        state = control.status(sys.argv[1], 10)
        print(control.stacks(sys.argv[1], state, 10))
    except penstock.PenstockError as error:
        print(error)
"""


def test_an_allowed_user_of_this_host_shares_memory_and_may_not_stop_or_profile_the_daemon(serve: Serve) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    for allowed, transport in ((True, "local"), (False, "tcp")):
        daemon = serve(FEED, **({"allow_uid": 65534} if allowed else {}))
        said = subprocess.run(
            [sys.executable, "-c", READ_AND_STOP, daemon.url], capture_output=True, text=True, timeout=60
        )
        assert said.stdout.startswith(f"{transport} 80\n"), said
        assert daemon.process.poll() is None
        wanted = "only the daemon's own user and root may stop" if allowed else "it belongs to another user"
        assert said.stdout.count(wanted) == 2, said.stdout
