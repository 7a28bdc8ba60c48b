"""A keyed permutation of range(n) that computes any single position of the shuffled order directly.

Up to 4096 positions the order is materialized: the positions are sorted by 64-bit random numbers, so every order is
equally likely, as far as these numbers are random. Longer orders are never materialized. A Feistel network over Z_a x
Z_a, with an even a of at least sqrt(n), permutes range(a * a); a value outside range(n) goes through the network again
until it falls inside (cycle walking; this is rare, since a * a is hardly more than n). See Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002. With an odd a every round would be an even permutation, and for n = a * a
half of all orders would be impossible. The random numbers are those of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
This is not a cipher: the order only has to look shuffled.

The order of a feed's stream depends on these values. So this file does not use `numpy.random`, whose streams may
change.
"""

from __future__ import annotations

import functools
import hashlib
import math
from typing import overload

import numpy as np
import numpy.typing as npt

_MATERIALIZED = 4096
"""The longest order to materialize. It takes 0.1 ms and 32 KiB; one position of a network takes 4 us."""

_ROUNDS = 12
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1


def make_key(*parts: int | str) -> int:
    """Return a 64-bit key for whole numbers and words, such as `make_key(seed, epoch, "splits")`."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@overload
def permute(key: int, n: int, i: int) -> int: ...


@overload
def permute(key: int, n: int, i: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]: ...


def permute(key: int, n: int, i: int | npt.NDArray[np.integer]) -> int | npt.NDArray[np.int64]:
    """Return the value at position `i` of the order of range(n) for `key`.

    Args:
        key: 64 bits, see `make_key`.
        n: 1 to 2**62.
        i: a position in range(n), or an array of positions of any shape and integer dtype.

    Returns:
        An int, or an int64 array of the shape of `i`.

    Raises:
        IndexError: a position outside range(n).
    """
    if isinstance(i, np.ndarray):
        if i.size and (int(i.min()) < 0 or int(i.max()) >= n):
            raise IndexError(f"a position outside range({n})")
        return whole_order(key, n)[i] if n <= _MATERIALIZED else _walk_array(_round_keys(key), n, _side(n), i)
    if not 0 <= i < n:
        raise IndexError(f"position {i} is outside range({n})")
    if n <= _MATERIALIZED:
        return int(_kept_order(key, n)[i])
    keys, side = _round_keys(key), _side(n)
    value = _pass(keys, side, i)
    while value >= n:
        value = _pass(keys, side, value)
    return value


def uniform(key: int, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Return a random number in [0, 1) for each position, which depends only on `key` and the position.

    Args:
        key: 64 bits, see `make_key`.
        positions: 0 to 2**62, of any shape and integer dtype.
    """
    z = positions.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    found: npt.NDArray[np.float64] = (_mixed(z) >> np.uint64(11)).astype(np.float64)
    return found * 2.0**-53


def whole_order(key: int, n: int) -> npt.NDArray[np.int64]:
    """Return an order of range(n) for `key`, int64 [n]. `permute` has the same order only if it materializes it."""
    # The sort need not be stable: the n numbers are all different.
    z = np.arange(1, n + 1, dtype=np.uint64)
    z *= np.uint64(_GOLDEN)
    z += np.uint64(key)
    return np.argsort(_mixed(z)).astype(np.int64, copy=False)


_kept_order = functools.lru_cache(maxsize=64)(whole_order)
"""Keeps orders for single positions, which are requested often."""


def _side(n: int) -> int:
    """Return the side of the network's square: even, with at least n values in the square."""
    side = math.isqrt(n - 1) + 1
    return side + side % 2


@functools.lru_cache(maxsize=256)
def _round_keys(key: int) -> tuple[int, ...]:
    return tuple(_mix((key + (number + 1) * _GOLDEN) & _MASK) for number in range(_ROUNDS))


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * _MULTIPLY_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLY_2) & _MASK
    return z ^ (z >> 31)


def _pass(keys: tuple[int, ...], side: int, value: int) -> int:
    left, right = divmod(value, side)
    for key in keys:
        left, right = right, (left + _mix((right + key) & _MASK)) % side
    return left * side + right


def _walk_array(keys: tuple[int, ...], n: int, side: int, i: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    result = _pass_array(keys, side, i.astype(np.uint64).reshape(-1))
    outside = np.flatnonzero(result >= n)
    while outside.size:
        again = _pass_array(keys, side, result[outside])
        result[outside] = again
        outside = outside[again >= n]
    return result.astype(np.int64).reshape(i.shape)


def _pass_array(keys: tuple[int, ...], side: int, value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    width = np.uint64(side)
    left, right = value // width, value % width
    for key in keys:
        # Reduce before the sum, which must not wrap at 2**64.
        left, right = right, (left + _mixed(right + np.uint64(key)) % width) % width
    return left * width + right


def _mixed(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply `_mix` to each value of `z`, in place."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MULTIPLY_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MULTIPLY_2)
    z ^= z >> np.uint64(31)
    return z
