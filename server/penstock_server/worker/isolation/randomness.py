"""Seeds for user code, and the global state of each generator: its random states, settings and context variables.

`random` and `numpy.random` have one state per process, but many splits are open at once. So each split has a state of
its own, which is restored when its generator continues. (Exchanging NumPy's bit generator would be faster, but it loses
the second half of a pair of normal deviates, and the stream would depend on how lanes share workers.) The state of
PyTorch's CPU generator is handled in the same way if user code has imported torch; this file does not import it. The
same goes for settings such as the working directory (`process_settings.py`), and for context variables
(`context_variables.py`).

All seeds come from `seeds`, which names their purpose.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from contextvars import Context
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from . import state_memory
from .context_variables import Variables
from .process_settings import Held, Values, are, present, put_aside, put_back

States: TypeAlias = tuple[Any, Any, Any]
"""The states of `random`, `numpy.random` and torch (None if torch is not imported)."""


_NEUTRAL = np.random.SeedSequence(0x6E65757472616C)


def seeds(purpose: str, *numbers: int) -> np.random.SeedSequence:
    """Return seeds for one purpose, such as `seeds("rng", seed, epoch, split)`.

    They come from a 128-bit hash of all parts. A `SeedSequence` of the numbers themselves would cut each into 32-bit
    words and forget where one ends: [2**32, 5, 0] and [0, 1, 5] would give the same seeds.
    """
    return np.random.SeedSequence(int.from_bytes(digest(purpose, *numbers), "little"))


def digest(purpose: str, *numbers: int) -> bytes:
    """Return the hash for `seeds`."""
    return hashlib.blake2b(" ".join((purpose, *map(str, numbers))).encode(), digest_size=16).digest()


def generator(seed: int, epoch: int, split: int) -> np.random.Generator:
    """Return the `rng` of a split; `split` is its index in the list of splits."""
    return np.random.default_rng(seeds("rng", seed, epoch, split))


class GlobalState:
    """The state of this process that belongs to one split: the states of `random`, `numpy.random` and torch, and the
    settings that its generator holds.

    Args:
        sequence: seeds the random states. None for a generator that takes `rng`: its random states begin as any other
            code has left them, and are its own as soon as it has seeded them or drawn from them.
        otherwise: returns seeds to begin with if `sequence` is None and another generator has left its own states.

    Attributes:
        held: the settings to put back when its code continues.
    """

    __slots__ = ("_mark", "_otherwise", "_saved", "_sequence", "held")

    def __init__(
        self,
        sequence: np.random.SeedSequence | None = None,
        otherwise: Callable[[], np.random.SeedSequence] = lambda: _NEUTRAL,
    ) -> None:
        self._sequence = sequence
        self._otherwise = otherwise
        self._saved: States | None = None
        self._mark: bytes | None = None
        self.held: Held = {}

    def _put_random(self, *, neutral: bool) -> None:
        """Restore the random states, or seed them for the first time. `neutral`: no generator has left its own states
        there."""
        if self._saved is not None:
            put_states(self._saved, self._sequence)
            return
        if self._sequence is not None:
            seed_all(self._sequence)
        elif not neutral:
            seed_all(self._otherwise())
        self._mark = fingerprint()

    def _take_random(self) -> bool:
        """Keep the random states, unless they are as `_put_random` has left them. Return whether they were kept. (A
        normal deviate may be taken from a pair without a change of the states, so they are always kept once they have
        changed.)"""
        if self._saved is None and self._mark is not None and self._mark == fingerprint():
            return False
        self._saved = take_states()
        return True


class GlobalRandomness:
    """Decides whose state is active in this process: random states and settings.

    Attributes:
        variables: the context variables of user code.
    """

    def __init__(self) -> None:
        self._random: GlobalState | None = None
        self._settings: GlobalState | None = None
        self._neutral = True
        self._outside: Values = []
        self._of: dict[int, tuple[object, GlobalState, Context]] = {}
        self.variables = Variables(self._on_import)

    def use(self, state: GlobalState | None) -> None:
        """Save the present owner's state and restore `state`. None means no owner.

        Takes about 3 us when the owner changes, and 80 us more if its generator has drawn from global random states
        (with torch 3 us more), and no time otherwise.
        """
        self.use_settings(state)
        if state is not self._random:
            self.leave_random()
            if state is not None:
                state._put_random(neutral=self._neutral)
                self._random = state

    def use_settings(self, state: GlobalState | None) -> None:
        """As `use`, for code that is seeded before it runs: random states stay as they are."""
        before = self._settings
        if state is before:
            return
        if before is not None:
            before.held = {} if are(self._outside) else put_aside(self._outside)
        if state is None:
            self._settings, self._outside = None, []  # other code may change them now
            return
        if not self._outside:
            self._outside = present()
        self._settings = state  # a signal before this finds the settings outside
        if state.held:
            put_back(state.held)

    def of(self, owner: object) -> tuple[GlobalState, Context]:
        """Return the settings and the context variables of an object that is called repeatedly, such as an
        indexable one. If it sets something at its first use, it finds that at later ones."""
        if id(owner) not in self._of:
            self._of[id(owner)] = owner, GlobalState(), self.variables.new()
        return self._of[id(owner)][1:]

    def seed(self, seed: int, epoch: int, batch: int | None = None) -> None:
        """Seed for one batch of an indexable feed, or, with None, for the function that lists the splits."""
        self.seed_for_call(seeds("list", seed, epoch) if batch is None else seeds("batch", seed, epoch, batch))

    def seed_for_call(self, sequence: np.random.SeedSequence) -> None:
        """Save the random states of the present owner, and seed them for a call that ends before the owner's generator
        continues."""
        self.leave_random()
        seed_all(sequence)

    def leave_random(self) -> None:
        """Save the random states of the present owner, which draws no more until its generator continues."""
        if self._random is not None:
            self._neutral = not self._random._take_random()
            self._random = None

    def _on_import(self) -> Callable[[], None]:
        """Note the settings before a module is imported. The function that this returns lets the module's changes reach
        all generators."""
        before = present()

        def imported() -> None:
            for place, (old, new) in enumerate(zip(before, present(), strict=True)):
                if old != new and self._outside:
                    self._outside[place] = new

        return imported


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


def put_states(states: States, sequence: np.random.SeedSequence | None, imported: ModuleType | None = None) -> None:
    """Restore what `take_states` returned; if torch has been imported since, seed it with `sequence`.

    `imported` is a module that has just been run.
    """
    random.setstate(states[0])
    np.random.set_state(states[1])
    if states[2] is None:
        if sequence is not None:
            _seed_torch(sequence, imported)
    elif (torch := _torch()) is not None:
        torch.set_state(states[2])


def fingerprint() -> bytes | None:
    """Return bytes that differ when the global random states differ, or None if that cannot be told."""
    found, torch = state_memory.read(), _torch()
    return found if found is None or torch is None else found + bytes(torch.get_state().numpy())


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
