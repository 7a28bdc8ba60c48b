"""The files of keys: a client's folder, and the reading and checking of any key file.

A client's folder holds `client.key_secret`, its own two keys, and `server.key`, by which it recognizes the daemon. The
files are ZeroMQ certificates (Z85 text), which libzmq's other tools read too. The server's folder is read by
penstock_server/keys.py, and penstock_server/keygen.py makes all of them. Encryption itself is libzmq's (see libzmq.py).
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from .errors import StartError

SECRET = "client.key_secret"
"""A client's own keys, in its folder."""
SERVER = "server.key"
"""The daemon's public key, in a client's folder."""
VARIABLE = "PENSTOCK_KEYS"
"""The environment variable that names a client's folder."""


class KeyPair(NamedTuple):
    """A public key and its secret key, in Z85."""

    public: bytes
    secret: bytes


class ClientKeys(NamedTuple):
    """What a client needs to connect.

    Attributes:
        folder: where the keys are.
        own: the client's keys.
        server: the daemon's public key, in Z85.
    """

    folder: Path
    own: KeyPair
    server: bytes


def client_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read a client's keys from `folder`; None: from the folder in PENSTOCK_KEYS. Return None if that is not set.

    Raises:
        StartError: the folder is not a client's, a file is damaged, others can read the secret key, or pyzmq is
            missing.
    """
    source = f"keys={os.fspath(folder)!r}" if folder is not None else VARIABLE
    found = os.environ.get(VARIABLE) if folder is None else os.fspath(folder)
    if not found:
        if folder is not None:
            raise StartError("keys='': give the client's folder that `penstock keygen` made")
        return None
    path = Path(found).expanduser()
    require_zmq(source)
    if not (path / SECRET).exists():
        raise StartError(f"{source}: {_not_a_client(path)}")
    return ClientKeys(path, read_pair(path / SECRET), read_public(path / SERVER))


def needs_key(daemon: str) -> str:
    """Return what a client without keys is told that meets a daemon with keys."""
    return (
        f"{daemon} admits only clients with keys: give keys= (on the command line --keys) or set {VARIABLE}, each the "
        "folder of a client that `penstock keygen` made"
    )


def require_zmq(source: str) -> None:
    """Check that pyzmq is there and can encrypt.

    Raises:
        StartError: names `source`, which needs it, and the package to install.
    """
    try:
        import zmq
    except ImportError:
        raise StartError(f"{source} needs pyzmq for encryption: pip install 'penstock[keys]'") from None
    if not zmq.has("curve"):
        raise StartError(
            f"{source}: this pyzmq was built without CURVE encryption: pip install --force-reinstall pyzmq"
        )


def read_pair(path: Path) -> KeyPair:
    """Read a file with a public and a secret key.

    Raises:
        StartError: it cannot be read or is damaged, or others can read it.
    """
    import zmq

    public, secret = _read(path)
    mode = path.stat().st_mode
    if mode & (stat.S_IRWXO | stat.S_IWGRP):
        raise StartError(
            f"{path} holds a secret key, and other users can read or change it (mode {stat.S_IMODE(mode):o}): "
            f"chmod 600 {path}. If they may have read it, make other keys"
        )
    if secret is None:
        raise StartError(f"{path} has no secret key: it must be the file that `penstock keygen` made")
    try:
        matches = zmq.curve_public(secret) == public
    except zmq.ZMQError:
        matches = False
    if not matches:
        raise StartError(f"{path} is damaged: its public key does not belong to its secret key")
    return KeyPair(public, secret)


def read_public(path: Path) -> bytes:
    """Read the public key in a file.

    Raises:
        StartError: it cannot be read or is damaged.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[bytes, bytes | None]:
    import zmq.auth
    from zmq.utils import z85

    try:
        public, secret = zmq.auth.load_certificate(path)
        if len(z85.decode(public)) != 32:
            raise ValueError
    except OSError as error:
        raise StartError(f"cannot read the key {path}: {error.strerror or 'there is no such file'}") from None
    except (ValueError, KeyError, struct.error):  # the last two: it is not Z85
        raise StartError(f"{path} is not a key file, or is damaged") from None
    return public, secret


def _not_a_client(path: Path) -> str:
    """Say why a folder is not a client's, and what the user may have meant."""
    if not path.is_dir():
        return f"there is no folder {path}"
    inside = sorted(one.parent for one in path.glob(f"clients/*/{SECRET}"))
    if inside:
        return f"{path} has the keys of several programs: give one client's folder, such as {inside[0]}"
    if (path / "server.key_secret").exists():
        return f"{path} is the daemon's folder: give a client's, which `penstock keygen` made beside it"
    return f"{path} is not a client's folder: it has no {SECRET}"
