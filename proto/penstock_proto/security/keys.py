"""The folder of keys of a client or a joined host.

A client's folder holds `client.key_secret`, its own two keys, and `server.key`, by which it recognizes the daemon. A
host's folder has `host.key_secret` instead. key_files.py reads each file. penstock_server/net/keys.py reads the
server's folder, and penstock_server/cli/keygen.py makes all folders. libzmq does the encryption (see libzmq.py).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from .. import distribution
from ..errors import StartError
from .key_files import KeyPair, read_pair, read_public

Kind: TypeAlias = Literal["client", "host"]
"""Whose a key is: a client's, which reads feeds, or a host's, which joins with workers (`penstock join`)."""
KINDS: tuple[Kind, ...] = get_args(Kind)
SERVER = "server.key"
"""The daemon's public key, in the folder of a client or host."""
SERVER_SECRET = "server.key_secret"
"""The daemon's own keys, in its folder."""
VARIABLE = "PENSTOCK_KEYS"
"""The environment variable that names the folder of a client or host."""


class ClientKeys(NamedTuple):
    """The keys that a client or a host needs to connect.

    Attributes:
        folder: where the keys are.
        own: its own keys.
        server: the daemon's public key, in Z85.
        kind: whose they are.
    """

    folder: Path
    own: KeyPair
    server: bytes
    kind: Kind

    @property
    def secret_file(self) -> Path:
        """The file of its own keys."""
        return self.folder / secret_name(self.kind)


def client_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read a client's keys from `folder`, or if that is None from the folder in PENSTOCK_KEYS. Return None without
    either.

    Raises:
        StartError: the folder is not a client's, a file is damaged, others can read the secret key or change a file,
            or pyzmq is missing.
    """
    return _keys("client", "keys={!r}", folder)


def host_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read a host's keys for `penstock join --keys`, as `client_keys` reads a client's.

    Raises:
        StartError: as `client_keys`, for a host's folder.
    """
    return _keys("host", "--keys {}", folder)


def any_keys(folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read the keys of a client or a host, for `penstock status`, which both may use.

    Raises:
        StartError: as `client_keys`.
    """
    found = os.environ.get(VARIABLE) if folder is None else os.fspath(folder)
    with readable():
        is_host = bool(found) and (Path(found or "").expanduser() / secret_name("host")).exists()
    return host_keys(folder) if is_host else client_keys(folder)


def secret_name(kind: Kind) -> str:
    """Return the name of the file with its own keys in the folder of a client or host."""
    return f"{kind}.key_secret"


def needs_key(daemon: str) -> str:
    """Return the error text for a client or host without keys that connects to a daemon with keys."""
    return (
        f"{daemon} admits only clients with keys: give keys= (on the command line --keys) or set {VARIABLE}, each the "
        "folder of a client (for `penstock join`: of a host) that `penstock keygen` made"
    )


def require_zmq(source: str) -> None:
    """Check that pyzmq is installed and can encrypt.

    Raises:
        StartError: it is not. The text names `source`, which needs it, and the package to install.
    """
    try:
        import zmq
    except ImportError:
        raise StartError(f"{source} needs pyzmq for encryption: {distribution.pip_install('keys')}") from None
    if not zmq.has("curve"):
        raise StartError(
            f"{source}: this pyzmq was built without CURVE encryption: pip install --force-reinstall pyzmq"
        )


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn an OSError for a folder of keys into a StartError that says what to do."""
    try:
        yield
    except OSError as error:
        owner = ". They must belong to the user who runs this" if isinstance(error, PermissionError) else ""
        raise StartError(f"cannot read the keys in {error.filename}: {error.strerror}{owner}") from None


def _keys(kind: Kind, argument: str, folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """Read the keys of a client or a host. `argument` is how the user gives the folder."""
    source = VARIABLE if folder is None else argument.format(os.fspath(folder))
    found = os.environ.get(VARIABLE) if folder is None else os.fspath(folder)
    if not found:
        if folder is not None:
            raise StartError(f"{argument.format('')}: give the {kind}'s folder that `penstock keygen` made")
        return None
    path = Path(found).expanduser()
    require_zmq(source)
    with readable():
        if not (path / secret_name(kind)).exists():
            raise StartError(f"{source}: {_not_the_folder(path, kind)}")
        return ClientKeys(path, read_pair(path / secret_name(kind)), read_public(path / SERVER), kind)


def _not_the_folder(path: Path, kind: Kind) -> str:
    """Say why a folder is not one of this kind, and what the user may have meant."""
    if not path.is_dir():
        return f"there is no folder {path}"
    name = secret_name(kind)
    for pattern in (f"{kind}s/*/{name}", f"*/{name}"):
        inside = sorted(one.parent for one in path.glob(pattern))
        if inside:
            return f"{path} has the keys of several programs: give one {kind}'s folder, such as {inside[0]}"
    if kind == "client" and (path / secret_name("host")).exists():
        return f"{path} is a host's folder, which is for `penstock join` only: give a client's"
    if kind == "host" and (path / secret_name("client")).exists():
        make = "on the daemon's host `penstock keygen DIR --host NAME` makes one"
        return f"{path} is a client's folder, and `penstock join` needs a host's: {make}"
    if (path / SERVER_SECRET).exists():
        return f"{path} is the daemon's folder: give a {kind}'s, which `penstock keygen` made beside it"
    if (path / "server" / SERVER_SECRET).exists():
        return f"{path} has no {kind}'s keys. To make some: penstock keygen {path} --{kind} NAME"
    return f"{path} is not a {kind}'s folder: it has no {name}"
