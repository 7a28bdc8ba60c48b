"""Reads a feed as a trainer does, for `penstock check URL`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock_proto.security.keys import client_keys

if TYPE_CHECKING:
    from penstock_server.checking.findings.connection import Read


def read_for_check(url: str, seconds: float, keys: str | None) -> Read:
    """Read a feed as a trainer does, for `seconds` seconds from its first batch on. Wait up to 10 s for that batch."""
    import penstock
    from penstock.commands.reading import Reading, epochs
    from penstock_server.checking.findings.connection import Read
    from penstock_server.to_daemon import control

    with penstock.connect(url, reconnect=0, timeout=10, keys=keys) as connection:
        with Reading(connection, epochs(connection)) as reading:
            deadline = time.monotonic() + 10
            while not connection.stats()["batches"] and reading.goes_on() and time.monotonic() < deadline:
                time.sleep(0.01)
            began, before = time.monotonic(), connection.stats()
            while reading.goes_on() and time.monotonic() < began + seconds:
                time.sleep(0.05)
            after, took = connection.stats(), time.monotonic() - began
            state = control.status(url, 5.0, client_keys(keys))
        if reading.error is not None:
            raise reading.error
    feed = url.rpartition("/")[2]
    return Read(
        transport=after["transport"],
        seconds=took,
        batches=after["batches"] - before["batches"],
        nbytes=after["bytes"] - before["bytes"],
        waiting=(after["wait_seconds"] - before["wait_seconds"]) / took,
        unsent=any(stream.unsent for stream in state.streams if stream.feed == feed),
    )
