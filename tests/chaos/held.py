"""What the generators of a feed hold while they yield, and the check that each sees only its own.

Workers import this module along with feeds.py, so it imports nothing from the package.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import os
import random
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

NAMES = ("decimal", "errstate", "directory", "environment", "filters", "language", "depth", "seeds")


class Held:
    """Holds settings of these names, with values that depend on the split. Further settings keep their values."""

    def __init__(self, names: Sequence[str], split: int) -> None:
        self._names = names
        self._split = split
        self._stack = contextlib.ExitStack()
        self._python = random.Random(split)
        self._numpy = np.random.RandomState(split % 2**32)

    def __enter__(self) -> Held:
        split, enter = self._split, self._stack.enter_context
        if "decimal" in self._names:
            enter(decimal.localcontext()).prec = 4 + split % 20
        if "errstate" in self._names:
            enter(np.errstate(divide=("ignore", "raise")[split % 2]))  # type: ignore[arg-type]
        if "directory" in self._names:
            enter(contextlib.chdir(("/", "/proc", "/dev")[split % 3]))
        if "environment" in self._names:
            os.environ["CHAOS_SPLIT"] = str(split)
        if "filters" in self._names:
            enter(warnings.catch_warnings())
            warnings.simplefilter("ignore", lineno=split)
        if "language" in self._names:
            locale.setlocale(locale.LC_NUMERIC, ("C", "C.UTF-8")[split % 2])
        if "depth" in self._names:
            sys.setrecursionlimit(3000 + split % 100)
        if "seeds" in self._names:
            random.seed(split)
            np.random.seed(split % 2**32)
        self._seen = _seen()
        for name, value in _seen().items():
            assert (value == _OUTSIDE[name]) or name in self._names, f"{name} is a neighbour's: {value}"
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Check that the settings are still those that this generator holds.

        Raises:
            AssertionError: one is not.
        """
        for name, value in _seen().items():
            assert value == self._seen[name], f"{name} was {self._seen[name]}, and is a neighbour's: {value}"
        if "seeds" in self._names:
            assert random.gauss(0, 1) == self._python.gauss(0, 1), "random is a neighbour's"
            assert np.random.normal() == self._numpy.normal(), "numpy.random is a neighbour's"


def _seen() -> dict[str, Any]:
    return {
        "decimal": decimal.getcontext().prec,
        "errstate": np.geterr()["divide"],
        "directory": os.getcwd(),
        "environment": os.environ.get("CHAOS_SPLIT"),
        "filters": warnings.filters[0],
        "language": locale.setlocale(locale.LC_NUMERIC),
        "depth": sys.getrecursionlimit(),
    }


_OUTSIDE = _seen()


def drawn(tag: int, draws: str) -> tuple[str, ...]:
    """Draw the names that a feed holds from its tag: often none, so that such feeds have neighbours that do."""
    chance = random.Random(f"held {tag}")
    names = [name for name in NAMES if name != "seeds" or draws in ("none", "rng")]
    return tuple(sorted(chance.sample(names, chance.choice([0, 1, 2, 4, len(names)]))))
