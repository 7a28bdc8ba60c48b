"""Ports of this machine on which nobody listens, and that no other test gets."""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST, _EACH = 20_000, 1_500
"""All ports lie below those that Linux gives to sockets without a port of their own (32768 and up), so no connection
takes one between the test's choice and its use. Each process of pytest-xdist has as many of them."""

_own = _FIRST + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8)
_numbers = itertools.count(random.randrange(_EACH))


def free_port() -> int:
    """Return a port of the loopback address."""
    while True:
        port = _own + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # somebody has it
                continue
        return port


def free_address() -> str:
    """Return such a port as an address of ZeroMQ: "tcp://127.0.0.1:20001"."""
    return f"tcp://127.0.0.1:{free_port()}"
