"""Random numbers while the user's modules are imported and their objects are built.

A list of indices that is shuffled in an `__init__`, or rows that are divided at the top of a module, must be the same
in every worker, or rows are lost and others come twice. So the global generators have one fixed state before each
feed's module is run: one for all feeds, so that two modules that divide the same rows in the same way agree.

What libraries draw while they are imported counts for nothing: the fork server may have imported them before.
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

from ..importing import is_installed
from .randomness import put_states, seed_all, take_states

_SEQUENCE = np.random.SeedSequence(0x70656E73746F636B)
_LOADERS = (
    importlib.machinery.SourceFileLoader,
    importlib.machinery.SourcelessFileLoader,
    importlib.machinery.ExtensionFileLoader,
)
"""Those of which each module has an object of its own."""


@contextmanager
def seeded_imports() -> Iterator[None]:
    """Within, user modules are imported and their objects are built with the same random numbers in each process.

    Behind it the global generators have a state that differs from process to process, as at the start of any.
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
    """Finds modules as the finders behind it do, and puts the states back when an installed one has been run.

    What that one imports in turn is left alone: putting states back takes 80 us, and TensorFlow has 3000 modules.
    """

    def __init__(self) -> None:
        self._inside = False
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As `importlib` asks for it; None where the others may answer by themselves."""
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
