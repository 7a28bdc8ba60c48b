"""Finds the objects of user modules that change while samples are made, as later samples may depend on them."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
from typing import Any

import numpy as np

from ...feed.feed import Feed
from .imports import user_modules

_MOST_NBYTES = 1 << 20
_PLAIN = (int, float, str, bytes, list, dict, set, tuple, random.Random, np.random.Generator, np.random.RandomState)


def snapshot() -> dict[str, bytes]:
    """Return a digest of each object of plain data in user modules, by name.

    These are the modules' globals, and the attributes of their classes and instances.
    """
    found: dict[str, bytes] = {}
    for module in user_modules():
        file = os.path.basename(module.__file__ or "")
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            _add(found, f"{name} in {file}", value)
            for owner in [value, getattr(value, "generate", None)] if isinstance(value, Feed) else [value]:
                if _has_attributes(owner, module.__name__):
                    kind = owner if isinstance(owner, type) else type(owner)
                    for attribute, inner in list(vars(owner).items()):
                        if not attribute.startswith("__"):
                            _add(found, f"{kind.__name__}.{attribute} in {file}", inner)
    return found


def changed(before: dict[str, bytes]) -> tuple[str, ...]:
    """Return the names of the objects that have changed since `before`, an earlier snapshot; at most 8."""
    after = snapshot()
    return tuple(sorted(name for name in after if after[name] != before.get(name)))[:8]


def _has_attributes(value: Any, module: str) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return getattr(kind, "__module__", None) == module and hasattr(value, "__dict__")


def _add(found: dict[str, bytes], name: str, value: Any) -> None:
    if isinstance(value, np.ndarray):
        if value.nbytes > _MOST_NBYTES or value.dtype == object:
            return
    elif not isinstance(value, _PLAIN):
        return
    try:
        if hasattr(value, "__len__") and len(value) > 10_000 and not isinstance(value, np.ndarray):
            found[name] = str(len(value)).encode()
            return
        data = pickle.dumps(value)
    except Exception:  # something in it cannot be pickled
        return
    if len(data) <= _MOST_NBYTES:
        found[name] = hashlib.blake2b(data, digest_size=16).digest()
