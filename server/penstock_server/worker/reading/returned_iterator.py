"""Reads the iterator that a user's function returned.

It takes one sample after another, and never calls `iter()` on the iterator: the `__iter__` of an object of the user's
may start it over.

It also notices an iterator that is not new, such as an object that the user's module holds. Such an object can be read
by one split at a time only, and its samples cannot be made again: a second call would start it over, or take samples
from it, while the first is read.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

from ..isolation.shared_objects import variables_of

_PLAIN = ("builtins", "itertools")
"""The modules of iterator types whose `__iter__` does nothing: generators, `map`, `zip` and others."""


class _Kinds(dict[type, bool]):
    """Whether each type is that of an iterator. A look-up takes 0.1 us, and a module has hundreds of variables."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = found = hasattr(kind, "__next__")
        return found


_IS_ITERATOR = _Kinds()

_being_read: set[int] = set()
"""The ids of the iterators that are being read in this process."""


class ReadTwice(Exception):
    """The iterator is being read already."""


class ReturnedIterator(Iterator[Any]):
    """An iterator of the user's samples that is read once.

    Raises:
        ReadTwice: another `ReturnedIterator` reads it.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples: Iterator[Any] | None = None
        if id(samples) in _being_read:
            raise ReadTwice
        _being_read.add(id(samples))
        self._samples = samples

    def __next__(self) -> Any:
        if self._samples is None:
            raise StopIteration
        return self._samples.__next__()

    def close(self) -> None:
        """End the iterator, if it can be ended."""
        samples: Any = self._samples
        self._forget()
        if hasattr(samples, "close"):
            samples.close()

    def __del__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._samples is not None:
            _being_read.discard(id(self._samples))
            self._samples = None


def is_plain(samples: Iterator[Any]) -> bool:
    """Whether this is an iterator of Python's own, which `iter()` returns as it is."""
    return type(samples).__module__ in _PLAIN


def held_iterators(generate: Any) -> list[Any]:
    """Return the iterators that variables of `generate` hold before it is called: a call may return one of them again.

    `generate` is a function, a method or a callable object. Its variables are those of its module, those around it,
    and the attributes of its object.
    """
    generate = getattr(generate, "func", generate)  # of a functools.partial
    module = sys.modules.get(getattr(generate, "__module__", None) or "")
    variables = chain((generate,), getattr(module, "__dict__", {}).values(), variables_of(generate).values())
    return [value for value in variables if _IS_ITERATOR[type(value)]]


def warning(feed: str, function: str, kind: str) -> str:
    """Return the warning that the function of this feed returns an iterator of this type that is not new."""
    return (
        f"feed {feed}: {function} returns an iterator ({kind}) that a variable holds, so the next call may return the "
        "same one, and go on where it is or start it over. Then only one split at a time can be read, and splits that "
        "are read again, after a fault or from a state, may have other samples. Penstock does not compare its samples. "
        "Make the iterator in the function, or give its class: Feed(Reader, method=...)"
    )
