"""A trainer that stops reading takes a bounded amount of memory, and loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

import penstock
from penstock_server.cli.status_lines import status_lines
from penstock_server.to_daemon import control
from tests.conftest import Daemon, Serve

MIB = 1 << 20
FEED = """
    import numpy as np
    from penstock_server import Feed

    def big(split):
        for i in range(30):
            yield np.full(1 << 20, 30 * split + i, "uint8"), np.int64(30 * split + i)

    feed = Feed(big, splits=range(8), batch_size=1, lanes=4, turn=1)
"""


def memory(daemon: Daemon) -> int:
    """Return the PSS of daemon and workers, in bytes. Shared pages count once."""
    processes = [psutil.Process(daemon.process.pid), *daemon.workers()]
    return sum(process.memory_full_info().pss for process in processes)


def settled(daemon: Daemon) -> int:
    """Return the memory of daemon and workers, once no worker has anything to do."""

    def all_idle() -> bool:
        lines = [line for line in status_lines(control.status(daemon.url, 60)) if line.startswith("worker")]
        return len(lines) == 2 and all(line.endswith("idle") for line in lines)

    for _ in range(2):  # a worker may be between two turns the first time
        until(all_idle)
    return memory(daemon)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_memory_stops_at_the_bound_while_the_trainer_stands_still_and_nothing_is_lost(
    serve: Serve, transport: str
) -> None:
    bound = 12 * MIB
    daemon = serve(FEED, memory=bound)
    empty = settled(daemon)
    with penstock.connect(daemon.url, transport=transport) as connection:
        batches = connection.batches()
        seen = [int(next(batches)[1][0])]
        assert settled(daemon) - empty < bound + 4 * MIB
        seen += [int(n[0]) for _, n in batches]
        assert sorted(seen) == list(range(240))
        assert settled(daemon) - empty < bound + 4 * MIB


def test_several_streams_share_the_bound_and_one_too_many_is_refused_with_figures(serve: Serve) -> None:
    bound = 16 * MIB
    daemon = serve(FEED, memory=bound)
    empty = settled(daemon)
    connections = []
    try:
        with pytest.raises(
            penstock.MemoryBound, match=r"a stream needs .* MiB, but \d+ other streams? holds? .*--memory"
        ):
            for _ in range(20):
                connections.append(penstock.connect(daemon.url))
        assert len(connections) >= 3
        iterators = [connection.batches() for connection in connections]
        for iterator in iterators:
            next(iterator)
        assert settled(daemon) - empty < bound + 6 * MIB
        del iterators, iterator
        assert [len(list(connection.batches())) for connection in connections] == [240] * len(connections)
    finally:
        for connection in connections:
            connection.close()


def test_the_slots_of_a_closed_stream_go_back_to_the_system(serve: Serve) -> None:
    daemon = serve(FEED, memory=64 * MIB)

    def arena() -> int:
        return control.status(daemon.url, 60).memory.arena

    assert arena() == 0
    with penstock.connect(daemon.url) as connection:
        next(connection.batches())
        until(lambda: arena() > 4 * MIB)
    until(lambda: arena() == 0)


def test_a_batch_larger_than_its_slot_makes_the_arena_grow(serve: Serve) -> None:
    daemon = serve(
        """
        import numpy as np
        from penstock_server import Feed
        sizes = [10, 100, 10**5, 3 * 10**6, 5, 9 * 10**6]
        feed = Feed(lambda k: iter([np.full(k, k % 251, "uint8")] * 3), splits=sizes, batch_size=None, lanes=2)
        """,
        memory=400 * MIB,
    )
    with penstock.connect(daemon.url) as connection:
        sizes = []
        for batch in connection.batches():
            assert (batch == len(batch) % 251).all()
            sizes.append(len(batch))
    assert sorted(sizes) == sorted([10, 100, 10**5, 3 * 10**6, 5, 9 * 10**6] * 3)


def test_slots_that_grow_become_fewer_rather_than_fail_the_stream_that_hoards(serve: Serve) -> None:
    daemon = serve(
        """
        import numpy as np
        from penstock_server import Feed
        sizes = [5000] * 12 + [2 * 10**6] * 12 + [5000] * 12
        feed = Feed(lambda k: iter([np.full(sizes[k], k, "uint8")]), splits=range(36), batch_size=None, lanes=1)
        """,
        memory=8 * MIB,
    )
    with penstock.connect(daemon.url) as connection:
        held = list(connection.batches())
        assert [(len(batch), set(batch.tolist())) for batch in held] == [
            (2 * 10**6 if 12 <= k < 24 else 5000, {k}) for k in range(36)
        ]
        del held


def test_a_batch_larger_than_memory_allows_is_an_error_with_figures(serve: Serve) -> None:
    daemon = serve(
        """
        import numpy as np
        from penstock_server import Feed
        feed = Feed(lambda k: iter([np.zeros(k, "uint8")]), splits=[10, 10**8], batch_size=None, lanes=1)
        """,
        memory=10 * MIB,
    )
    with penstock.connect(daemon.url) as connection:
        with pytest.raises(penstock.MemoryBound, match=r"a batch of 95.* MiB came.*Give --memory \d+M, or make"):
            list(connection.batches())


def test_a_consumer_that_hoards_arrays_never_stops_the_stream(serve: Serve) -> None:
    daemon = serve(FEED, memory=12 * MIB)
    with penstock.connect(daemon.url) as connection:
        held: list[Any] = list(connection.batches())
        for x, n in held:
            assert (x == np.uint8(n[0])).all()
        assert len(held) == 240
        assert connection.stats()["copies"] > 200
        del held, x, n
