"""`Feed(rebatch=)` takes the batches of a generator apart, and its rows keep every promise of samples."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto import SpecError
from penstock_proto.batches.inferring import infer
from penstock_server import Feed
from penstock_server.worker.batch.rebatching import BatchRows, NoRows
from tests.conftest import Serve

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def ragged_table(split, rng):
        "Batches of 1 to 9 rows, of one buffer that is reused."
        buffer = np.empty((9, 2))
        for i in range(20):
            rows = buffer[: rng.integers(1, 10)]
            rows[:] = 100 * split + i
            rows[:, 1] = range(len(rows))
            yield {"x": rows, "text": [f"{i}-{j}" for j in range(len(rows))]}

    def extended(sample, rng):
        return {**sample, "drawn": rng.random()}

    def one_buffer():
        for i in range(40):
            yield np.full((1 + i % 5, 2), i)

    ordered = Feed(ragged_table, splits=range(6), batch_size=None, rebatch=8, lanes=3, transform=extended)
    mixed = Feed(ragged_table, splits=range(6), batch_size=None, rebatch=8, lanes=3, shuffle=60, seed=4)
    segmented = Feed(ragged_table, segment=30, samples=300, batch_size=None, rebatch=7, lanes=3)
    undivided = Feed(one_buffer, transform=lambda row: tuple(row), batch_size=None, rebatch=4, lanes=3, turn=2)
"""
NAMES = ("ordered", "mixed", "segmented", "undivided")


def exact(batch: Any) -> list[Any]:
    """Return every value of the batch, for comparison."""
    return [leaf.tolist() for leaf in (batch.values() if isinstance(batch, dict) else batch)]


def test_the_stream_of_rows_is_the_same_with_any_workers_through_a_kill_and_from_a_state(serve: Serve) -> None:
    one = serve(FEEDS, *NAMES, workers=1)
    quiet = {}
    for name in NAMES:
        with penstock.connect(one.urls[name], transport="tcp") as connection:
            quiet[name] = [[exact(batch) for batch in connection.batches()] for _ in range(2)]
    three = serve(FEEDS, *NAMES, workers=3)
    states = {}
    for name in NAMES:
        with penstock.connect(three.urls[name]) as connection:
            batches = connection.batches()
            seen = [exact(batch) for batch in itertools.islice(batches, 3)]
            states[name] = connection.state_dict()
            three.workers()[0].kill()
            seen += [exact(batch) for batch in batches]
            assert seen == quiet[name][0], name
            assert [exact(batch) for batch in connection.batches()] == quiet[name][1], name
    for name in NAMES:
        with penstock.connect(one.urls[name], state=states[name]) as connection:
            assert [exact(batch) for batch in connection.batches()] == quiet[name][0][3:], name


def test_every_row_comes_once_in_batches_of_the_size_that_was_asked_for(serve: Serve) -> None:
    daemon = serve(FEEDS, *NAMES, workers=2)
    for name, size, rows in (("ordered", 8, None), ("mixed", 8, None), ("segmented", 7, 300), ("undivided", 4, 120)):
        with penstock.connect(daemon.urls[name], transport="tcp") as connection:
            batches = list(connection.batches())
            flat = [batch[0] if name == "undivided" else batch["x"][:, 0] for batch in batches]
            assert {len(x) for x in flat[:-1]} == {size}, name
            assert rows is None or sum(map(len, flat)) == rows
            if name == "undivided":  # in the generator's order
                assert np.concatenate(flat).tolist() == [i for i in range(40) for _ in range(1 + i % 5)]
                continue
            seen = [
                (round(value), round(row), text)
                for batch in batches
                for (value, row), text in zip(batch["x"].tolist(), batch["text"].tolist(), strict=True)
            ]
            assert all(text == f"{value % 100}-{row}".encode() for value, row, text in seen), name
            if name != "segmented":
                assert len(set(seen)) == len(seen), "a row came twice"
                last: dict[int, int] = {}
                for value, row, _ in seen:
                    last[value] = max(row, last.get(value, 0))
                assert len(last) == 6 * 20
                assert len(seen) == sum(row + 1 for row in last.values()), "a row is missing"


LISTS = [[np.zeros((4, 3)), np.zeros(4)], ([np.zeros((4, 3)), np.zeros((4, 2))], np.zeros(4))]
"""Batches of two leaves, and of three, with a list where Penstock wants a tuple."""


def test_batches_that_cannot_be_taken_apart_say_which_and_why() -> None:
    def reading(*batches: Any) -> list[Any]:
        return list(BatchRows(iter(batches)))

    assert reading(np.zeros((2, 3)), np.zeros((0, 3)), np.ones((1, 3)))[2].tolist() == [1, 1, 1]
    assert infer(reading((["a", "b"], np.zeros(2, np.int32)))[0]) == infer((b"a", np.int32(0)))
    for said, *batches in (
        (r"batch 1 .* batch\['b'\] has 3", {"a": np.zeros(2), "b": np.zeros(2)}, {"a": np.zeros(2), "b": np.zeros(3)}),
        (r"batch 0 batch\[1\] is a single value .* give batch_size=", (np.zeros(2), 1.0)),
        (r"batch 1 .* unlike in the batches before", np.zeros(2), 1.0),
        (r"batch 1 .* should be a tuple of 2", (np.zeros(2), np.zeros(2)), np.zeros(2)),
    ):
        with pytest.raises(NoRows) as raised:
            reading(*batches)
        assert re.match(said, f"batch {raised.value.number} {raised.value.message}", re.DOTALL)


