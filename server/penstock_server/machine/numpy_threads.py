"""Imports NumPy without the threads for linear algebra, which a daemon does not need.

OpenBLAS starts a thread for each further CPU when NumPy is imported, and reserves memory for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "OPENBLAS_NUM_THREADS"


@contextmanager
def no_threads() -> Iterator[None]:
    """Import NumPy within this block. Start workers and other children after it, with the original environment.

    Use it on the main thread, before other threads start.
    """
    before = os.environ.get(_NAME)
    os.environ[_NAME] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before
