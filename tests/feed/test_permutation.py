"""The keyed permutation and the seeds are one to one, well mixed, the same for arrays and single numbers, and never
change."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.shuffling.permutation import make_key, permute
from penstock_server.worker.isolation.randomness import GlobalRandomness, GlobalState, generator, seeds

KEYS = st.integers(0, 2**64 - 1)


@given(KEYS, st.integers(1, 3000))
def test_every_position_holds_another_value(key: int, n: int) -> None:
    assert sorted(permute(key, n, np.arange(n)).tolist()) == list(range(n))


@given(KEYS, st.integers(1, 2**62), st.data())
def test_arrays_and_single_positions_agree(key: int, n: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=5))
    values = permute(key, n, np.array(positions, np.int64))
    assert values.tolist() == [permute(key, n, i) for i in positions]
    assert all(0 <= value < n for value in values.tolist())


def test_the_values_never_change() -> None:
    # Streams, and the checkpoints of their trainers, depend on these.
    assert make_key(7, 3, "splits") == 0xE210361F1243AB64
    assert permute(1, 10, np.arange(10)).tolist() == [8, 4, 3, 7, 0, 1, 5, 9, 6, 2]
    assert (permute(4, 4096, 17), permute(4, 4097, 17)) == (2197, 21)  # materialized, and not
    assert [permute(2, 10**8, i) for i in range(3)] == [10809172, 7762714, 44546620]
    assert permute(3, 2**62, 2**61) == 4112300675512271296


def test_keys_differ_in_every_part() -> None:
    parts = [(7, 3, "splits"), (7, 4, "splits"), (8, 3, "splits"), (7, 3, "index"), (73, "splits"), ("7", 3, "splits")]
    assert len({make_key(*each) for each in parts}) == len(parts)


def orders(n: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return `count` orders of range(n), one in each row, each with its own key."""
    return np.array([permute(make_key(seed, 0, "splits"), n, np.arange(n)) for seed in range(count)])


def too_far_off(counts: Any, expected: float, degrees: int, spread: float = 1.0) -> float:
    """Return chi-square, in standard deviations from its mean. The keys are fixed, so no test fails by chance."""
    chi_square = float(((np.asarray(counts) - expected) ** 2 / expected).sum()) / spread
    return (chi_square - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_few_splits_come_in_every_order_equally_often(n: int) -> None:
    keys = 6_000
    counts = Counter(map(tuple, orders(n, keys).tolist()))
    every = [counts[order] for order in itertools.permutations(range(n))]
    assert sum(every) == keys
    assert too_far_off(every, keys / len(every), len(every) - 1) < 4


@pytest.mark.parametrize("n", [*range(3, 20), 24, 25, 48, 49, 64, 65, 99, 100, 121, 255])
def test_every_value_comes_to_every_position_beside_every_other_equally_often(n: int) -> None:
    keys = 2_000
    seen = orders(n, keys)
    places, pairs = np.zeros((n, n)), np.zeros((n, n))
    for row in seen:
        places[np.arange(n), row] += 1
        pairs[row[:-1], row[1:]] += 1
    # No value comes twice in an order, so the counts vary more than free ones: by n / (n - 1).
    assert too_far_off(places, keys / n, (n - 1) ** 2, n / (n - 1)) < 4
    assert too_far_off(pairs[~np.eye(n, dtype=bool)], keys / n, (n - 1) ** 2) < 4


@pytest.mark.parametrize("n", [2, 3, 8, 9, 24, 25, 48, 49, 121, 4096, 4225])
def test_half_of_all_orders_are_even(n: int) -> None:
    keys = 1_000 if n < 1_000 else 100
    even = sum((n - cycles(order)) % 2 == 0 for order in orders(n, keys).tolist())
    assert abs(even - keys / 2) < 4 * math.sqrt(keys) / 2


def cycles(order: list[int]) -> int:
    """Return the number of cycles that the permutation has."""
    count, left = 0, set(order)
    while left:
        count, at = count + 1, left.pop()
        while (at := order[at]) in left:
            left.remove(at)
    return count


@pytest.mark.parametrize("n", [4_097, 4_225, 10_000])
def test_orders_that_are_not_written_out_are_mixed_as_well(n: int) -> None:
    keys, bins = 4_000, 8
    first = np.array([permute(make_key(seed, 1, "splits"), n, np.array([0, 1, n - 1])) for seed in range(keys)])
    bin_of = first * bins // n
    for a, b in ((0, 1), (0, 2), (1, 2)):
        counts = np.bincount(bin_of[:, a] * bins + bin_of[:, b], minlength=bins * bins)
        assert too_far_off(counts, keys / bins**2, bins**2 - 1) < 4


def test_neighbours_are_torn_apart() -> None:
    values = permute(5, 100_000, np.arange(100_000))
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.02
    assert abs(float(np.corrcoef(values, np.arange(100_000))[0, 1])) < 0.02


def test_one_position_of_very_many_is_computed_without_the_others() -> None:
    assert len({permute(1, 10**15, i) for i in range(1000)}) == 1000


@pytest.mark.parametrize("i", [-1, 10])
def test_a_position_outside_is_refused(i: int) -> None:
    with pytest.raises(IndexError, match="outside range"):
        permute(1, 10, i)
    with pytest.raises(IndexError, match="outside range"):
        permute(1, 10, np.array([0, i]))


# --- seeds ---


def drawn(seed: int, epoch: int, number: int) -> list[float]:
    """Return the first random number of each kind of user code: of `rng`, a split, a batch, and a list of splits."""
    found = [float(generator(seed, epoch, number).random())]
    randomness = GlobalRandomness()
    for begin in (
        lambda: randomness.use(GlobalState(seeds("split", seed, epoch, number))),
        lambda: randomness.seed(seed, epoch, number),
        lambda: randomness.seed(seed, epoch),
    ):
        begin()
        found += [random.random(), float(np.random.random())]
    return found


def test_seeds_are_of_one_seed_one_epoch_and_one_split_alone() -> None:
    numbers = [0, 1, 5, 2**32, 2**32 + 1, 5 * 2**32, 2**62]
    every = list(itertools.product(numbers, numbers, numbers))
    purposes = ("rng", "split", "batch")
    states = {seeds(purpose, *each).generate_state(4).tobytes() for purpose in purposes for each in every}
    assert len(states) == len(purposes) * len(every)
    assert set(drawn(2**32, 5, 0)).isdisjoint(drawn(0, 1, 5))
    assert len({value for seed in (0, 2**32) for value in drawn(seed, 1, 2)}) == 14


def test_seeds_never_change() -> None:
    assert [round(value, 6) for value in drawn(7, 3, 11)] == [
        0.383911,  # rng
        *(0.747044, 0.105406),  # random and numpy.random of a split
        *(0.06668, 0.487258),  # of a batch
        *(0.893733, 0.842716),  # of a list of splits
    ]
