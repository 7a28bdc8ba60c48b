"""Lets user code run past its `breakpoint()` while it is only called to compare what it makes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore `breakpoint()` in this context."""
    hook, sys.breakpointhook = sys.breakpointhook, _pass
    try:
        yield
    finally:
        sys.breakpointhook = hook


def _pass(*arguments: object, **keywords: object) -> None:
    pass
