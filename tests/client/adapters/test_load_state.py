"""A state can be loaded into an open connection: it replaces the session, and nothing else."""

from __future__ import annotations

import time

import numpy as np
import pytest

import penstock
from penstock._stream import reconnecting
from tests.conftest import Serve

FEED = """
    import os
    import time

    import numpy as np
    from penstock_server import Feed

    PAUSE = float(os.environ.get("PAUSE", 0))

    def generate(split):
        for i in range(20):
            time.sleep(PAUSE)
            yield np.full((64, 64), 20 * split + i, "int64")

    feed = Feed(generate, splits=range(4), batch_size=5, lanes=2, turn=1)
    mixed = Feed(generate, splits=range(4), batch_size=5, lanes=2, turn=1, shuffle=20)
"""
LEAST = 5 * (41 * 4096) + 20 * 64 * 64 * 8
"""The least --memory, in bytes, with which `mixed` can be served: three slots, one more for each lane, and its shuffle
blocks."""


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_the_session_that_is_replaced_does_not_come_back(
    serve: Serve, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE", 0.01)
    daemon = serve(FEED, "mixed", memory=LEAST, env={"PAUSE": "0.02"})
    with penstock.connect(daemon.url, transport=transport) as connection:
        state = connection.state_dict()
        for _ in range(2):
            time.sleep(0.45)  # the daemon sends a batch that nobody takes, and makes more
            connection.load_state_dict(state)
        assert len(list(connection.batches())) == 16
        assert connection.stats()["reconnects"] == 0
    assert daemon.stderr().count("reads it") == 3


def test_a_connection_stays_when_a_state_cannot_be_loaded_into_it(serve: Serve) -> None:
    daemon = serve(FEED + "    other = Feed(generate, splits=range(3), batch_size=5)\n", "feed", "other")
    with penstock.connect(daemon.urls["other"]) as other:
        state = other.state_dict()
    with penstock.connect(daemon.urls["feed"]) as connection:
        with pytest.raises(penstock.StateMismatch):
            connection.load_state_dict(state)
        assert sum(len(np.asarray(batch)) for batch in connection.batches()) == 80
