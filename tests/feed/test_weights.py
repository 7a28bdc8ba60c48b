"""`Feed(weights=)`: items of an indexable object are drawn in proportion to weights, exactly and from any position."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_server import Feed, Weights
from penstock_server.shuffling.weighted_order import WeightedOrder, _minus_log
from tests.conftest import Serve
from tests.reference.one_stream import one_stream


def order(weights: Any, length: int, *, seed: int = 0, epoch: int = 0, replacement: bool = True) -> list[int]:
    made = WeightedOrder(seed, epoch, length, np.array(weights, float), replacement=replacement)
    return made.at(0, length).tolist()


def test_items_come_in_proportion_to_their_weights() -> None:
    weights = [0, 1, 2, 0, 5, 0.5, 0]
    counts = Counter(order(weights, 100_000))
    assert {*counts} == {1, 2, 4, 5}
    for item, weight in enumerate(weights):
        assert abs(counts[item] / 100_000 - weight / 8.5) < 0.006


def test_without_replacement_each_comes_once_and_heavy_ones_early() -> None:
    weights = np.r_[np.ones(500), np.full(500, 50.0), 0]
    drawn = order(weights, 1000, replacement=False)
    assert sorted(drawn) == list(range(1000))
    assert sum(item >= 500 for item in drawn[:500]) > 450
    # With equal weights every order is equally likely.
    firsts = Counter(order(np.ones(4), 1, epoch=epoch, replacement=False)[0] for epoch in range(4000))
    assert max(firsts.values()) - min(firsts.values()) < 200


def test_any_part_of_the_order_can_be_made_alone() -> None:
    weights = np.arange(50)
    for replacement in (True, False):
        made = WeightedOrder(3, 1, 49, weights.astype(float), replacement=replacement)
        whole = made.at(0, 49).tolist()
        assert made.at(17, 31).tolist() == whole[17:31]
        assert order(weights, 49, seed=3, epoch=2, replacement=replacement) != whole
        assert order(weights, 49, seed=4, epoch=1, replacement=replacement) != whole


def test_the_order_never_changes() -> None:
    weights = [1, 3, 2, 5, 0, 1]
    assert order(weights, 12, seed=7) == [1, 3, 1, 1, 1, 1, 0, 1, 0, 3, 1, 3]
    assert order(weights, 5, seed=7, replacement=False) == [3, 2, 5, 0, 1]


def test_the_logarithm_is_one() -> None:
    numbers = np.r_[np.linspace(1e-16, 1, 10_001), 2.0 ** -np.arange(54)]
    np.testing.assert_allclose(_minus_log(numbers), -np.log(numbers), rtol=1e-12, atol=1e-15)
    assert (np.diff(_minus_log(np.linspace(0.49, 0.51, 100_001))) < 0).all()


FEEDS = """
import numpy as np
from penstock_server import Feed, Weights

class Rows:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return index

def noisy(index, rng):
    return index, rng.integers(1 << 30)

weights = np.r_[np.ones(90), np.full(10, 81.0)]
feed = Feed(Rows(), batch_size=8, weights=weights, seed=5, transform=noisy)
once = Feed(Rows(), batch_size=8, weights=Weights(weights, replacement=False), samples=40, epochs=2)
"""


def test_the_stream_is_the_same_with_any_workers_through_a_kill_and_a_resume(tmp_path: Any, serve: Serve) -> None:
    batches = one_stream(serve, FEEDS, tmp_path)
    rows = np.concatenate([rows for rows, _ in batches])
    noise = np.concatenate([noise for _, noise in batches])
    assert len(rows) % 100 == 0, "an epoch has as many draws as there are items"
    assert (rows >= 90).mean() > 0.8
    assert len({*noise.tolist()}) == len(noise), "an item that is drawn twice is augmented twice"


def test_an_epoch_without_replacement_has_as_many_samples_as_asked_for(tmp_path: Any) -> None:
    (tmp_path / "drawn_once.py").write_text(FEEDS)  # a name of its own, as the module stays loaded
    with penstock.connect(f"{tmp_path / 'drawn_once.py'}:once", workers=0) as connection:
        assert connection.info.samples == 40
        epochs = [np.concatenate([*connection.batches()]).tolist() for _ in range(2)]
    for epoch in epochs:
        assert len({*epoch}) == len(epoch) == 40
        assert {*range(90, 100)} < {*epoch}
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1, 2]}, r"weights= has 2 numbers, and the indexable object 3 items"),
        ({"weights": [1, -1, 1]}, r"weights must be 0 or more, and item 1 has -1\.0"),
        ({"weights": [1, float("nan"), 1]}, r"item 1 has nan"),
        ({"weights": [0, 0, 0]}, r"the sum of all weights must be a number above 0"),
        ({"weights": "abc"}, r"weights must be numbers, one for each item, got 'abc'"),
        ({"weights": [[1, 2, 3]]}, r"one for each item, got the shape \(1, 3\)"),
        (
            {"weights": Weights([1, 1, 0], replacement=False), "samples": 3},
            r"cannot be drawn without replacement: 2 it",
        ),
        ({"weights": [1, 1, 1], "drop_remainder": True, "batch_size": 4}, r"drop the whole epoch: it has 3 samples"),
    ],
)
def test_weights_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Feed([5, 6, 7], **{"batch_size": 2, **options})


def test_a_generator_has_no_weights() -> None:
    with pytest.raises(ValueError, match=r"weights= is for indexable objects .* Feed\.mix has weights for feeds"):
        Feed(lambda split: iter([split]), splits=[1, 2], weights=[1, 2], batch_size=2)


def test_weights_are_shown_short_and_tell_feeds_apart() -> None:
    feed = Feed([5, 6, 7], batch_size=2, weights=[1, 2, 3])
    assert repr(feed) == "Feed([5, 6, 7], batch_size=2, weights=Weights(<3 numbers>))"
    other = Feed([5, 6, 7], batch_size=2, weights=[1, 2, 4])
    assert feed.plan("a") != other.plan("a")
