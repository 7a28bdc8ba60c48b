"""Only this user and root can change the keys, or everything above them; and `keygen` makes all files or none."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
from penstock_proto import StartError
from penstock_proto.security import key_files, only_ours
from penstock_proto.security.keys import client_keys, host_keys
from penstock_server.cli import keygen
from penstock_server.daemon.peer_keys import PeerKeys
from penstock_server.net import keys
from tests.conftest import Serve, wait_until

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")

FEED = """
    import numpy as np
    from penstock_server import Feed

    feed = Feed(lambda: iter(np.arange(8)), batch_size=2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of a daemon, a client and a host."""
    keygen.generate(tmp_path / "above" / "keys", ["alice"], ["box"])
    return tmp_path / "above" / "keys"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A client's folder of keys that every user can reach, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        keygen.generate(Path(place) / "keys", ["alice"])
        for path in (Path(place) / "keys", Path(place) / "keys/clients", Path(place) / "keys/clients/alice"):
            path.chmod(0o755)
        yield Path(place) / "keys/clients/alice"


def everything(folder: Path) -> dict[str, Callable[[], object]]:
    """Return how a daemon starts, a daemon reads again at SIGHUP, a client connects and a host joins."""
    server = folder / "server"
    before = keys.server_keys(str(folder)).admitted
    return {
        "start": lambda: PeerKeys("tcp://0.0.0.0:5555", str(folder)),
        "again": lambda: keys.admitted(server, before),
        "client": lambda: client_keys(folder / "clients/alice"),
        "host": lambda: host_keys(folder / "hosts/box"),
    }


DAEMON, ALL = ("start", "again"), ("start", "again", "client", "host")
PLACES = {
    "server/clients/alice.key": DAEMON,
    "server/hosts/box.key": DAEMON,
    "server/clients": DAEMON,
    "server/hosts": DAEMON,
    "server/server.key_secret": DAEMON,
    "server": DAEMON,
    "clients/alice/client.key_secret": ("client",),
    "clients/alice/server.key": ("client",),
    "clients/alice": ("client",),
    "clients": ("client",),
    "hosts/box/host.key_secret": ("host",),
    "hosts/box/server.key": ("host",),
    "hosts/box": ("host",),
    ".": ALL,
    "..": ALL,
}


@pytest.mark.parametrize("place", PLACES)
def test_keys_and_folders_that_others_can_change_are_refused_wherever_they_are_read(folder: Path, place: str) -> None:
    reads, path = everything(folder), folder / place
    mode, real = path.stat().st_mode & 0o777, path.resolve()
    for others in (0o002, 0o020):
        path.chmod(mode | others)
        for name, read in reads.items():
            if name in PLACES[place]:
                with pytest.raises(StartError, match=rf"can change {real}[ ,]|^{real} holds a secret key"):
                    read()
            else:
                read()
    path.chmod(mode)
    for read in reads.values():
        read()


@as_root
@pytest.mark.parametrize("place", PLACES)
def test_keys_and_folders_of_another_user_are_refused_wherever_they_are_read(folder: Path, place: str) -> None:
    reads, path = everything(folder), folder / place
    os.chown(path, NOBODY, 0)
    for name in PLACES[place]:
        with pytest.raises(StartError, match=rf"^{path.resolve()} belongs to the user nobody, who can change it: "):
            reads[name]()


def read_as(user: int, folder: Path, before: str = "") -> str:
    """Return the public key that a process of another user reads as a client, or the error."""
    reader = f"""
import ctypes, encodings.idna, grp, os, pwd
import zmq.auth, zmq.utils.z85
from penstock_proto.security.keys import client_keys
os.setgid({user})
os.setuid({user})
{before}
try:
    print(client_keys({str(folder)!r}).own.public.decode())
except Exception as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", reader], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@as_root
def test_another_user_may_use_keys_that_belong_to_root_and_that_its_group_may_read(open_folder: Path) -> None:
    own = client_keys(open_folder)
    assert own is not None
    for file in open_folder.iterdir():
        os.chown(file, 0, NOBODY)
    assert "cannot read the key" in read_as(NOBODY, open_folder)
    for file in open_folder.iterdir():
        file.chmod(0o440)  # as Kubernetes mounts a secret with fsGroup
    assert read_as(NOBODY, open_folder) == own.own.public.decode() + "\n"
    (open_folder / "client.key_secret").chmod(0o444)
    assert "other users can read or change it (mode 444)" in read_as(NOBODY, open_folder)


def test_a_symbolic_link_is_as_safe_as_its_folder_and_its_target(folder: Path, tmp_path: Path) -> None:
    """As Kubernetes mounts a secret: each name is a link to ..data/NAME, and ..data is a link too."""
    clients, real = folder / "server/clients", tmp_path / "real"
    real.mkdir(0o700)
    (clients / "alice.key").rename(real / "alice.key")
    (clients / "..data").symlink_to(os.path.relpath(real, clients))
    (clients / "alice.key").symlink_to("..data/alice.key")
    (tmp_path / "links").mkdir(0o700)
    (tmp_path / "links/keys").symlink_to(folder)
    linked = tmp_path / "links/keys"
    reads = everything(linked)
    for name in ALL:
        reads[name]()
    real.chmod(0o777)
    for name in DAEMON:
        with pytest.raises(StartError, match=f"can change {real} .*, and so replace {linked}/server/clients/alice.key"):
            reads[name]()
    real.chmod(0o700)
    (tmp_path / "links").chmod(0o770)
    for name in ALL:
        with pytest.raises(StartError, match=f"the group .* can change {tmp_path}/links .*chmod go-w {tmp_path}/links"):
            reads[name]()
    (tmp_path / "links").chmod(0o700)
    if os.geteuid() == 0:
        os.chown(clients / "..data", NOBODY, NOBODY, follow_symlinks=False)
        with pytest.raises(StartError, match=rf"{clients}/..data belongs to the user nobody"):
            reads["start"]()
    (clients / "..data").unlink()
    (clients / "..data").symlink_to("..data")
    with pytest.raises(StartError, match=r"cannot read the key .*alice.key: Too many levels of symbolic links"):
        reads["again"]()


def test_folders_above_may_have_the_sticky_bit_and_a_list_of_keys_may_not(folder: Path) -> None:
    """In a sticky folder, such as /tmp, others can add files but not replace ours."""
    reads = everything(folder)
    for above in (folder.parent, folder, folder / "server"):
        above.chmod(0o1777)
    for read in reads.values():
        read()
    (folder / "server/clients").chmod(0o1777)
    for name in DAEMON:
        with pytest.raises(StartError, match=r"every user of this host can change .*clients, and so admit others"):
            reads[name]()


@as_root
def test_a_list_of_keys_may_be_the_mount_point_of_a_secret_which_nobody_can_write_to(folder: Path) -> None:
    clients, reads = folder / "server/clients", everything(folder)
    content = (clients / "alice.key").read_bytes()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=3777", "tmpfs", clients], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        (clients / "alice.key").write_bytes(content)
        (clients / "alice.key").chmod(0o440)
        with pytest.raises(StartError, match="and so admit others"):
            reads["start"]()
        subprocess.run(["mount", "-o", "remount,ro", clients], check=True)
        for name in DAEMON:
            reads[name]()
    finally:
        subprocess.run(["umount", "-l", clients], check=True)


def test_the_private_group_of_a_user_may_write_and_no_other_group(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {1000: ("ada", 1000), 1001: ("bob", 100), 0: ("root", 0)}
    groups = {1000: ("ada", []), 100: ("users", []), 0: ("root", [])}
    monkeypatch.setattr(
        pwd, "getpwuid", lambda uid: pwd.struct_passwd((users[uid][0], "x", uid, users[uid][1], "", "/", "/"))
    )
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((groups[gid][0], "x", gid, groups[gid][1])))
    assert only_ours.is_private_group(1000, 1000)
    assert not only_ours.is_private_group(1000, 1001), "another user's"
    assert not only_ours.is_private_group(100, 1001), "of all users"
    assert not only_ours.is_private_group(0, 0), "root has none"
    assert not only_ours.is_private_group(7, 1000), "unknown"
    groups[1000] = ("ada", ["eve"])
    assert not only_ours.is_private_group(1000, 1000)


@as_root
def test_in_a_user_namespace_without_root_the_folders_above_may_belong_to_nobody(open_folder: Path) -> None:
    """Apptainer makes such a namespace: there the kernel shows root's folders as those of nobody."""
    own = client_keys(open_folder)
    assert own is not None
    enter = """
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: otherwise the files below /proc/self belong to root
if ctypes.CDLL(None).unshare(0x10000000) != 0:  # CLONE_NEWUSER
    print("refused")
    raise SystemExit
with open("/proc/self/uid_map", "w") as file:
    file.write("1234 1234 1")
assert os.stat("/").st_uid == 65534
"""
    for path in (open_folder, *open_folder.iterdir()):
        os.chown(path, 1234, 1234)
    if (read := read_as(1234, open_folder, enter)) == "refused\n":
        pytest.skip("cannot make a user namespace here")
    assert read == own.own.public.decode() + "\n"
    os.chown(open_folder / "server.key", 0, 1234)
    (open_folder / "server.key").chmod(0o440)
    assert f"{open_folder}/server.key belongs to the user nobody" in read_as(1234, open_folder, enter)


# --- what is no key file ---


def test_pipes_devices_and_large_files_are_refused_at_once(folder: Path) -> None:
    place = folder / "server/clients/more.key"
    os.mkfifo(place, 0o600)
    with pytest.raises(StartError, match=r"more.key is not a regular file"):
        keys.admitted(folder / "server")
    place.unlink()
    place.symlink_to("/dev/zero")
    with pytest.raises(StartError, match=r"every user of this host can change .*more.key|not a regular file"):
        keys.admitted(folder / "server")
    place.unlink()
    content = (folder / "clients/alice/server.key").read_bytes()
    place.touch(0o600)
    place.write_bytes(content.ljust(key_files.MOST_NBYTES, b"\n"))
    assert {key.name for key in keys.admitted(folder / "server").values()} == {"alice", "box", "more"}
    place.write_bytes(content.ljust(key_files.MOST_NBYTES + 1, b"\n"))
    with pytest.raises(StartError, match=r"more.key has more than 65536 bytes, so it is not a key file"):
        keys.admitted(folder / "server")


def test_the_number_of_keys_has_a_bound_and_their_names_can_be_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keygen.generate(folder, ["bob"])
    monkeypatch.setattr(keys, "MOST_KEYS", 2)
    assert len(keys.admitted(folder / "server")) == 3
    keygen.generate(folder, ["carol"])
    with pytest.raises(StartError, match="clients has more than 2 keys: remove those"):
        keys.admitted(folder / "server")
    (folder / "server/clients/carol.key").rename(folder / "server/hosts/\x1b[2J.key")
    with pytest.raises(StartError, match=r"the name '\\x1b\[2J.key' has characters that cannot be printed"):
        keys.admitted(folder / "server")


# --- SIGHUP ---


def test_sighup_keeps_the_previous_list_while_a_folder_is_missing_or_others_can_change_it(
    serve: Serve, folder: Path
) -> None:
    daemon, clients = serve(FEED, keys=folder), folder / "server/clients"

    def hang_up(said: str) -> None:
        seen = daemon.stderr().count(said)
        daemon.process.send_signal(signal.SIGHUP)
        wait_until(lambda: daemon.stderr().count(said) > seen)
        with penstock.connect(daemon.url, keys=folder / "clients/alice", transport="tcp", timeout=60) as alice:
            assert next(alice.batches()).tolist() == [0, 1]

    away = clients.rename(clients.with_name("away"))
    hang_up(f"there is no folder {clients}, and it had keys before: to remove all keys, leave an empty folder")
    away.rename(clients)
    (clients / "alice.key").chmod(0o666)
    hang_up(f"every user of this host can change {clients}/alice.key")
    (clients / "alice.key").chmod(0o600)
    (folder / "server/server.key_secret").chmod(0o644)
    hang_up("server.key_secret holds a secret key, and other users can read or change it")
    (folder / "server/server.key_secret").rename(folder / "server/away")
    hang_up(f"cannot read the keys in {folder}/server/server.key_secret: No such file")
    (folder / "server/away").rename(folder / "server/server.key_secret")
    (folder / "server/server.key_secret").chmod(0o600)
    hang_up("read the keys again: alice may connect; hosts: box may join")


def test_a_folder_without_keys_counts_and_a_missing_one_counts_only_if_it_had_none(folder: Path) -> None:
    server = folder / "server"
    before = keys.admitted(server)
    (server / "hosts/box.key").unlink()
    without = keys.admitted(server, before)
    assert {key.name for key in without.values()} == {"alice"}
    (server / "hosts").rmdir()
    assert keys.admitted(server, without) == without
    with pytest.raises(StartError, match=r"there is no folder .*hosts, and it had keys before"):
        keys.admitted(server, before)
    (server / "hosts").touch()
    with pytest.raises(StartError, match="hosts is not a folder"):
        keys.admitted(server, without)


# --- keygen ---


@pytest.mark.parametrize("written", range(5))
def test_keygen_leaves_nothing_of_its_own_if_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    real, left = os.fsync, [written]

    def fsync(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    def all_files(folder: Path) -> set[Path]:
        return {*folder.rglob("*")}

    (tmp_path / "mine").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StartError, match=r"cannot write keys below .*: No space left on device \(.*key"):
        keygen.generate(tmp_path / "mine" / "deep" / "keys", ["alice", "bob"])
    assert all_files(tmp_path) == {tmp_path / "mine"}

    left[0] = 99
    keygen.generate(tmp_path / "keys")
    before = all_files(tmp_path)
    left[0] = written
    with pytest.raises(StartError, match="No space left on device"):
        keygen.generate(tmp_path / "keys", ["alice"], ["box"])
    assert all_files(tmp_path) == before
    left[0] = 99
    keygen.generate(tmp_path / "keys", ["alice"], ["box"])


def test_keygen_leaves_nothing_if_a_file_may_not_be_as_large_as_a_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock_server", "keygen", "keys"]
    limit = (150, 150)  # bytes: enough for a public key
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 1
    assert "cannot write keys below keys: File too large (keys/server/server.key_secret)" in done.stderr
    assert [*tmp_path.iterdir()] == []
