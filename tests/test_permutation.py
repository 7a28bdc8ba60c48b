"""The keyed permutation: one to one, mixed, the same for arrays and single numbers, and never to change."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_server.permutation import make_key, permute

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
    # Streams, and the checkpoints of their trainers, stand on these.
    assert make_key(7, 3, "splits") == 0xE210361F1243AB64
    assert permute(1, 10, np.arange(10)).tolist() == [9, 7, 0, 8, 5, 1, 2, 3, 6, 4]
    assert [permute(2, 10**8, i) for i in range(3)] == [10809172, 7762714, 44546620]
    assert permute(3, 2**62, 2**61) == 4112300675512271296


def test_keys_differ_in_every_part() -> None:
    parts = [(7, 3, "splits"), (7, 4, "splits"), (8, 3, "splits"), (7, 3, "index"), (73, "splits"), ("7", 3, "splits")]
    assert len({make_key(*each) for each in parts}) == len(parts)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_splits_come_in_every_order_equally_often(n: int) -> None:
    keys = 6_000
    orders = Counter(tuple(permute(make_key(seed, 0, "splits"), n, i) for i in range(n)) for seed in range(keys))
    every = list(itertools.permutations(range(n)))
    expected = keys / len(every)
    chi_square = sum((orders[order] - expected) ** 2 / expected for order in every)
    assert chi_square < 60  # 23 degrees of freedom at most: one seed in 10,000 is worse


@pytest.mark.parametrize("n", [5, 9, 10])
def test_every_value_comes_to_every_position_equally_often(n: int) -> None:
    keys = 4_000
    seen = np.zeros((n, n))
    for seed in range(keys):
        seen[np.arange(n), permute(make_key(seed, 0, "splits"), n, np.arange(n))] += 1
    expected = keys / n
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    assert chi_square < 160  # 81 degrees of freedom for n = 10


def test_neighbours_are_torn_apart() -> None:
    values = permute(5, 100_000, np.arange(100_000))
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.02
    assert abs(float(np.corrcoef(values, np.arange(100_000))[0, 1])) < 0.02


def test_one_position_of_many_is_cheap() -> None:
    start = time.perf_counter()
    for i in range(1000):
        permute(1, 10**15, i)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("i", [-1, 10])
def test_a_position_outside_is_refused(i: int) -> None:
    with pytest.raises(IndexError, match="outside range"):
        permute(1, 10, i)
    with pytest.raises(IndexError, match="outside range"):
        permute(1, 10, np.array([0, i]))
