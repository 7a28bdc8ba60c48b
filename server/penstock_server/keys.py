"""The keys of a daemon: its own, and those of the clients that it admits. (keygen.py makes them.)

A folder DIR of keys holds:

- `server/`, for the daemon and only for it: `server.key_secret`, and `clients/NAME.key`, the public key of each client
  that may connect. The file's name is the client's.
- `clients/NAME/`, for this client, to copy to its host: `client.key_secret`, and `server.key`, the daemon's public key.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from penstock_proto import StartError
from penstock_proto.keys import SECRET as CLIENT_SECRET
from penstock_proto.keys import KeyPair, read_pair, read_public, require_zmq

SECRET = "server.key_secret"
"""The daemon's own keys, in its folder."""
SUFFIX = ".key"
"""The end of the names of clients' public keys."""


class ClientKey(NamedTuple):
    """The key of a client that is connected: its public part, in Z85, and its name."""

    public: bytes
    name: str


class ServerKeys(NamedTuple):
    """What a daemon needs.

    Attributes:
        folder: the daemon's folder.
        own: the daemon's keys.
        clients: the names of the clients that may connect, by public key.
    """

    folder: Path
    own: KeyPair
    clients: Mapping[bytes, str]


def server_keys(folder: str) -> ServerKeys:
    """Read a daemon's keys from its folder, or from the folder that `penstock keygen` made, which holds it.

    Raises:
        StartError: it is not such a folder, a file is damaged, others can read the secret key or add clients, or pyzmq
            is missing.
    """
    require_zmq("--keys")
    path = Path(folder).expanduser()
    if (path / "server").is_dir():
        path /= "server"
    if not (path / SECRET).exists():
        raise StartError(f"--keys {folder}: {_not_a_server(path)}")
    return ServerKeys(path, read_pair(path / SECRET), admitted(path))


def admitted(folder: Path) -> Mapping[bytes, str]:
    """Read which clients a daemon admits: their names by public key.

    Raises:
        StartError: a file is damaged or there twice, or others can add clients.
    """
    found: dict[bytes, str] = {}
    clients = folder / "clients"
    for place in (folder, clients):
        if not place.exists() or os.statvfs(place).f_flag & os.ST_RDONLY:  # as where Kubernetes mounts a secret
            continue
        if place.stat().st_mode & stat.S_IWOTH:
            raise StartError(f"every user of this host can change {place}, and so admit clients: chmod 700 {place}")
    for file in sorted(clients.glob(f"*{SUFFIX}")):
        public, name = read_public(file), file.name.removesuffix(SUFFIX)
        if public in found:
            raise StartError(f"{file} and {clients / found[public]}{SUFFIX} are the same key: remove one of them")
        found[public] = name
    return found


def _not_a_server(path: Path) -> str:
    """Say why a folder is not a daemon's, and what the user may have meant."""
    if not path.is_dir():
        return f"there is no folder {path}. To make keys: penstock keygen {path}"
    if (path / CLIENT_SECRET).exists():
        return f"{path} is a client's folder: give the daemon's, which `penstock keygen` made beside it"
    return f"{path} has no {SECRET}. To make keys: penstock keygen {path}"
