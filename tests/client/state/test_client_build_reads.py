"""What Keras reads to build a model is handed over again. Any other iteration that is left stays left.

Functions with the names of Keras' own play its part, since it is recognised by them.
tests/trainers/test_keras_backends.py has the real one.
"""

from __future__ import annotations

import logging
import threading
from itertools import islice
from typing import Any

import pytest

import penstock
from penstock._state import build_reads
from tests.conftest import Serve

FEEDS = """
import numpy as np
from penstock_server import Feed

def numbers(split):
    for i in range(20):
        yield np.int64(20 * split + i)

feed = Feed(numbers, splits=range(4), batch_size=4, lanes=2, turn=4, samples=80)
short = Feed(numbers, splits=range(1), batch_size=20, epochs=2)
"""


def keras_function(name: str, body: str) -> Any:
    """Return a function of a module of Keras."""
    space: dict[str, Any] = {"__name__": "keras.src.trainers.trainer", "islice": islice}
    exec(f"def {name}(data):\n    return {body}", space)
    return space[name]


build = keras_function("_symbolic_build", "[int(batch[0]) for batch in islice(data, 1)]")
peek = keras_function("peek_and_restore", "[int(batch[0]) for batch in islice(data, 2)]")


def firsts(batches: Any) -> list[int]:
    return [int(batch[0]) for batch in batches]


@pytest.fixture
def url(serve: Serve) -> str:
    return serve(FEEDS, "feed", "short").urls["feed"]


@pytest.fixture
def stream(url: str) -> list[list[int]]:
    with penstock.connect(url) as connection:
        return [firsts(connection.batches()) for _ in range(3)]


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_the_next_iteration_begins_with_what_was_read_to_build_a_model(
    url: str, stream: list[list[int]], transport: str
) -> None:
    with penstock.connect(url, transport=transport) as connection:
        for _ in range(2):  # building another model does not change that
            assert build(connection.batches()) == stream[0][:1]
        assert connection.state_dict()["consumed"] == 0
        assert connection.stats()["batches"] == 0
        assert firsts(connection.batches()) == stream[0]
        assert firsts(connection.batches()) == stream[1]
        assert connection.stats()["batches"] == connection.state_dict()["consumed"] == 40


def test_what_tensorflow_reads_on_a_thread_of_its_own_to_build_a_model_is_refused(url: str) -> None:
    space: dict[str, Any] = {"__name__": "tensorflow.python.ops.script_ops"}
    exec(
        "def call(batches, results):\n    try:\n        next(batches)\n    except ValueError as error:\n"
        "        results.append(str(error))",
        space,
    )
    read_there = keras_function("_symbolic_build", "[thread.start() or thread.join() for thread in data]")
    with penstock.connect(url) as connection:
        results: list[str] = []
        read_there([threading.Thread(target=space["call"], args=(connection.batches(), results))])
        assert "the model would never see those batches: give model.fit connection.keras()" in results[0]
        assert firsts(islice(connection.batches(), 1)) == [0], "no epoch was used up"


def test_a_look_by_the_users_own_code_uses_up_its_epoch(url: str, stream: list[list[int]]) -> None:
    with penstock.connect(url) as connection:
        assert firsts(islice(connection.batches(), 1)) == stream[0][:1]
        assert firsts(connection.batches()) == stream[1]


def test_a_state_within_what_is_handed_over_again_is_the_place_in_the_stream(url: str, stream: list[list[int]]) -> None:
    with penstock.connect(url) as connection:
        build(connection.batches())
        batches = connection.batches()
        states = []
        for _ in range(6):  # the first slab has 4 batches
            next(batches)
            states.append(connection.state_dict())
        del batches
    assert [state["consumed"] for state in states] == [1, 2, 3, 4, 5, 6]
    for state in states:
        with penstock.connect(url, state=state) as connection:
            assert build(connection.batches()) == stream[0][state["consumed"] :][:1]
            assert firsts(connection.batches()) == stream[0][state["consumed"] :]
            assert firsts(connection.batches()) == stream[1]


def test_a_state_can_be_loaded_after_a_model_was_built(url: str, stream: list[list[int]]) -> None:
    with penstock.connect(url) as connection:
        firsts(islice(connection.batches(), 7))
        state = connection.state_dict()
    with penstock.connect(url) as connection:
        build(connection.batches())
        connection.load_state_dict(state)
        assert firsts(connection.batches()) == stream[0][7:]


def test_the_end_of_an_epoch_that_building_has_read_to_is_handed_over_again_too(serve: Serve) -> None:
    daemon = serve(FEEDS, "short")
    whole = keras_function("_symbolic_build", "[int(batch[0]) for batch in data]")
    with penstock.connect(daemon.url) as connection:
        assert whole(connection.batches()) == [0]
        assert firsts(connection.batches()) == [0]
        assert firsts(connection.batches()) == [0], "epoch 1"
        with pytest.raises(penstock.EndOfStream):
            next(connection.batches())


def test_an_older_iteration_ends_when_the_next_one_begins(url: str) -> None:
    hold = keras_function("_symbolic_build", "(iter(data), next(data))")
    with penstock.connect(url) as connection:
        older, _ = hold(connection.batches())
        newer = connection.batches()
        next(newer)
        firsts(islice(older, 3))  # in the slab that it has
        with pytest.raises(penstock.StreamClosed, match="a newer one on the same connection took its stream"):
            next(older)
        assert len(firsts(newer)) == 19


def test_closing_a_connection_drops_what_was_read_to_build_a_model(url: str) -> None:
    with penstock.connect(url) as connection:
        build(connection.batches())
        connection.close()
        with pytest.raises(penstock.StreamClosed):
            next(connection.batches())


def test_a_consumer_writes_to_its_own_copy(url: str, stream: list[list[int]]) -> None:
    spoil = keras_function("_symbolic_build", "next(data).fill(-1)")
    with penstock.connect(url, transport="local") as connection:
        spoil(connection.batches())
        assert firsts(connection.batches()) == stream[0]


def test_batches_beyond_the_bound_are_not_kept_and_the_log_says_so(
    url: str, stream: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build_reads, "MOST", 1)
    much = keras_function("_symbolic_build", "[int(batch[0]) for batch in islice(data, 12)]")
    with penstock.connect(url) as connection:
        build(connection.batches())
        assert much(connection.batches()) == stream[0][:12], "two slabs are always kept, and these are three"
        assert firsts(connection.batches()) == stream[1]
    assert "so the rest of this epoch is skipped" in caplog.text


def test_a_wrapper_that_trains_on_after_building_is_warned(
    url: str, stream: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with penstock.connect(url) as connection:
        batches = connection.batches()
        assert build(batches) == stream[0][:1]
        assert not caplog.records
        assert firsts(batches) == stream[0][1:]
        assert firsts(connection.batches()) == stream[1]
    [record] = caplog.records
    assert "the model never sees the first ones. Give model.fit connection.keras()" in record.getMessage()


def test_a_generator_that_keras_peeks_into_is_warned(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with penstock.connect(url) as connection, caplog.at_level(logging.WARNING):
        peek(batch for batch in connection.batches())
    [record] = caplog.records
    assert "trains on them again in each later epoch" in record.getMessage()
