"""Copies the attributes of an object, so that they can be restored after user code has changed it.

Some values cannot be copied, so the copies share them: open files, locks, generators, functions, models, read-only
arrays and memory-mapped ones.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..indexables import is_keras

Array: TypeAlias = npt.NDArray[Any]

State: TypeAlias = dict[str, Any]
"""The attributes of an object."""

LARGE = 1 << 20
"""Arrays of at least this many bytes are shared where possible: they may be the data set itself."""

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    list,
    dict,
    tuple,
    set,
    frozenset,
    pickle.PickleBuffer,
)
_SHARED = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, np.memmap)
_LIBRARIES = ("tensorflow", "keras", "tf_keras", "torch", "jax", "jaxlib")


def copied(state: State, owner: object, *, share_large: bool) -> tuple[State, list[Array]]:
    """Return a copy of the attributes of `owner`, and the large arrays that it shares with `state`.

    Args:
        state: the attributes.
        owner: the object. Where `state` refers to it, so does the copy.
        share_large: share arrays of `LARGE` bytes or more.
    """
    shared: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if type(value) in _PLAIN or (value is not owner and not _is_shared(value, share_large)):
                return None
            shared.append(value)
            return len(shared) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Any:
            return shared[index]

    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(state)
    stream.seek(0)
    result: State = Unpickler(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers]).load()
    return result, [value for value in shared if _is_large(value) and value.flags.writeable]


@contextmanager
def read_only(arrays: Iterable[Array]) -> Iterator[None]:
    """Make code in this context fail if it writes to one of these arrays, which are otherwise writable."""
    arrays = sorted({id(array): array for array in arrays}.values(), key=lambda array: array.base is not None)
    for array in arrays:
        array.flags.writeable = False
    try:
        yield
    finally:
        for array in arrays:  # those that own their memory before views of them
            array.flags.writeable = True


def share_equal(state: State, other: State) -> None:
    """Replace each large array in `state` by the one of the same name in `other`, if they are equal."""
    for name, value in state.items():
        found: Any = other.get(name)
        if _is_large(value) and _is_large(found) and _equal(value, found):
            state[name] = found


def _is_shared(value: Any, share_large: bool) -> bool:
    if isinstance(value, _SHARED):
        return True
    if isinstance(value, np.ndarray):
        return not value.flags.writeable or (share_large and _is_large(value))
    if type(value).__module__.partition(".")[0] in _LIBRARIES and not is_keras(value):
        return True
    try:
        value.__reduce_ex__(5)
    except Exception:  # it says that it cannot be copied
        return True
    return False


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes >= LARGE and not value.dtype.hasobject


def _equal(one: Array, other: Array) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.strides != other.strides:
        return False
    if not (one.flags.c_contiguous and other.flags.c_contiguous):
        return False
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
