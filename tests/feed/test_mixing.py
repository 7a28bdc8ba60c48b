"""Penstock's statement about how well a feed mixes, compared with what the feed's order gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_server import Feed, Shuffle
from penstock_server.feed.feed_warnings import mixing_warning
from penstock_server.feed.options.shuffle_quality import mixing

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import mixing_model


def rows(split: int) -> Iterator[Any]:
    yield split


def endless() -> Iterator[Any]:
    yield 1


def plan_of(n_splits: int, **options: Any) -> Any:
    shuffle = Shuffle(options.pop("shuffle", 10_000), interleave=options.pop("interleave", None))
    options = {"batch_size": 32, "shuffle": shuffle, **options}
    return Feed(rows, splits=range(n_splits), **options).plan("train")


@pytest.mark.parametrize("pool", [1, 3, 16])
@pytest.mark.parametrize(
    ("n_splits", "each", "options"),
    [
        (64, 200, {}),
        (16, 1000, {}),
        (1000, 200, {}),
        (1000, 200, {"shuffle": 1000}),
        (64, 400, {"lanes": 4}),
        (300, 50, {"batch_size": 8, "shuffle": 2000, "interleave": 3}),
        (40, 100, {"batch_size": 4, "shuffle": 40_000}),
    ],
)
def test_what_is_said_is_what_the_order_has(n_splits: int, each: int, options: dict[str, int], pool: int) -> None:
    plan = plan_of(n_splits, **options)
    said = mixing(plan, n_splits, n_splits * each, pool)
    assert said is not None
    sizes = np.full(n_splits, each)
    measured = mixing_model.mixing(
        mixing_model.penstock_order(plan, sizes, turn=2, pool=pool), sizes, batch_size=plan.batch_size, window=800
    )
    assert said.splits == pytest.approx(measured.splits, rel=0.15)
    full = mixing_model.mixing(mixing_model.full_order(n_splits * each), sizes, batch_size=plan.batch_size, window=800)
    assert said.full == pytest.approx(full.splits, rel=0.05)


def test_few_splits_to_mix_are_warned_of_with_what_each_change_would_give() -> None:
    assert mixing_warning(plan_of(64), 64, pool=1) == (
        "feed train: a batch of 32 has samples of 4 of its 64 splits; a full shuffle would have 25. To mix more: "
        "divide each split into 4 (row ranges, say) and give shuffle=Shuffle(10000, interleave=16), for 14 in a batch; "
        "or lanes=8, for 8 in a batch (at most 8 workers can work then); or lanes=4, for 14 in a batch (at most 4 "
        "workers can work then)"
    )
    assert "shuffle=Shuffle(1000, interleave=16), for 14 in a batch (each lane then has 16 open)" in str(
        mixing_warning(plan_of(1000, shuffle=1000), 1000, pool=1)
    )


@pytest.mark.parametrize(
    ("changed", "n_splits", "said"),
    [({"interleave": 16}, 256, 14), ({"lanes": 8}, 64, 8), ({"lanes": 4}, 64, 14)],
)
def test_the_advice_gives_what_it_says(changed: dict[str, int], n_splits: int, said: int) -> None:
    found = mixing(plan_of(n_splits, **changed), n_splits)
    assert found is not None
    assert round(found.splits) == said
    sizes = np.full(n_splits, 12_800 // n_splits)
    order = mixing_model.penstock_order(plan_of(n_splits, **changed), sizes, turn=4, pool=1)
    assert mixing_model.mixing(order, sizes, batch_size=32, window=800).splits == pytest.approx(said, rel=0.15)


def test_nothing_is_said_where_there_is_nothing_to_mix() -> None:
    assert mixing_warning(plan_of(1000), 1000, pool=1) is None
    assert mixing_warning(plan_of(64, batch_size=4, shuffle=100), 64, pool=1) is None
    assert mixing_warning(plan_of(64), 64, pool=16) is None
    assert mixing(plan_of(2, shuffle=0), 2) is None
    assert mixing(Feed(["a"], batch_size=4, shuffle=3).plan("train"), 0) is None
    assert mixing(Feed(endless, batch_size=4, shuffle=3).plan("train"), 1) is None
    shared = Feed(endless, transform=abs, batch_size=4, shuffle=3).plan("train")
    assert mixing(shared, 16) is None


def test_ready_made_batches_are_not_said_to_mix() -> None:
    found = mixing(plan_of(64, batch_size=None, shuffle=100), 64)
    assert found is not None
    assert not found.poor
    assert "its batches are ready-made, so none mixes splits" in found.text


def test_of_an_endless_feed_no_number_of_segments_is_named() -> None:
    plan = Feed(endless, segment=10, batch_size=4, shuffle=50).plan("train")
    found = mixing(plan, 2**62)
    assert found is not None
    assert found.text == "a batch of 4 has samples of 2.7 segments; a full shuffle would have 4"
    assert found.advice == ()
