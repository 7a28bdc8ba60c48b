"""The keys of a daemon: its own, and those of the clients and hosts that it admits. (keygen.py makes them.)

A folder DIR of keys holds:

- `server/`, only for the daemon: `server.key_secret`, and the public keys of the clients that may connect,
  `clients/NAME.key`, and of the hosts that may join, `hosts/NAME.key`. NAME is the name of the client or host.
- `clients/NAME/`, to copy to this client's host: `client.key_secret`, and `server.key`, the daemon's public key.
- `hosts/NAME/`, to copy to this host: `host.key_secret`, and `server.key`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock_proto import KeyRefused, StartError
from penstock_proto.keys import (
    KINDS,
    SERVER_SECRET,
    KeyPair,
    read_pair,
    read_public,
    readable,
    require_zmq,
    secret_name,
)

SUFFIX = ".key"
"""The suffix of the files of public keys."""


class ClientKey(NamedTuple):
    """The key of a peer that may connect.

    Attributes:
        public: its public half, in Z85.
        name: the name of the client or host.
        host: True for the key of a host, which may join but not read; False for a client's.
    """

    public: bytes
    name: str
    host: bool


class ServerKeys(NamedTuple):
    """The keys that a daemon uses.

    Attributes:
        folder: the daemon's folder.
        own: the daemon's keys.
        admitted: the keys of peers that may connect, by their public halves.
    """

    folder: Path
    own: KeyPair
    admitted: Mapping[bytes, ClientKey]


def server_keys(folder: str) -> ServerKeys:
    """Read a daemon's keys from its own folder, or from the folder that `penstock keygen` made, which contains it.

    Raises:
        StartError: `folder` is neither, a file is damaged, others can read the secret key or add keys, or pyzmq is
            missing.
    """
    require_zmq("--keys")
    path = Path(folder).expanduser()
    with readable():
        if (path / "server").is_dir():
            path /= "server"
        if not (path / SERVER_SECRET).exists():
            raise StartError(f"--keys {folder}: {_not_a_server(path)}")
    return ServerKeys(path, read_pair(path / SERVER_SECRET), admitted(path))


def admitted(folder: Path) -> Mapping[bytes, ClientKey]:
    """Read the keys of the clients and hosts that a daemon admits. Return them by their public halves.

    Raises:
        StartError: a file cannot be read or is damaged, a key or a name occurs twice, or others can add keys.
    """
    found: dict[bytes, ClientKey] = {}
    files: dict[bytes | str, Path] = {}
    with readable():
        _only_ours(folder)
        for kind in KINDS:
            place = folder / f"{kind}s"
            _only_ours(place)
            for file in _key_files(place):
                key = ClientKey(read_public(file), file.name.removesuffix(SUFFIX), kind == "host")
                for what, value in (("are the same key", key.public), ("have the same name", key.name)):
                    if (other := files.setdefault(value, file)) != file:
                        raise StartError(f"{file} and {other} {what}: remove one of them")
                found[key.public] = key
    return found


def revoked(key: ClientKey, now: Mapping[bytes, ClientKey]) -> bool:
    """Return whether a key that was admitted no longer is, or changed between client and host."""
    found = now.get(key.public)
    return found is None or found.host != key.host


def may_read(key: ClientKey | None) -> None:
    """Check that a peer with this key may read feeds. (None: there are no keys.)

    Raises:
        KeyRefused: it is a host's key.
    """
    if key is not None and key.host:
        raise KeyRefused(
            f"{key.name} is the key of a host, which is for `penstock join` only: use a client's "
            "(`penstock keygen DIR --client NAME` on the daemon's host makes one)"
        )


def may_join(key: ClientKey | None, keys_on: bool) -> None:
    """Check that a peer with this key may join as a host with workers.

    Args:
        key: the peer's key; None without keys, or if its connection has ended.
        keys_on: whether the daemon has keys. Without keys, every peer may join.

    Raises:
        KeyRefused: it is a client's key, or unknown.
    """
    if not keys_on or (key is not None and key.host):
        return
    whose = f"{key.name} is the key of a client" if key is not None else "this connection has no key"
    raise KeyRefused(
        f"{whose}, and `penstock join` needs a host's. On the daemon's host: penstock keygen DIR --host NAME, then "
        "kill -HUP PID. On the host that joins: penstock join ... --keys with its copy of DIR/hosts/NAME"
    )


def _only_ours(place: Path) -> None:
    """Refuse a folder to which every user of this host can add keys."""
    if not place.exists() or os.statvfs(place).f_flag & os.ST_RDONLY:  # such as a secret that Kubernetes mounts
        return
    if place.stat().st_mode & stat.S_IWOTH:
        raise StartError(f"every user of this host can change {place}, and so admit others: chmod 700 {place}")


def _key_files(place: Path) -> list[Path]:
    """Return the files of public keys in a folder, which need not exist."""
    # glob() would ignore a folder without permission to read
    return sorted(place / name for name in os.listdir(place) if name.endswith(SUFFIX)) if place.exists() else []


def _not_a_server(path: Path) -> str:
    """Return why a folder is not a daemon's, and what the user may have meant."""
    if not path.is_dir():
        return f"there is no folder {path}. To make keys: penstock keygen {path}"
    for kind in KINDS:
        if (path / secret_name(kind)).exists():
            return f"{path} is a {kind}'s folder: give the daemon's, which `penstock keygen` made beside it"
    return f"{path} has no {SERVER_SECRET}. To make keys: penstock keygen {path}"
