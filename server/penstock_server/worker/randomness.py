"""The seeds of user code, and the global random states of generators that do not ask for `rng`.

`random` and `numpy.random` have one state in a process, but many splits are open at once. So each split has a state of
its own, put in place whole when its generator goes on. (Exchanging NumPy's bit generator is faster, but loses the
second half of a pair of normal deviates, and the stream would depend on how lanes share workers.)

All seeds come from `seeds`, which says what they are for.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np


def seeds(purpose: str, *numbers: int) -> np.random.SeedSequence:
    """Seeds for one purpose, such as `seeds("rng", seed, epoch, split)`.

    They come from a 128-bit hash of all parts. A `SeedSequence` of the numbers themselves would cut each into 32-bit
    words and forget where one ends: of [2**32, 5, 0] and [0, 1, 5] it makes the same seeds.
    """
    text = " ".join((purpose, *map(str, numbers)))
    return np.random.SeedSequence(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def generator(seed: int, epoch: int, split: int) -> np.random.Generator:
    """The `rng` of a split, `split` being its index in the list of splits."""
    return np.random.default_rng(seeds("rng", seed, epoch, split))


class GlobalState:
    """The states of `random` and `numpy.random` that belong to one split."""

    __slots__ = ("_saved", "_sequence")

    def __init__(self, seed: int, epoch: int, split: int) -> None:
        self._sequence = seeds("split", seed, epoch, split)
        self._saved: tuple[Any, Any] | None = None

    def _put(self) -> None:
        if self._saved is None:
            _seed(self._sequence)
        else:
            random.setstate(self._saved[0])
            np.random.set_state(self._saved[1])

    def _take(self) -> None:
        self._saved = random.getstate(), np.random.get_state(legacy=False)


class GlobalRandomness:
    """Whose turn it is to use `random` and `numpy.random` in this process."""

    def __init__(self) -> None:
        self._owner: GlobalState | None = None

    def use(self, state: GlobalState | None) -> None:
        """Put `state` in place, and keep that of the owner until now. None: nobody's, for code that has its own `rng`.

        Costs some 80 us when the owner changes, and nothing otherwise.
        """
        if state is self._owner:
            return
        if self._owner is not None:
            self._owner._take()
        if state is not None:
            state._put()
        self._owner = state

    def seed(self, seed: int, epoch: int, batch: int | None = None) -> None:
        """Seed afresh for one batch of an indexable feed, or, with None, for the function that lists the splits."""
        self.use(None)
        _seed(seeds("list", seed, epoch) if batch is None else seeds("batch", seed, epoch, batch))


def _seed(sequence: np.random.SeedSequence) -> None:
    words = sequence.generate_state(8)
    random.seed(int.from_bytes(words[:4].tobytes(), "little"))
    np.random.seed(words[4:])
