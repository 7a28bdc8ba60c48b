"""Free ports of this machine, which no other test gets."""

from __future__ import annotations

import itertools
import os
import random
import socket

_FIRST, _EACH = 20_000, 1_500
"""The first port, and the number of ports of each pytest-xdist process. All lie below the ports that Linux gives to
sockets that do not choose one (32768 and up). So no connection takes a port before the test uses it."""

_own = _FIRST + _EACH * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8)
_numbers = itertools.count(random.randrange(_EACH))


def free_port() -> int:
    """Return a free port of the loopback address."""
    while True:
        port = _own + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # the port is in use
                continue
        return port


def free_address() -> str:
    """Return a free port as a ZeroMQ address, such as "tcp://127.0.0.1:20001"."""
    return f"tcp://127.0.0.1:{free_port()}"
