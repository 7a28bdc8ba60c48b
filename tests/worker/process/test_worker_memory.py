"""`--worker-memory`: user code that asks for too much gets an error that names the sample, and no worker is killed."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

import penstock
from penstock_server.cli.parameters import worker_memory_option
from penstock_server.to_daemon import control
from tests.conftest import Serve

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def greedy(split):
        for i in range(8):
            if split == 1 and i == 5:
                np.ones((1 << 40,), "u1")
            yield np.int64(100 * split + i)

    def modest(split):
        for i in range(100):
            yield np.full(1000, i)

    feed = Feed(greedy, splits=range(4), batch_size=1, lanes=1)
    skips = Feed(greedy, splits=range(4), batch_size=1, lanes=2, on_error="skip")
    other = Feed(modest, splits=range(4), batch_size=10)
"""


def test_a_generator_beyond_the_memory_of_its_worker_gets_an_error_that_names_the_sample(serve: Serve) -> None:
    daemon = serve(FEEDS, "feed", "skips", "other", worker_memory="1G")
    with penstock.connect(daemon.urls["feed"]) as connection:
        with pytest.raises(penstock.GeneratorError) as caught:
            list(connection.batches())
    assert caught.value.feed == "feed"
    assert caught.value.split == "1"
    said = str(caught.value)
    assert "MemoryError" in said
    assert "(sample 5 of its split, from 0). The worker may take 1024 MiB" in said
    assert "--worker-memory" in said
    with penstock.connect(daemon.urls["skips"]) as connection:
        expected = [100 * split + i for split in range(4) for i in range(8 if split != 1 else 5)]
        assert sorted(int(batch[0]) for batch in connection.batches()) == expected
    with penstock.connect(daemon.urls["other"]) as connection:
        assert sum(len(batch) for batch in connection.batches()) == 400
    assert [worker.restarts for worker in control.status(daemon.urls["feed"], 60).workers] == [0, 0]


def test_slots_do_not_count_as_memory_of_a_worker(serve: Serve) -> None:
    source = """
    import numpy as np
    from penstock_server import Feed

    def large():
        for i in range(12):
            yield np.full(1 << 23, i, "u1")

    feed = Feed(large, batch_size=2)
    """
    daemon = serve(source, worker_memory="112M", memory="1G", workers=1)
    with penstock.connect(daemon.url) as connection:
        held = list(connection.batches())
        assert [batch.shape for batch in held] == 6 * [(2, 1 << 23)]


@pytest.mark.parametrize(("size", "right"), [(64 << 20, True), ((64 << 20) - 1, False)])
def test_a_worker_needs_64_mib(size: int, right: bool) -> None:
    command = click.Command("serve", params=[], callback=lambda worker_memory: None)
    said = CliRunner().invoke(worker_memory_option(command), ["--worker-memory", str(size)])
    assert (said.exit_code == 0) == right
    assert ("must be at least 64M" in said.output) != right
