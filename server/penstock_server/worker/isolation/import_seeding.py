"""Seeds the global random generators while the user's modules are imported and their objects are built.

An `__init__` may shuffle a list of indices, and a module may divide rows at its top level. The result must be the same
in every worker, or rows are lost and others come twice. So the global generators get one fixed state before each feed's
module runs. It is the same for all feeds, so that two modules that divide the same rows in the same way agree.

Random numbers that libraries draw while they are imported must not matter, as the fork server may have imported them
before. So the states are restored after each library.
"""

from __future__ import annotations

import importlib.machinery
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np

from ...targets.installed import is_installed
from .randomness import put_states, seed_all, take_states

_SEQUENCE = np.random.SeedSequence(0x70656E73746F636B)
_LOADERS = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
"""Loader classes with one instance for each module."""


@contextmanager
def seeded_imports() -> Iterator[None]:
    """Give code in this context the same global random numbers in every process.

    Afterwards the states of the global generators differ from process to process, as when Python starts.
    """
    finder = _Libraries()
    sys.meta_path.insert(0, finder)
    seed_all(_SEQUENCE)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        seed_all(np.random.SeedSequence(random.SystemRandom().getrandbits(128)))


class _Libraries(MetaPathFinder):
    """Finds modules as the next finders do, and restores the random states after an installed module has run.

    Modules that an installed module imports in turn are left alone: restoring takes 80 us, and TensorFlow has 3000
    modules.
    """

    def __init__(self) -> None:
        self._inside = False
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module for `importlib`, or return None to leave it to the other finders."""
        if self._inside or threading.get_ident() != self._thread:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if type(spec.loader) in _LOADERS and is_installed(spec.origin or ""):
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: object) -> None:
        run = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[attr-defined]
            states, self._inside, imported = take_states(), True, None
            try:
                run(module)
                imported = module
            finally:
                self._inside = False
                put_states(states, _SEQUENCE, imported)

        loader.exec_module = exec_module  # type: ignore[attr-defined]
