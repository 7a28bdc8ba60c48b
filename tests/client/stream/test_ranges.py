"""Indexable feeds are made in ranges as long as a worker makes in a moment: slow ones by all workers from the start."""

from __future__ import annotations

import re
from itertools import islice

import pytest

import penstock
from tests.conftest import Serve
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.inside import handle_of

both = pytest.mark.parametrize("transport", ["local", "tcp"])

FEED = """
    import os
    import time

    import numpy as np
    from penstock_server import Feed

    class Slow:
        def __len__(self):
            return 8192

        def __getitem__(self, number):
            time.sleep(0.06)  # a longer range than one batch takes more than a moment
            return np.array([number, os.getpid()])

    class Quick:
        def __len__(self):
            return 4096

        def __getitem__(self, number):
            return np.int64(number)

    class Uneven:
        def __len__(self):
            return 400

        def __getitem__(self, number):
            time.sleep(0.03 if number % 40 < 4 else 0.001)
            return np.int64(number)

    slow = Feed(Slow(), batch_size=2)
    uneven = Feed(Uneven(), batch_size=4, order="fast", turn=1)
    quick = Feed(Quick(), batch_size=2)
    shuffled = Feed(Quick(), batch_size=2, shuffle=1000, seed=3)
    turns = Feed(Quick(), batch_size=2, shuffle=1000, seed=3, turn=7)
"""


@both
def test_slow_samples_are_made_batch_by_batch_by_all_workers(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "slow", workers=3)
    with penstock.connect(daemon.url, transport=transport) as connection:
        assert handle_of(connection).info.turn == 64
        read = [batch.tolist() for batch in islice(connection.batches(), 12)]
        assert connection.stats()["slabs"] == 12
    assert [number for batch in read for number, _ in batch] == [*range(24)]
    assert len({pid for batch in read[:3] for _, pid in batch}) == 3


@both
def test_quick_samples_come_in_few_slabs(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "quick", workers=2)
    with penstock.connect(daemon.url, transport=transport) as connection:
        turn = handle_of(connection).info.turn
        read = [number for _ in range(3) for batch in connection.batches() for number in batch.tolist()]
        stats = connection.stats()
    assert read == [*range(4096)] * 3
    assert stats["slabs"] < 3 * stats["batches"] / turn


@pytest.mark.parametrize("workers", [1, 3])
def test_the_stream_is_that_of_any_other_cut(serve: Serve, workers: int) -> None:
    daemon = serve(FEED, "shuffled", "turns", workers=workers)
    with penstock.connect(daemon.urls["turns"]) as connection:
        expected = [[batch.tolist() for batch in connection.batches()] for _ in range(2)]
    with penstock.connect(daemon.urls["shuffled"]) as connection:
        assert [[batch.tolist() for batch in connection.batches()] for _ in range(2)] == expected


def test_in_fast_order_every_sample_comes_once_through_a_lost_connection_and_from_a_state(serve: Serve) -> None:
    """A position is the number of a batch. Had later batches come before, they would come again, and others never."""
    daemon = serve(FEED, "uneven", workers=4)
    seen: list[int] = []
    port = re.search(r":(\d+)/", daemon.url)[1]  # type: ignore[index]
    with FaultProxy(int(port)) as proxy:
        url = daemon.url.replace(port, str(proxy.port))
        with penstock.connect(url, transport="tcp") as connection:
            for number, batch in enumerate(islice(connection.batches(), 50)):
                seen += batch.tolist()
                if number == 20:
                    proxy.cut()
            state = connection.state_dict()
        with penstock.connect(url, transport="tcp") as connection:
            connection.load_state_dict(state)
            for batch in connection.batches():
                seen += batch.tolist()
    assert sorted(seen) == list(range(400))
