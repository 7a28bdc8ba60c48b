"""`Feed(batch_transform=)`: a function over whole batches of an indexable object, exact with any number of workers. For
other sources see test_lane_batch_transform.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, Leaf, Weights
from tests.conftest import Serve
from tests.reference.one_stream import digests, one_stream

FEEDS = """
import random

import numpy as np
from penstock_server import Feed

class Rows:
    def __len__(self):
        return 203
    def __getitem__(self, index):
        return {"x": np.full((4, 3), index, "float32"), "y": index % 5}

def noisy(sample, rng):
    return {**sample, "x": sample["x"] + rng.random(dtype="float32")}

def one_hot(batch):
    return {"x": batch["x"], "y": np.eye(5, dtype="float32")[batch["y"]]}

def mixup(batch, rng):
    share = np.float32(rng.beta(0.2, 0.2))
    order = rng.permutation(len(batch["y"]))
    return {key: share * value + (1 - share) * value[order] for key, value in batch.items()}

def as_pair(batch):
    batch["x"] *= random.random() + np.random.random()  # the arrays are the function's
    return batch["x"], batch["y"], np.random.randint(2**31, size=len(batch["y"]))

feed = Feed(Rows(), batch_size=8, shuffle=1, seed=5, transform=noisy, batch_transform=[one_hot, mixup, as_pair])
"""


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(tmp_path: Path, serve: Serve) -> None:
    batches = one_stream(serve, FEEDS, tmp_path)
    assert [len(x) for x, _, _ in batches[:26]] == [8] * 25 + [3]
    assert {(x.dtype.name, x.shape[1:], y.dtype.name, y.shape[1:]) for x, y, _ in batches} == {
        ("float32", (4, 3), "float32", (5,))
    }
    for _, y, _ in batches:
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
    assert len({seed for _, _, drawn in batches for seed in drawn.tolist()}) > 200, "each batch has its own numbers"


def epoch(feed: Feed, state: Any = None) -> list[Any]:
    with penstock.connect(feed, workers=0, state=state) as connection:
        return list(connection.batches())


def test_the_function_gets_the_batch_in_the_structure_of_a_sample_and_may_return_another() -> None:
    seen: list[Any] = []

    def noted(batch: Any) -> Any:
        x, labels = batch
        seen.append((x.shape, x.dtype.name, *labels))
        return {"sum": x.sum((1, 2)), "x": x}

    source = [(np.full((2, 2), i, "uint8"), {"a": i, "b": float(i)}) for i in range(10)]
    batches = epoch(Feed(source, batch_size=4, batch_transform=noted))
    assert list(dict.fromkeys(seen)) == [((rows, 2, 2), "uint8", "a", "b") for rows in (4, 2)]
    assert np.concatenate([batch["sum"] for batch in batches]).tolist() == [4 * i for i in range(10)]
    assert sorted(batches[0]) == ["sum", "x"]


def test_weights_blocks_and_a_declared_spec_go_with_it() -> None:
    def doubled(batch: Any) -> Any:
        return 2 * batch

    for options in (
        {"weights": Weights(np.arange(20.0), replacement=False)},
        {"shuffle": penstock.Shuffle(6, block=3)},
        {"spec": Leaf("int64", ())},
        {"drop_remainder": True},
    ):
        options = {"batch_size": 4, **options}
        plain = epoch(Feed(range(20), **options))
        changed = epoch(Feed(range(20), batch_transform=doubled, **options))
        assert digests(changed) == digests(2 * batch for batch in plain)


def test_it_gets_padded_batches_and_its_rows_may_differ_in_length_from_batch_to_batch() -> None:
    def tokens(index: int) -> Any:
        return {"ids": np.arange(1 + index % 7), "label": np.float32(index)}

    def masked(batch: Any, rng: np.random.Generator) -> Any:
        ids = batch["ids"]
        hidden = (rng.random(ids.shape) < 0.5) & (ids >= 0)
        return {"ids": np.where(hidden, 100, ids), "hidden": hidden, "label": batch["label"]}

    options: dict[str, Any] = {"batch_size": 4, "batching": penstock.Pad(value=-1), "transform": tokens}
    plain = epoch(Feed(range(30), **options))
    batches = epoch(Feed(range(30), batch_transform=masked, **options))
    assert len({batch["ids"].shape for batch in batches}) > 2
    for batch, before in zip(batches, plain, strict=True):
        assert batch["ids"].shape == before["ids"].shape == batch["hidden"].shape
        np.testing.assert_array_equal(batch["ids"][~batch["hidden"]], before["ids"][~batch["hidden"]])
        assert (batch["ids"][batch["hidden"]] == 100).all()
    assert any(batch["hidden"].any() for batch in batches)


class Failing:
    def __init__(self, returns: Any) -> None:
        self.returns = returns
        self.calls = 0

    def __call__(self, batch: Any) -> Any:
        self.calls += 1
        return batch if self.calls < 3 else self.returns(batch)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (lambda batch: 1 / 0, r"batch_transform Failing raised ZeroDivisionError: .*\n.*batch 1"),
        (lambda batch: None, r"batch_transform Failing returned None: did you forget to `return` the batch"),
        (
            lambda batch: batch[:2],
            r"batch_transform Failing returned .* for batch of 4 rows, and the feed's spec has int64\[\]",
        ),
        (lambda batch: batch / 2, r"batch_transform Failing returned .* return arrays of one dtype and shape"),
        (
            lambda batch: (batch, batch),
            r"batch_transform Failing returned .*, and the feed's spec has int64\[\] for a row",
        ),
    ],
)
def test_an_error_names_the_function_and_the_batch(returns: Any, message: str) -> None:
    with pytest.raises(penstock.FeedError, match=message):
        epoch(Feed(range(20), batch_size=4, batch_transform=Failing(returns)))


def test_the_first_batch_shows_what_cannot_be_served() -> None:
    with pytest.raises(penstock.FeedError, match=r"must return arrays of numbers with as many rows as the batch"):
        epoch(Feed(range(20), batch_size=4, batch_transform=lambda batch: batch.sum()))
    with pytest.raises(penstock.FeedError, match=r"sample\['t'\] is string\[\], and batch_transform= gets arrays of"):
        epoch(Feed([{"t": "text"}], batch_size=4, batch_transform=lambda batch: batch))


def doubles(sample: Any) -> Any:
    yield sample


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([1, 2], {"batch_size": None}, r"transform= gets these whole batches"),
        ([1, 2], {"batching": "ragged"}, r"which ragged batches are not: give batching='pad' instead"),
        ([1, 2], {"batch_transform": doubles}, r"batch_transform doubles yields, and must return one batch for each"),
        ([1, 2], {"batch_transform": 3}, r"batch_transform=: transform must be a function"),
    ],
)
def test_where_it_cannot_work_the_message_says_what_does(source: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Feed(source, **{"batch_size": 2, "batch_transform": lambda batch: batch, **options})


def test_a_mix_cannot_have_it() -> None:
    feeds = {name: Feed(doubles, splits=[1, 2], batch_size=2) for name in "ab"}
    with pytest.raises(ValueError, match=r"batch_transform= is not for Feed.mix: let its feeds yield whole batches"):
        Feed.mix(feeds, batch_transform=lambda batch: batch)
    feeds["c"] = Feed(doubles, splits=[1, 2], batch_size=2, batch_transform=lambda batch: batch)
    with pytest.raises(ValueError, match=r"c sets batch_transform=.*, which is not for Feed.mix: let its feeds yield"):
        Feed.mix(feeds)
