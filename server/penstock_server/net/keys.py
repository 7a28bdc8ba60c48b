"""The keys of a daemon: its own, and those of the clients and hosts that it admits. (keygen.py makes them.)

A folder DIR of keys holds:

- `server/`, only for the daemon: `server.key_secret`, and the public keys of the clients that may connect,
  `clients/NAME.key`, and of the hosts that may join, `hosts/NAME.key`. NAME is the name of the client or host.
- `clients/NAME/`, to copy to this client's host: `client.key_secret`, and `server.key`, the daemon's public key.
- `hosts/NAME/`, to copy to this host: `host.key_secret`, and `server.key`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from penstock_proto import KeyRefused, StartError
from penstock_proto.security.key_files import KeyPair, read_pair, read_public
from penstock_proto.security.keys import KINDS, SERVER_SECRET, readable, require_zmq, secret_name
from penstock_proto.security.only_ours import check_file, check_folder

SUFFIX = ".key"
"""The suffix of the files of public keys."""
MOST_KEYS = 10_000
"""Maximum number of files in a folder of keys of clients, or of hosts."""


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
        StartError: `folder` is neither, a file is damaged, others can read the secret key or change a file or folder,
            or pyzmq is missing.
    """
    require_zmq("--keys")
    path = Path(folder).expanduser()
    with readable():
        if (path / "server").is_dir():
            path /= "server"
        if not (path / SERVER_SECRET).exists():
            raise StartError(f"--keys {folder}: {_not_a_server(path)}")
    return ServerKeys(path, read_pair(path / SERVER_SECRET), admitted(path))


def admitted(folder: Path, before: Mapping[bytes, ClientKey] = MappingProxyType({})) -> Mapping[bytes, ClientKey]:
    """Read the keys of the clients and hosts that a daemon admits. Return them by their public halves.

    Args:
        folder: the daemon's folder.
        before: the keys that it has admitted so far.

    Raises:
        StartError: a file cannot be read or is damaged, a key or a name occurs twice, others can read the secret key or
            change a file or folder, there are too many keys, or the folder of keys that were admitted is missing.
    """
    found: dict[bytes, ClientKey] = {}
    files: dict[bytes | str, Path] = {}
    with readable():
        had = {"host" if key.host else "client" for key in before.values()}
        listed = {kind: _key_files(folder / f"{kind}s", required=kind in had) for kind in KINDS}
        check_file(folder / SERVER_SECRET, secret=True)
        for kind, its_files in listed.items():
            if its_files is not None:
                check_folder(folder / f"{kind}s")
            for file in its_files or ():
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


def _key_files(place: Path, required: bool) -> list[Path] | None:
    """Return the files of public keys in a folder; None if there is no folder and it is not `required`."""
    try:
        # glob() would ignore a folder without permission to read
        with os.scandir(place) as entries:
            names = (entry.name for entry in entries if entry.name.endswith(SUFFIX))
            found = list(itertools.islice(names, MOST_KEYS + 1))
    except FileNotFoundError:
        if required:
            raise StartError(
                f"there is no folder {place}, and it had keys before: to remove all keys, leave an empty folder"
            ) from None
        return None
    except NotADirectoryError:
        raise StartError(f"{place} is not a folder: it must contain the public keys, NAME{SUFFIX}") from None
    if len(found) > MOST_KEYS:
        raise StartError(f"{place} has more than {MOST_KEYS} keys: remove those that are no longer used")
    for name in found:
        if not name.isprintable():  # the log shows it
            raise StartError(f"{place}: the name {name!r} has characters that cannot be printed: rename the file")
    return sorted(place / name for name in found)


def _not_a_server(path: Path) -> str:
    """Return why a folder is not a daemon's, and what the user may have meant."""
    if not path.is_dir():
        return f"there is no folder {path}. To make keys: penstock keygen {path}"
    for kind in KINDS:
        if (path / secret_name(kind)).exists():
            return f"{path} is a {kind}'s folder: give the daemon's, which `penstock keygen` made beside it"
    return f"{path} has no {SERVER_SECRET}. To make keys: penstock keygen {path}"
