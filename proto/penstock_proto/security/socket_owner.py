"""Finds out which user of this machine holds the other end of a TCP connection.

Any user can listen at a port that nobody uses, for example when a daemon is gone. The kernel lists the sockets of this
machine with their users in /proc/net/tcp and tcp6.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path
from typing import Any

_TABLES = Path("/proc/thread-self/net")
_ESTABLISHED = 1
"""The state in which no side has closed the connection."""


def owner(connection: socket.socket) -> int | None:
    """Return the uid of the user who holds the other end, or None if that is not known: it is on another machine or in
    another network namespace, or was passed on by the kernel (NAT).

    In a user namespace the kernel shows users without an id there as nobody (65534).

    Raises:
        ConnectionResetError: no process holds it: it was not accepted yet, or is closed. Bytes that were sent before
            may still come, but the kernel shows such a socket as root's.
    """
    try:
        here, there = _address(connection.getsockname()), _address(connection.getpeername())
    except OSError:
        raise ConnectionResetError("the peer closed the connection") from None
    if here[0] != there[0] and not (_is_loopback(here[0]) and _is_loopback(there[0])):
        return None  # to a local address the kernel connects from that address, or from a loopback address
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            row = f": {_shown(*there, family)} {_shown(*here, family)} ".encode()
            text = (_TABLES / table).read_bytes()
        except (OSError, ValueError):
            continue
        if (at := text.find(row)) >= 0:
            _, _, _, _, uid, _, inode = text[at + len(row) :].split(None, 7)[:7]  # state, queues, timer, resent, ...
            if inode == b"0":
                raise ConnectionResetError("the peer closed the connection")
            return int(uid)
    if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != _ESTABLISHED:
        raise ConnectionResetError("the peer closed the connection")  # which is why its socket is not in the table
    return None


def _address(name: Any) -> tuple[str, int]:
    """Return the host and the port in the name of a socket of either family."""
    host, port, *_ = name
    return str(host), int(port)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0].removeprefix("::ffff:")).is_loopback


def _shown(host: str, port: int, family: int) -> str:
    """Return an address as the kernel's table shows it: 32-bit words in native order, in hexadecimal."""
    host = host.partition("%")[0]
    if family == socket.AF_INET6 and ":" not in host:
        host = f"::ffff:{host}"  # a listener for both families
    if family == socket.AF_INET:
        host = host.removeprefix("::ffff:")
    packed = socket.inet_pton(family, host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{port:04X}"
