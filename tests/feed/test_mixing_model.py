"""The model of the order in benchmarks/mixing_model.py matches real streams."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock_server import Feed, Leaf, Shuffle

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from mixing_model import mixing, penstock_order, tfdata_order

SIZES = [7, 0, 31, 1, 16, 64, 5, 12, 3, 40, 2, 9]
STARTS = [sum(SIZES[:split]) for split in range(len(SIZES))]


def numbers(split: int) -> Iterator[np.int64]:
    for number in range(SIZES[split]):
        yield np.int64(STARTS[split] + number)


@pytest.mark.parametrize(
    "options",
    [
        {"turn": 3, "lanes": 5},
        {"lanes": 16},
        {"turn": 1, "lanes": 5, "shuffle": Shuffle(100, interleave=2)},
        {"turn": 2, "lanes": 3, "shuffle": Shuffle(64, interleave=9), "seed": 4},
        {"lanes": 2, "shuffle": 10},
        {"lanes": 1, "shuffle": 1000},
    ],
)
def test_a_modelled_order_is_that_of_the_stream(options: dict[str, int]) -> None:
    feed = Feed(numbers, splits=range(len(SIZES)), batch_size=4, spec=Leaf("int64", ()), **options)
    with penstock.connect(feed, workers=0) as connection:
        for epoch in range(2):
            stream = np.concatenate(list(connection.batches()))
            modelled = penstock_order(
                feed.plan("feed"), np.array(SIZES), connection.info.turn, connection.info.pool, epoch
            )
            assert stream.tolist() == modelled.tolist()


def test_figures_of_orders_whose_mixing_is_known() -> None:
    sizes = np.full(8, 100)
    in_order = mixing(np.arange(800), sizes, batch_size=10, window=100)
    assert in_order.splits == 1
    assert in_order.spread == pytest.approx(100 * 799 / 700)
    one_of_each = mixing(np.arange(800).reshape(8, 100).T.reshape(-1), sizes, batch_size=8, window=80)
    assert (one_of_each.splits, one_of_each.spread) == (8, 0)
    shuffled = mixing(np.random.default_rng(1).permutation(80_000), np.full(8, 10_000), batch_size=8, window=800)
    assert shuffled.splits == pytest.approx(8 * (1 - (7 / 8) ** 8), abs=0.02)
    assert shuffled.spread == pytest.approx(1, abs=0.2)


def test_every_sample_comes_once_in_an_order_of_tf_data() -> None:
    sizes = np.array(SIZES)
    for buffer in (0, 1, 50, 1000):
        order = tfdata_order(sizes[sizes > 0], cycle=3, buffer=buffer)
        assert sorted(order.tolist()) == list(range(sum(SIZES)))
