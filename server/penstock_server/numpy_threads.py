"""Imports NumPy without the threads of its linear algebra: a daemon does none.

OpenBLAS starts a thread for each further CPU when NumPy is imported, and reserves memory for each.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "OPENBLAS_NUM_THREADS"


@contextmanager
def no_threads() -> Iterator[None]:
    """Import NumPy within this block. Workers and other children are started after it, with the environment as it was.

    Call it on the main thread, before there are others.
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
