"""Tries the addresses of a host one after another."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Address: TypeAlias = tuple[Any, ...]
"""An element of what `socket.getaddrinfo` returns: family, kind, protocol, name and place."""


def first_that_answers(host: str, port: int, timeout: float, connect: Callable[[Address, float], T]) -> T:
    """Return what `connect` returns for the first address for which it raises no OSError.

    Args:
        host: a name or an address.
        port: a number.
        timeout: seconds for all addresses together. They share the time that is left equally.
        connect: takes an address and its deadline.

    Raises:
        OSError: that of the last address; gaierror if `host` has no address.
    """
    error = OSError(f"{host} has no address")
    end = time.monotonic() + timeout
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, address in enumerate(addresses):
        now = time.monotonic()
        try:
            return connect(address, now + max(0.0, end - now) / (len(addresses) - number))
        except OSError as failed:
            error = failed
    try:
        raise error
    finally:
        del error  # a cycle: it holds this frame, which would hold it, and through `connect` a session that reconnects