@pytest.mark.parametrize("batch", LISTS)
def test_the_advice_for_a_list_of_arrays_works(batch: Any) -> None:
    """transform= gets single rows, so the advice for other feeds would lead to the same error."""

    def batches() -> Any:
        yield batch

    with pytest.raises(SpecError, match="With rebatch= a transform= gets single rows") as raised:
        penstock.connect(Feed(batches, batch_size=None, rebatch=2), workers=0)
    assert "Feed(transform=)" not in str(raised.value)
    (code,) = re.findall("such as `(.*)`", str(raised.value))
    names: dict[str, Any] = {"batches": batches}
    exec(code, names)
    with penstock.connect(Feed(names["packed"], batch_size=None, rebatch=2), workers=0) as connection:
        assert [type(one) for one in connection.batches()] == [tuple, tuple]


@pytest.mark.parametrize("batch", LISTS)
def test_the_advice_for_a_list_of_arrays_of_ready_batches_works(batch: Any) -> None:
    with pytest.raises(SpecError) as raised:
        infer(batch)
    (code,) = re.findall("such as `(.*)`", str(raised.value))
    names: dict[str, Any] = {}
    exec(code, names)

    def batches() -> Any:
        yield batch

    with penstock.connect(Feed(batches, batch_size=None, transform=names["pack"]), workers=0) as connection:
        assert [type(one) for one in connection.batches()] == [tuple]


def test_a_batch_without_rows_fails_the_stream_and_names_the_split() -> None:
    def halves(split: int) -> Any:
        yield np.zeros(4), np.zeros(4)
        yield np.zeros(4), np.zeros(split)

    feed = Feed(halves, splits=[4, 5], batch_size=None, rebatch=3, name="halves")
    with (
        penstock.connect(feed, workers=0) as connection,
        pytest.raises(
            SpecError, match=r"batch\[1\] has 5.*\(batch 1 of its split, from 0\)\n  in feed halves, split 5"
        ),
    ):
        list(connection.batches())


def test_samples_of_batches_can_be_padded() -> None:
    def tokens(split: int) -> Any:
        for length in (3, 5):
            yield np.full((2, length), length)

    feed = Feed(tokens, splits=[0], batch_size=None, rebatch=3, name="tokens", batching="pad")
    with penstock.connect(feed, workers=0) as connection:
        assert [batch.tolist() for batch in connection.batches()] == [
            [[3, 3, 3, 0, 0], [3, 3, 3, 0, 0], [5, 5, 5, 5, 5]],
            [[5, 5, 5, 5, 5]],
        ]


def test_batches_that_are_cached_are_taken_apart_alike(tmp_path: Path) -> None:
    def batches(split: int) -> Any:
        for i in range(9):
            yield np.arange(1 + (split + i) % 4) + 100 * split

    def whole() -> Any:
        for i in range(30):
            yield np.arange(1 + i % 4) + 10 * i

    def twice(row: Any) -> Any:
        return row * 2

    for generate, options in ((batches, {"splits": [0, 1, 2]}), (whole, {"transform": twice, "lanes": 3, "turn": 1})):
        streams = []
        for cache in ({}, {"cache": tmp_path}):
            feed = Feed(generate, batch_size=None, rebatch=4, name="feed", **options, **cache)  # type: ignore[arg-type]
            with penstock.connect(feed, workers=0) as connection:
                streams += [[batch.tolist() for batch in connection.batches()] for _ in range(2)]
                batches_read = connection.batches()
                next(batches_read)
                state = connection.state_dict()
            with penstock.connect(feed, workers=0, state=state) as connection:
                streams.append(streams[0][:1] + [batch.tolist() for batch in connection.batches()])
        assert all(stream == streams[0] for stream in streams), generate
    assert [*tmp_path.glob("*/*.split")]


def test_rebatch_is_refused_where_it_means_nothing() -> None:
    def samples(split: int) -> Any:
        yield split

    with pytest.raises(ValueError, match="rebatch=4 is for a generator that yields whole batches, so batch_size must"):
        Feed(samples, splits=[1], batch_size=8, rebatch=4)
    with pytest.raises(ValueError, match="rebatch= is for generators: set the size of a batch in the indexable object"):
        Feed([1, 2], batch_size=None, rebatch=4)
    with pytest.raises(ValueError, match="rebatch must be 1 to"):
        Feed(samples, splits=[1], batch_size=None, rebatch=0)
    feed = Feed(samples, splits=[1], batch_size=None, rebatch=4, drop_remainder=True, turn=2)
    assert feed.plan("feed").batch_size == 4
