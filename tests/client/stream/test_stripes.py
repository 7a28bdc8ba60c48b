"""Small batches of several lanes share slots: streams are the same as without that, and even from the first batch."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import penstock
from tests.conftest import Serve, kill
from tests.fakes.inside import handle_of

both = pytest.mark.parametrize("transport", ["local", "tcp"])

FEED = """
    import os
    import time
    from pathlib import Path

    import numpy as np
    from penstock_server import Feed

    def numbers(split):
        for number in range(7 * split + 3):
            yield np.full(6, 1000 * split + number)

    def waits(split):
        for number in range(40):
            batch = 4 * (number // 2) + split  # a batch of each lane in turn
            while not Path(os.environ["TOLD"], str(batch - 4)).exists() and batch >= 4:
                time.sleep(0.005)
            time.sleep(0.015)  # a batch that takes more than 20 ms is reported at once
            yield 1000 * split + number

    feed = Feed(numbers, splits=range(20), batch_size=2, lanes=7)
    plain = Feed(numbers, splits=range(20), batch_size=2, lanes=7, turn=1)
    waiting = Feed(waits, splits=range(4), batch_size=2, lanes=4)
"""


def stream_of(connection: penstock.Connection) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in connection.batches()]


@both
@pytest.mark.parametrize("workers", [1, 3])
def test_the_stream_is_that_of_turns_of_one_batch(serve: Serve, transport: str, workers: int) -> None:
    daemon = serve(FEED, "feed", "plain", workers=workers, env={"TOLD": ""})
    with penstock.connect(daemon.urls["plain"], transport=transport) as connection:
        assert handle_of(connection).info.stripe == 1
        expected = [stream_of(connection) for _ in range(2)]
    with penstock.connect(daemon.urls["feed"], transport=transport) as connection:
        info = handle_of(connection).info
        assert (info.turn, info.stripe) == (1, 1024)
        assert [stream_of(connection) for _ in range(2)] == expected
        assert connection.stats()["slabs"] < connection.stats()["batches"] / 2, "several batches share a slab"


@both
def test_a_batch_comes_before_the_next_one_of_its_lane_is_made(serve: Serve, tmp_path: Path, transport: str) -> None:
    daemon = serve(FEED, "waiting", workers=2, env={"TOLD": str(tmp_path)})
    with penstock.connect(daemon.url, transport=transport) as connection:
        found = []
        for number, batch in enumerate(connection.batches()):
            found.append(batch.tolist())
            (tmp_path / str(number)).touch()
    assert found == [[1000 * (n % 4) + 2 * (n // 4), 1000 * (n % 4) + 2 * (n // 4) + 1] for n in range(80)]


@both
def test_a_stream_goes_on_after_any_batch_with_other_workers(serve: Serve, transport: str) -> None:
    daemon = serve(FEED, "feed", workers=3, env={"TOLD": ""})
    with penstock.connect(daemon.url, transport=transport) as connection:
        whole, states = [], [connection.state_dict()]
        for batch in connection.batches():
            whole.append(batch[:, 0].tolist())
            states.append(connection.state_dict(consumed=len(whole)))
    other = serve(FEED, "feed", workers=2, env={"TOLD": ""})
    for consumed in range(0, len(whole), 37):
        with penstock.connect(other.url, transport=transport, state=states[consumed]) as connection:
            assert stream_of(connection) == whole[consumed:], consumed


def test_workers_that_die_do_not_change_the_stream(serve: Serve) -> None:
    daemon = serve(FEED, "feed", workers=3, env={"TOLD": ""})
    with penstock.connect(daemon.url) as connection:
        expected = stream_of(connection)
    with penstock.connect(daemon.url) as connection:
        found = []
        for number, batch in enumerate(connection.batches()):
            found.append(np.asarray(batch)[:, 0].tolist())
            if number % 200 == 100:
                kill(daemon.workers()[:1])
                time.sleep(0.05)
        assert found == expected
