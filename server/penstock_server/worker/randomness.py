"""Seeds for user code, and the global random states of generators that do not take `rng`.

`random` and `numpy.random` have one state per process, but many splits are open at once. So each split has a state of
its own, which is restored when its generator continues. (Exchanging NumPy's bit generator would be faster, but it loses
the second half of a pair of normal deviates, and the stream would depend on how lanes share workers.) The state of
PyTorch's CPU generator is handled in the same way if user code has imported torch; this file does not import it.

All seeds come from `seeds`, which names their purpose.
"""

from __future__ import annotations

import hashlib
import random
import sys
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

States: TypeAlias = tuple[Any, Any, Any]
"""The states of `random`, `numpy.random` and torch (None if torch is not imported)."""


def seeds(purpose: str, *numbers: int) -> np.random.SeedSequence:
    """Return seeds for one purpose, such as `seeds("rng", seed, epoch, split)`.

    They come from a 128-bit hash of all parts. A `SeedSequence` of the numbers themselves would cut each into 32-bit
    words and forget where one ends: [2**32, 5, 0] and [0, 1, 5] would give the same seeds.
    """
    text = " ".join((purpose, *map(str, numbers)))
    return np.random.SeedSequence(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little"))


def generator(seed: int, epoch: int, split: int) -> np.random.Generator:
    """Return the `rng` of a split; `split` is its index in the list of splits."""
    return np.random.default_rng(seeds("rng", seed, epoch, split))


class GlobalState:
    """The states of `random`, `numpy.random` and torch that belong to one split. They begin as `sequence` seeds
    them."""

    __slots__ = ("_saved", "_sequence")

    def __init__(self, sequence: np.random.SeedSequence) -> None:
        self._sequence = sequence
        self._saved: States | None = None

    def _put(self) -> None:
        if self._saved is None:
            seed_all(self._sequence)
        else:
            put_states(self._saved, self._sequence)

    def _take(self) -> None:
        self._saved = take_states()


class GlobalRandomness:
    """Decides whose states are active in `random`, `numpy.random` and torch in this process."""

    def __init__(self) -> None:
        self._owner: GlobalState | None = None

    def use(self, state: GlobalState | None) -> None:
        """Save the present owner's state and restore `state`. None means no owner, for code that has its own `rng`.

        Takes about 80 us when the owner changes (with torch 3 us more), and no time otherwise.
        """
        if state is self._owner:
            return
        if self._owner is not None:
            self._owner._take()
        if state is not None:
            state._put()
        self._owner = state

    def seed(self, seed: int, epoch: int, batch: int | None = None) -> None:
        """Seed for one batch of an indexable feed, or, with None, for the function that lists the splits."""
        self.use(None)
        seed_all(seeds("list", seed, epoch) if batch is None else seeds("batch", seed, epoch, batch))


def seed_all(sequence: np.random.SeedSequence) -> None:
    """Seed the global generators of this process."""
    words = sequence.generate_state(8)
    random.seed(int.from_bytes(words[:4].tobytes(), "little"))
    np.random.seed(words[4:])
    _seed_torch(sequence)


def take_states() -> States:
    """Return the states of the global generators."""
    torch = _torch()
    return random.getstate(), np.random.get_state(legacy=False), None if torch is None else torch.get_state()


def put_states(states: States, sequence: np.random.SeedSequence, imported: ModuleType | None = None) -> None:
    """Restore what `take_states` returned; if torch has been imported since, seed it with `sequence`.

    `imported` is a module that has just been run.
    """
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is None:
        _seed_torch(sequence, imported)
    elif (torch := _torch()) is not None:
        torch.set_state(states[2])


def _seed_torch(sequence: np.random.SeedSequence, imported: ModuleType | None = None) -> None:
    if (torch := _torch(imported)) is not None:
        torch.manual_seed(int(sequence.generate_state(9)[8]))


def _torch(imported: ModuleType | None = None) -> Any:
    """Return PyTorch's generator for the CPU, if torch is imported. (torch.manual_seed() seeds GPUs too: 150 us.)"""
    module = sys.modules.get("torch")
    if module is None or (
        module is not imported and getattr(getattr(module, "__spec__", None), "_initializing", False)
    ):
        return None  # the generator of a half-imported torch crashes
    return getattr(module, "default_generator", None)
