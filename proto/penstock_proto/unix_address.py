"""Abstract unix addresses, `penstock-UID-RANDOM`. UID is the user who listens.

Anybody can read such names in /proc/net/unix, and listen at a name that nobody uses: on another machine, or when the
daemon is gone. A client learns the name from the daemon, which it knows by its address or key. So it asks the kernel
who listens, and talks only to the user in the name.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct

PATTERN = r"penstock-([0-9]{1,10})-[0-9a-f]{32}"

_NAME = re.compile(PATTERN)


def unused() -> str:
    """Return an address to listen at."""
    return f"penstock-{os.geteuid()}-{secrets.token_hex(16)}"


def connect(connection: socket.socket, name: str) -> None:
    """Connect to an address.

    Raises:
        OSError: nobody listens there, the listener is not the user in the name, or `name` is not such an address.
    """
    said = _NAME.fullmatch(name)
    if said is None:
        raise OSError(f"{name!r} is not the address of a daemon")
    connection.connect("\0" + name)
    uid = user(connection)
    if uid != int(said[1]):
        raise PermissionError(f"user {uid} listens at {name}")


def user(connection: socket.socket) -> int:
    """Return the uid of the user at the other end, which connected or listens."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid) & 0xFFFFFFFF
