"""Abstract unix addresses, `penstock-UID-RANDOM`. UID is the user who listens.

Anybody can read such names in /proc/net/unix, and listen at a name that nobody uses: on another machine, or when the
daemon is gone. So a client asks the kernel who listens, and talks only to the user in the name. Without keys it does
not know who told it the name, so it also requires that this is a user whom it trusts anyway.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
from collections.abc import Collection

PATTERN = r"penstock-([0-9]{1,10})-[0-9a-f]{32}"

_NAME = re.compile(PATTERN)


def unused() -> str:
    """Return an address to listen at."""
    return f"penstock-{os.geteuid()}-{secrets.token_hex(16)}"


def connect(connection: socket.socket, name: str, users: Collection[int] | None) -> None:
    """Connect to an address.

    Args:
        connection: a unix socket that is not connected.
        name: the address.
        users: who may listen there; None: the user in the name, which a peer with a known key has told.

    Raises:
        OSError: nobody listens there, the listener is not the user in the name or not one of `users`, or `name` is not
            such an address.
    """
    said = _NAME.fullmatch(name)
    if said is None:
        raise OSError(f"{name!r} is not the address of a daemon")
    connection.connect("\0" + name)
    uid = user(connection)
    if uid != int(said[1]) or (users is not None and uid not in users):
        raise PermissionError(f"user {uid} listens at {name}")


def user(connection: socket.socket) -> int:
    """Return the uid of the user at the other end, which connected or listens."""
    return _credentials(connection)[1] & 0xFFFFFFFF


def process(connection: socket.socket) -> int:
    """Return the pid of the process at the other end, when it connected; 0 if it is not in this pid namespace."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid
