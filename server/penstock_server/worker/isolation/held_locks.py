"""Finds locks that a generator holds while it yields.

A worker has the generators of several splits open at once, and runs them in one thread. If one of them holds a lock at
its `yield`, the next one that wants it waits forever. A plain loop runs one generator after the other, so it never
notices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

from ...feed.options.used_globals import used_globals
from .shared_objects import variables_of

_LOCKS = (type(threading.Lock()), threading.Semaphore, threading.BoundedSemaphore)
"""An RLock lets the same thread in again, and a lock of `multiprocessing` may be held by another process."""

_PATIENCE = 2.0
"""Seconds that a lock may be held by somebody who releases it again, such as another thread."""

_DEPTH = 3
"""How far to look: a decorator's wrapper, its function, and an object with a lock."""


def held_locks(generate: Any) -> tuple[str, ...]:
    """Return the names of the locks that `generate`, whose generator has yielded, can see and nobody releases."""
    found = {id(lock): (name, lock) for name, lock in _locks(generate, _DEPTH)}
    return tuple(name for name, lock in found.values() if not _is_free(lock))


def error(feed: str, names: tuple[str, ...]) -> str:
    """Return the error that the generator of this feed holds these locks."""
    return (
        f"feed {feed}: its generator holds the lock {' and '.join(map(repr, names[:4]))} while it yields. A worker has "
        "several splits open at once, and the generator of the next one would wait for that forever: release it before "
        "each yield"
    )


def _locks(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if not depth:
        return
    if isinstance(value, functools.partial):
        value = value.func
    found = dict(variables_of(value))
    function = value.__func__ if isinstance(value, MethodType) else value
    if not isinstance(function, FunctionType | type | ModuleType) and callable(function):
        function = type(function).__call__
    if isinstance(function, FunctionType):
        for name in used_globals(function.__code__):
            if name in function.__globals__:
                found[name] = function.__globals__[name]
    for name, one in found.items():
        if type(one) in _LOCKS:
            yield name, one
        elif isinstance(one, FunctionType | MethodType | functools.partial):
            yield from _locks(one, depth - 1)
        elif depth > 1 and not isinstance(one, type | ModuleType):
            owned = getattr(one, "__dict__", None)
            if isinstance(owned, dict):
                yield from ((f"{name}.{key}", lock) for key, lock in [*owned.items()] if type(lock) in _LOCKS)


def _is_free(lock: Any) -> bool:
    if not lock.acquire(timeout=_PATIENCE):
        return False
    lock.release()
    return True
