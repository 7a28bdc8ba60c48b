"""Notices what a generator changes in an object that all generators of a process share: the object whose method it is,
or the variables around a nested function. It also notices iterators there, and in the generator's module.

With `method=` each run makes an object of its own, and each lane copies a torch `IterableDataset`. Any other object is
shared, so samples that depend on its changes depend on the number of workers.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import numpy as np

from ...feed.options.arguments import is_read_once
from ...feed.options.used_globals import used_globals

_STATE = (bool, int, float, str, bytes, list, tuple, set, deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MOST_ITEMS = 10_000
"""Longer lists are not looked at: that would take too long."""


def state_of(generate: Any) -> dict[str, bytes]:
    """Return the pickled attributes of the object of `generate`, a generator function or a callable object, by their
    names, such as "Reader.count". Only numbers, texts, lists, sets and random generators count as its state."""
    found = {}
    for name, value in variables_of(generate).items():
        counts = isinstance(value, _GENERATORS) or type(value) in _STATE
        if counts and not (hasattr(value, "__len__") and len(value) > _MOST_ITEMS):
            try:
                found[name] = pickle.dumps(value)
            except Exception:  # something in it cannot be pickled
                continue
    return found


def changed_since(before: dict[str, bytes], generate: Any) -> tuple[str, ...]:
    """Return the names of the attributes that differ from `before`, which `state_of` returned."""
    return tuple(name for name, value in state_of(generate).items() if value != before.get(name, value))


def read_once(generate: Any) -> tuple[str, ...]:
    """Return the names of the iterators of Python's own that `generate` finds in its object, in the variables around it
    or in its module."""
    found = [name for name, value in variables_of(generate).items() if is_read_once(value)]
    function = getattr(generate, "func", generate)  # of a functools.partial
    if not hasattr(function, "__code__"):
        function = type(function).__call__ if callable(function) else None
    code, module = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is not None:
        found += sorted(name for name in used_globals(code) if is_read_once(module.get(name)))
    return tuple(found)


def read_once_warning(feed: str, names: tuple[str, ...]) -> str:
    """Return the warning that the generator of this feed uses the iterators of these names."""
    return (
        f"feed {feed}: its generator uses {', '.join(names[:4])}, which can be read only once: what one run reads, no "
        "other run gets, so samples are lost. Make such an iterator in the generator"
    )


def warning(feed: str, names: tuple[str, ...]) -> str:
    """Return the warning that the generator of this feed changes the attributes of these names."""
    return (
        f"feed {feed}: its generator changes {', '.join(names[:4])}, which all generators of a worker share, so "
        "samples that depend on that depend on the number of workers, and if it is an order, rows may be lost: keep it "
        "in variables of the generator, or give the class with method=, as in Feed(Reader, method=...), so that each "
        "run makes an object of its own"
    )


def variables_of(generate: Any) -> dict[str, Any]:
    """Return the attributes of the object of `generate`, or the variables around it if it is a nested function."""
    owner = getattr(generate, "__self__", None)
    if owner is None and not isinstance(generate, type) and not hasattr(generate, "__code__"):
        owner = generate
    if owner is not None:
        ours = type(owner).__module__.startswith("penstock_server.")
        attributes = {} if ours or isinstance(owner, type) else getattr(owner, "__dict__", {})
        return {f"{type(owner).__name__}.{name}": value for name, value in attributes.items()}
    code, cells = getattr(generate, "__code__", None), getattr(generate, "__closure__", None)
    if code is None or cells is None:
        return {}
    filled = {name: cell for name, cell in zip(code.co_freevars, cells, strict=True) if _is_filled(cell)}
    return {f"{name} around {generate.__name__}": cell.cell_contents for name, cell in filled.items()}


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
