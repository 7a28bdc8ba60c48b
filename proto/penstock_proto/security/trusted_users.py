"""Which users of this machine may hand batches to this process: its own user, root, and one that the user names."""

from __future__ import annotations

import os
import socket

from ..errors import StartError, Unreachable
from . import socket_owner

VARIABLE = "PENSTOCK_DAEMON_USER"


def users(daemon_user: str | int | None) -> frozenset[int]:
    """Return the uids of the users whose daemons and hosts this process trusts.

    Args:
        daemon_user: another user, as a name or uid. None: the one in the environment variable, if that is set.

    Raises:
        StartError: there is no such user.
    """
    own = {0, os.geteuid()} if hasattr(os, "geteuid") else {0}
    named = os.environ.get(VARIABLE) or None if daemon_user is None else daemon_user
    return frozenset(own if named is None else own | {_uid(named)})


def check_peer(connection: socket.socket, endpoint: str, trusted: frozenset[int]) -> None:
    """Refuse a peer that another user of this machine runs. A peer on another machine passes.

    Call it when the peer has sent something, so that it has accepted the connection.

    Raises:
        Unreachable: says who it is, and how to trust that user.
        ConnectionResetError: the peer has closed the connection.
    """
    uid = socket_owner.owner(connection)
    if uid is not None and uid not in trusted:
        raise Unreachable(
            f"user {shown(uid)} listens at {endpoint}, which this process does not trust to send batches: it trusts "
            f"its own user and root. If that user runs your daemon, give daemon_user={uid} or set {VARIABLE}={uid}; "
            "or use keys"
        )


def shown(uid: int) -> str:
    """Return a uid with its user's name, if it has one."""
    try:
        import pwd

        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except (ImportError, KeyError):
        return str(uid)


def _uid(user: str | int) -> int:
    if isinstance(user, int) or user.isdecimal():
        uid = int(user)
        if not 0 <= uid < 2**32 - 1:
            raise StartError(f"daemon_user={user!r}: a user's id is a number from 0 to {2**32 - 2}")
        return uid
    try:
        import pwd

        return pwd.getpwnam(user).pw_uid
    except (ImportError, KeyError, ValueError):
        raise StartError(
            f"daemon_user={user!r:.60} (or {VARIABLE}): this machine has no such user; give its name or uid"
        ) from None
