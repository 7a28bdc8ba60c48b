"""Recognizes indexable objects, and by their base classes those of Keras and torch.

It imports neither library: if there is an object of a library, the library is imported already. This file reads no
items.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock_proto.value_text import shown


def is_indexable(source: Any) -> bool:
    """Return whether `source` is an object with numbered items, and not a generator function or a class."""
    if isinstance(source, type) or is_torch_iterable(source):  # the latter inherits a __getitem__ that raises
        return False
    return hasattr(source, "__getitem__") and (hasattr(source, "__len__") or is_keras(source))


def is_dataset(source: Any) -> bool:
    """Return whether `source` is an object of some library that holds samples: not a list, an array or text."""
    if _package(type(source)) in ("builtins", "collections") or hasattr(source, "dtype"):
        return False
    return is_indexable(source) or hasattr(source, "__iter__")


def is_keras(source: Any) -> bool:
    """Return whether `source` is a Keras `PyDataset` (or `Sequence`), whose items are whole batches."""
    return any(is_keras_base(base) for base in type(source).__mro__)


def is_keras_base(base: type) -> bool:
    """Return whether `base` is Keras' own class `PyDataset` or `Sequence`, in any version."""
    return base.__name__ in ("PyDataset", "Sequence") and _package(base) in ("keras", "tf_keras", "tensorflow")


def is_torch(source: Any) -> bool:
    """Return whether `source` is a torch `Dataset`."""
    return any(base.__name__ == "Dataset" and _package(base) == "torch" for base in type(source).__mro__)


def is_torch_iterable(source: Any) -> bool:
    """Return whether `source` is a torch `IterableDataset`."""
    return any(base.__name__ == "IterableDataset" and _package(base) == "torch" for base in type(source).__mro__)


def is_torch_loader(source: Any) -> bool:
    """Return whether `source` is a torch `DataLoader`, which a feed does not accept."""
    return any(base.__name__ == "DataLoader" and _package(base) == "torch" for base in type(source).__mro__)


def length_of(source: Any) -> int | None:
    """Return the number of items of an indexable object, or None for an endless Keras dataset.

    Raises:
        TypeError: its `__len__` returned something other than an int.
        ValueError: its `__len__` returned a number below 0, or one that is too large.
        Exception: anything that the object raises, or NotImplementedError from a Keras dataset with no length at all.
    """
    try:
        if is_keras(source) and hasattr(type(source), "num_batches"):
            batches = source.num_batches
            return None if batches is None else int(batches)
        return len(source)
    except (TypeError, ValueError, OverflowError):
        _refuse_length(source)
        raise


def _refuse_length(source: Any) -> None:
    """Explain why `len(source)` has failed, if the number is the reason: Python's own message names neither the class
    nor the method. (Keras calls `len` too, in `num_batches`.)"""
    try:
        length = type(source).__len__(source)
    except Exception:  # that is the reason
        return
    kind = type(length)
    what = f"{type(source).__name__}.__len__ must return an int"
    try:
        number = operator.index(length)
    except TypeError:
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        text = str(length) if isinstance(length, float | np.generic) else shown(length)  # not np.float64(3.0)
        raise TypeError(f"{what}, and returned {text} ({name})") from None
    if not 0 <= number <= sys.maxsize:
        raise ValueError(f"{what} from 0 to {sys.maxsize}, and returned {number}") from None


def as_structure(item: Any, *, inside: bool = False, batch: bool = False) -> Any:
    """Return an item of Keras or torch with tuples instead of the lists that mean a structure.

    The outermost list always means a structure. An inner list does if it holds arrays or other structures. An inner
    list of numbers is an array, except for an empty one in a batch (`batch`): that has no rows, so it means no targets.
    """
    if isinstance(item, list) and (not inside or (batch and not item) or any(_is_part(part) for part in item)):
        return tuple(as_structure(part, inside=True, batch=batch) for part in item)
    if isinstance(item, tuple):
        parts = [as_structure(part, inside=True, batch=batch) for part in item]
        return type(item)(*parts) if hasattr(item, "_fields") else tuple(parts)
    if isinstance(item, Mapping):
        return {key: as_structure(part, inside=True, batch=batch) for key, part in item.items()}
    return item


def _is_part(value: Any) -> bool:
    if isinstance(value, list):
        return any(_is_part(part) for part in value)
    return isinstance(value, tuple | Mapping) or bool(np.ndim(value) if hasattr(value, "shape") else 0)


def _package(base: type) -> str:
    return base.__module__.partition(".")[0]
