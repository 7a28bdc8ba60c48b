"""The keys of cached splits, made from the generator, its arguments, the split, and the cache's version.

Pickles of equal objects can differ, because a pickle records which parts are the same object. So values are encoded
here part by part: plain data by its contents, functions and classes by their names, and other objects by the parts from
which pickle would rebuild them. Equal values have equal digests, in every process. The code of a function is not part
of its digest, with two exceptions. A lambda, or a function that was made within a function, may share its name with
another one (two branches of an `if`), so it has its code in the digest, and the variables around it. A function of a
notebook's cell, whose name may stand for other code the next time, also has the globals that it uses.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np

from ...sources.names_on_disk import name_of
from ...sources.reader import Reader
from .feed_options import FeedOptions
from .used_globals import used_globals
from .values import Cache

FORMAT = 1
"""Part of every key. Raise it when the same key would mean other samples, or another file format."""


DIRECTORY = "_cache_directory"
"""The attribute of a feed with what `feed_directory` has returned for it in the trainer that pickled it. The `__main__`
of workers is another one."""


class NoKey(TypeError):
    """A value cannot be distinguished from others, because it cannot be pickled."""


def digest(*values: Any) -> bytes:
    """Return the SHA-256 of values. Equal values have equal digests; the order of a dict counts.

    Raises:
        NoKey: a value holds something that cannot be pickled.
    """
    return _Digest().of(*values)


def feed_directory(feed: FeedOptions) -> str:
    """Return the absolute path of the directory that holds the cached splits of `feed`. All feeds with the same
    generator, arguments and version of the cache share it.

    Raises:
        TypeError: the generator or its arguments cannot be pickled, so that the cache cannot distinguish them from
            others.
    """
    assert feed.cache is not None
    if (known := vars(feed).get(DIRECTORY)) is not None:
        return str(known)
    cache, generate = Cache.of(feed.cache), feed.generate
    name = str(getattr(generate, "__name__", type(generate).__name__))
    parts = (
        ("the generator", (type(generate), generate.cached_as) if isinstance(generate, Reader) else generate),
        ("method=", feed.method),
        ("args=", feed.args),
        ("kwargs=", sorted((feed.kwargs or {}).items())),
        ("the version", cache.version),
    )
    key = hashlib.sha256(f"penstock cache {FORMAT}".encode())
    for part, value in parts:
        try:
            key.update(digest(value))
        except NoKey as error:
            raise TypeError(
                f"cache= cannot tell the samples of {name} from others, since {part} cannot be pickled ({error}): use "
                "a function at the top level of a module and plain arguments, and open files in the generator"
            ) from error
    short = re.sub(r"[^A-Za-z0-9_.]+", "-", name)[:64].strip("-.") or "generator"
    return os.path.join(os.path.abspath(cache.directory), f"{short}-{key.hexdigest()[:24]}")


class _Digest:
    """Encodes values to a hash. If an object contains itself, the inner one is encoded as the number of levels up to
    the outer one."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._within: list[int] = []

    def of(self, *values: Any) -> bytes:
        for value in values:
            self._add(value)
        return self._hash.digest()

    def _put(self, kind: str, data: bytes | memoryview = b"") -> None:
        self._hash.update(f"{kind} {len(data)}\n".encode())
        self._hash.update(data)

    def _add(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind in (bool, int, float, complex):
            self._put(kind.__name__, repr(value).encode())
        elif kind is str:
            self._put("str", value.encode("utf-8", "surrogatepass"))
        elif kind in (bytes, bytearray):
            self._put(kind.__name__, value)
        elif isinstance(value, types.ModuleType):
            self._put("module", value.__name__.encode())
        elif (isinstance(value, type) and _is_global(value)) or _is_builtin(value):
            self._put("global", _global_name(value).encode())
        elif id(value) in self._within:
            self._put("again", str(len(self._within) - self._within.index(id(value))).encode())
        else:
            self._within.append(id(value))
            self._add_whole(value)
            self._within.pop()

    def _add_whole(self, value: Any) -> None:
        kind = type(value)
        if kind in (tuple, list):
            self._put(kind.__name__, str(len(value)).encode())
            for item in value:
                self._add(item)
        elif kind is dict:
            self._put("dict", str(len(value)).encode())
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif kind in (set, frozenset):
            self._put(kind.__name__, b"".join(sorted(digest(item) for item in value)))
        elif kind is np.ndarray and not value.dtype.hasobject:
            self._put("array", f"{value.dtype.name} {value.dtype.descr} {value.shape}".encode())
            self._put("data", value.tobytes())
        elif kind is types.FunctionType:
            self._add_function(value)
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._add_reduced(value)

    def _add_function(self, function: types.FunctionType) -> None:
        self._put("function", _global_name(function).encode())
        in_cell, within = _is_of_a_cell(function), function.__code__.co_qualname
        if "<" not in function.__qualname__ and not in_cell:
            if "<" not in within or _has_its_name(function):
                return
            self._put("function", within.encode())  # functools.wraps has given it the name of another one
        self._add_code(function.__code__)
        if in_cell:
            names = sorted(used_globals(function.__code__) & function.__globals__.keys())
            self._add([(name, function.__globals__[name]) for name in names])
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_full(cell)]
        self._add((cells, function.__defaults__, function.__kwdefaults__))

    def _add_class(self, cls: type) -> None:
        """Add a class of a cell or within a function: its bases and attributes, and the functions of its properties and
        methods."""
        self._put("class", _global_name(cls).encode())
        self._add(cls.__bases__)
        for name, value in sorted(vars(cls).items()):
            if name in _OF_EACH_CLASS:
                continue
            self._add(name)
            if isinstance(value, property):
                self._add((value.fget, value.fset, value.fdel))
            elif isinstance(value, functools.cached_property):
                self._add(value.func)
            else:
                self._add(value.__func__ if isinstance(value, staticmethod | classmethod) else value)

    def _add_code(self, code: types.CodeType) -> None:
        self._put("code", code.co_code)
        self._add(code.co_names)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_code(constant)
            else:
                self._add(constant)

    def _add_reduced(self, value: Any) -> None:
        """Add the parts from which pickle would rebuild the object: a function, its arguments, a state, and items."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:
            raise NoKey(f"{type(value).__name__}: {error}") from error
        if isinstance(reduced, str):
            self._put("global", f"{_module_name(value)}.{reduced}".encode())
            return
        function, arguments, *rest = reduced
        self._put("object", str(len(reduced)).encode())
        self._add((function, tuple(arguments)))
        for part in rest:
            self._add(list(part) if hasattr(part, "__next__") else part)


_OF_EACH_CLASS = frozenset(
    "__dict__ __weakref__ __module__ __qualname__ __doc__ __annotations__ __slotnames__ _abc_impl "
    "__dataclass_fields__ __dataclass_params__ __firstlineno__ __static_attributes__".split()
)
"""Attributes of a class that its code does not depend on, or that follow from others."""


def _is_global(cls: type) -> bool:
    """Return whether a class has a name of its own in a file."""
    return "<locals>" not in cls.__qualname__ and not _is_of_a_cell(cls)


def _has_its_name(function: types.FunctionType) -> bool:
    """Return whether the function is what its module has under its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _is_of_a_cell(value: Any) -> bool:
    """Return whether a function or class belongs to a notebook or an interactive session, and so to no file."""
    return getattr(value, "__module__", None) == "__main__" and _module_name(value) == "__main__"


def _is_builtin(value: Any) -> bool:
    """Return whether this is a function in C, and not a method of an object."""
    return isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None)


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # its variable is assigned later
        return False
    return True


def _global_name(value: Any) -> str:
    return name_of(value) or f"{_module_name(value)}.{value.__qualname__}"


def _module_name(value: Any) -> str:
    """Return the name of a value's module as workers import it. A script is `__main__` only in the process that runs
    it, and a notebook is not the `__main__` of a worker."""
    name = str(getattr(value, "__module__", None))
    if name != "__main__":
        return name
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return name if main.__spec__.name.startswith("penstock_server.") else main.__spec__.name
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else name
