"""Copies an object or its attributes, so that user code can change the copy.

Some values cannot be copied, so the copies share them: open files, locks, generators, functions, models, read-only
arrays and memory-mapped ones.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .indexables import is_keras

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
    result, shared = _copy(state, lambda value: value is owner or _is_shared(value, share_large))
    return result, [value for value in shared if _is_large(value) and value.flags.writeable]


def own_copy(value: Any) -> tuple[Any, list[Any]]:
    """Return a deep copy of an object, and the objects that both share, because they cannot be copied or are large:
    arrays of `LARGE` bytes, tensors, modules, functions.

    Raises:
        Exception: it cannot be pickled.
    """
    return _copy(value, lambda found: not _is_state_of_torch(found) and _is_shared(found, share_large=True))


def _copy(value: Any, is_shared: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Return a deep copy of `value`, and what it shares with `value`."""
    shared: list[Any] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if type(value) in _PLAIN or not is_shared(value):
                return None
            shared.append(value)
            return len(shared) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, index: int) -> Any:
            return shared[index]

    stream = io.BytesIO()
    buffers: list[pickle.PickleBuffer] = []
    Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    stream.seek(0)
    result = Unpickler(stream, buffers=[bytearray(buffer.raw()) for buffer in buffers]).load()
    return result, shared


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


def _is_state_of_torch(value: Any) -> bool:
    """Return whether `value` is one of torch's own datasets or random generators, which have a state."""
    module = type(value).__module__
    return module.startswith("torch.utils.data.") or (module == "torch._C" and type(value).__name__ == "Generator")


def _is_large(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes >= LARGE and not value.dtype.hasobject


def _equal(one: Array, other: Array) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.strides != other.strides:
        return False
    if not (one.flags.c_contiguous and other.flags.c_contiguous):
        return False
    return np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
