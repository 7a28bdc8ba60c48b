"""The names that Penstock's own classes have on disk. They stay the same when a class moves to another file.

The digest of a list of splits is part of every saved state, and it covers the pickles of the splits. A pickle names
the classes of its objects, and so do the keys of cached splits. If such a name changed, no saved state would be
accepted, and each split would be written to the cache again. So each class of ours that can be a split, or can be in
one or in the arguments of a generator, says its name with `on_disk_as`. The name is the place where the class was when
it was first written to disk. It stays when the class moves.

The classes of users have no such names. Their modules are part of what users declare.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, ClassVar, TypeVar

from penstock_proto.spec import DictSpec, Leaf, TupleSpec

T = TypeVar("T")

_OURS = b"penstock_"
"""What the names of our modules begin with."""

_names: dict[Any, str] = {  # of the protocol's classes here, and of others where they are defined
    Leaf: "penstock_proto.spec.Leaf",
    TupleSpec: "penstock_proto.spec.TupleSpec",
    DictSpec: "penstock_proto.spec.DictSpec",
}


def on_disk_as(name: str) -> Callable[[type[T]], type[T]]:
    """Give a class this name on disk. Never change the name of a class, and never give it to another one."""

    def decorate(cls: type[T]) -> type[T]:
        _names[cls] = name
        return cls

    return decorate


def name_of(value: Any) -> str | None:
    """Return the name of a class on disk, or None if it has the name of its module and its own."""
    return _names.get(value) if isinstance(value, type) else None


def may_name_ours(pickles: bytes) -> bool:
    """Return whether any of these pickles may name a class of ours. Of a million paths, none does."""
    return _OURS in pickles


def with_names(values: Sequence[Any], pickles: list[bytes]) -> list[bytes]:
    """Return the pickles of `values`, of protocol 5, with the names on disk.

    They cannot be loaded where a class has moved. `pickles` are the usual ones, and are returned if no class in them
    has moved.
    """
    modules = {cls.__module__ for cls, name in _names.items() if f"{cls.__module__}.{cls.__qualname__}" != name}
    if not modules:
        return pickles
    moved = re.compile(b"|".join(re.escape(module.encode()) for module in sorted(modules)))
    return [_pickled(value) if moved.search(usual) else usual for value, usual in zip(values, pickles, strict=True)]


def _pickled(value: Any) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


_InPython: Any = pickle._Pickler
"""The pickler in Python. That in C lets nobody else name a class. This one is slower (30 us for a split), so it is used
only for classes that have moved."""


class _Pickler(_InPython):  # type: ignore[misc]
    """Writes the bytes that `pickle.dumps` would write if no class had moved."""

    dispatch: ClassVar[dict[type, Any]] = {
        kind: getattr(_InPython, f"save_{kind.__name__}")
        for kind in (bool, float, bytes, bytearray, str, tuple, list, dict, set, frozenset, type)
    } | {
        type(None): _InPython.save_none,
        int: _InPython.save_long,
        FunctionType: _InPython.save_global,
        pickle.PickleBuffer: _InPython.save_picklebuffer,
    }
    """Python's own. dill changes the table that all picklers in Python share, when it is imported."""

    def save_global(self, obj: Any, name: str | None = None) -> None:
        known = name_of(obj)
        if known is None:
            super().save_global(obj, name)
            return
        # Equal names must be one object, as they are in classes of one module: the second is written as a reference.
        module, _, own = known.rpartition(".")
        self.save(sys.intern(module))
        self.save(sys.intern(own))
        self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)
