"""Finds the randomness that libraries keep from their import, which all workers would share if they were forked after
it.

A random generator without a seed has a state of its own in each process that imports the library. In forked workers it
would be the same, and they would repeat each other's numbers. Python's own generators (`random.Random`) without a seed
are seeded again in each worker. A library with other generators, or with a key or salt, is left to the workers.
(numpy.random and random themselves are seeded by `start.py` and by Python. torch.Generator has the same state in every
process.)
"""

from __future__ import annotations

import gc
import os
import random
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_NUMPY = (np.random.BitGenerator, np.random.SeedSequence)
"""Each Generator and RandomState has a BitGenerator."""

_SAME_IS_RIGHT = ("multiprocessing.process", "multiprocess.process")
"""Modules that draw a key at their import which their child processes have to share."""


class ForkedRandomness:
    """The randomness that was kept since `watching` began."""

    def __init__(self) -> None:
        gc.collect()
        self._before = _generators()
        self._unseeded = weakref.WeakValueDictionary[int, random.Random]()
        """By id: generators that were last seeded from the system."""
        self._to_seed: list[random.Random] = []
        self._drew = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch how libraries get random numbers from the system, in this context."""
        urandom, seed = os.urandom, random.Random.seed

        def drawn(size: int) -> bytes:
            caller = sys._getframe(1)
            # Seeds of NumPy's generators come from SystemRandom().getrandbits(); the generators are found themselves.
            if caller.f_globals.get("__name__") not in _SAME_IS_RIGHT and caller.f_code.co_name != "getrandbits":
                self._drew = True
            return urandom(size)

        def seeded(generator: random.Random, a: object = None, version: int = 2) -> None:
            seed(generator, a, version)  # type: ignore[arg-type]
            if a is None:
                self._unseeded[id(generator)] = generator
            else:
                self._unseeded.pop(id(generator), None)

        os.urandom = random._urandom = drawn  # type: ignore[attr-defined]
        random.Random.seed = seeded  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            os.urandom = random._urandom = urandom  # type: ignore[attr-defined]
            random.Random.seed = seed  # type: ignore[method-assign]

    def must_be_left(self) -> bool:
        """Return whether what was imported since the last call keeps randomness that only an import renews."""
        gc.collect()
        before = {id(generator) for generator in self._before}
        left, self._drew = self._drew, False
        for generator in _generators():
            if id(generator) in before:
                continue
            if isinstance(generator, random.Random) and self._unseeded.get(id(generator)) is generator:
                self._to_seed.append(generator)
            else:
                left = True
        gc.freeze()  # so the next call looks only at what is new
        return left

    def seed(self) -> None:
        """Seed the generators that have no seed of their own, in a worker."""
        for generator in self._to_seed:
            random.Random.seed(generator)


def _generators() -> list[object]:
    """Return the random generators among the objects that the garbage collector tracks."""
    return [
        one
        for one in gc.get_objects()
        if issubclass(type(one), _NUMPY)
        or (issubclass(type(one), random.Random) and not issubclass(type(one), random.SystemRandom))
    ]
