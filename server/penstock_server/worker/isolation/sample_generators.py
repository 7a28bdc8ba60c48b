"""The random generators of samples that follow each other. 32 are made at once.

They are those of `np.random.default_rng(seeds(...))`. NumPy computes the words of one `SeedSequence` and then of its
`PCG64`, each as a Python object: 6 us a sample. This file computes the words of many samples with arrays. NumPy
promises not to change these algorithms.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.random.bit_generator import ISpawnableSeedSequence

from .randomness import digest, seeds

Words: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_AHEAD = 32
"""How many samples to compute at once."""


class SampleGenerators:
    """The generators for one purpose, such as "transform rng"."""

    def __init__(self, purpose: str, seed: int) -> None:
        self._purpose = purpose
        self._seed = seed
        self._split = (-1, -1)
        self._first = self._next = 0
        self._ready: list[tuple[bytes, Words]] = []

    def of(self, epoch: int, split: int, number: int) -> np.random.Generator:
        """Return the generator of a sample, `default_rng(seeds(purpose, seed, epoch, split, number))`."""
        if self._split != (epoch, split) or not self._first <= number <= self._next:
            self._split, self._first, self._next, self._ready = (epoch, split), number + 1, number + 1, []
            return np.random.default_rng(seeds(self._purpose, self._seed, epoch, split, number))
        if number == self._next:  # the one after the last
            self._first, self._next = number, number + _AHEAD
            hashes = [digest(self._purpose, self._seed, epoch, split, place) for place in range(number, self._next)]
            entropy = np.frombuffer(b"".join(hashes), "<u4").reshape(-1, 4)
            self._ready = [*zip(hashes, _states(entropy), strict=True)]
        return np.random.Generator(np.random.PCG64(_Seeds(*self._ready[number - self._first])))


class _Seeds(ISpawnableSeedSequence):
    """A `SeedSequence` whose words for a PCG64 are computed already."""

    __slots__ = ("_entropy", "_sequence", "_words")

    def __init__(self, entropy: bytes, words: Words) -> None:
        self._entropy = entropy
        self._words = words
        self._sequence: np.random.SeedSequence | None = None

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Words:
        if n_words == 4 and dtype is np.uint64:
            return self._words
        return self._whole().generate_state(n_words, dtype)

    def spawn(self, n_children: int) -> list[Any]:
        return self._whole().spawn(n_children)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole(), name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return self._whole().__reduce__()

    def _whole(self) -> np.random.SeedSequence:
        if self._sequence is None:
            self._sequence = np.random.SeedSequence(int.from_bytes(self._entropy, "little"))
        return self._sequence


def _powers(first: int, factor: int, count: int) -> Words:
    return np.array([[first * pow(factor, k, 1 << 32) & 0xFFFFFFFF] for k in range(count)], np.uint32)


# The constants of NumPy's SeedSequence.
_TO_POOL = _powers(0x43B0D7E5, 0x931E8875, 17)
_FROM_POOL = _powers(0x8B51F9DD, 0x58F38DED, 9)
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_OTHERS = ([1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2])


def _states(entropy: Words) -> Words:
    """Return `SeedSequence(row).generate_state(4, np.uint64)` for each row of 4 words."""
    pool = _hashed(entropy.T, _TO_POOL[:5])
    for source, others in enumerate(_OTHERS):
        constants = _TO_POOL[4 + 3 * source : 8 + 3 * source]
        pool[others] = _folded(_LEFT * pool[others] - _RIGHT * _hashed(pool[source], constants))
    words: Words = np.ascontiguousarray(_hashed(np.concatenate((pool, pool)), _FROM_POOL).T)
    return words.view(np.uint64)


def _hashed(words: Words, constants: Words) -> Words:
    return _folded((words ^ constants[:-1]) * constants[1:])


def _folded(words: Words) -> Words:
    folded: Words = words ^ (words >> np.uint32(16))
    return folded
