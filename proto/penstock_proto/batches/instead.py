"""Says what to yield instead of a value that has no dtype. It looks at types and attributes, and imports no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from numbers import Integral
from os import PathLike
from typing import Any
from uuid import UUID

import numpy as np

_NONE = (
    "None has no dtype: leave it out of all samples, or yield a number that stands for it, such as -1 or float('nan')"
)
MIXED = "it mixes text and numbers: yield a tuple, with a leaf for each"
_OF_TYPE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (type(None), _NONE),
    ((Decimal, Fraction), "yield float() of it"),
    (Enum, "yield its .value or .name"),
    (PathLike, "yield str() of it"),
    (UUID, "yield str() of it"),
    (datetime, "yield its .timestamp(), or its .isoformat() as text"),
    (date, "yield its .toordinal(), or its .isoformat() as text"),
    (timedelta, "yield its .total_seconds()"),
    (time, "yield its .isoformat() as text"),
    (Integral, "it needs more than 64 bits: yield float() or str() of it"),
    (Set, "a set has no order: yield sorted() of it"),
    (Iterator, "it is an iterator: yield each of its items, or a list of them"),
)
_OF_LIBRARY = (
    ("scipy", "", "it is sparse: yield its .toarray()"),
    ("tensorflow", "SparseTensor", "it is sparse: yield tf.sparse.to_dense() of it"),
    (
        "tensorflow",
        "RaggedTensor",
        "yield its .to_tensor() if its rows are equally long. Otherwise yield each of its rows as a sample, with "
        'Feed(batching="ragged"), or its .to_list() if it is one sample, and declare that with Feed(spec=...)',
    ),
    ("tensorflow", "Dataset", "it is a dataset: yield each of its elements"),
    ("pandas", "", "yield a dict of its columns, each as an array of one dtype: {'x': table['x'].to_numpy()}"),
)
"""Package, end of the type's name, and advice."""


def instead_of(value: Any) -> str:
    """Say what to yield instead of `value`, of which NumPy makes an array of objects.

    Raises:
        Exception: anything that the methods of `value` raise.
    """
    for kind, advice in _OF_TYPE:
        if isinstance(value, kind):
            return advice
    if isinstance(value, list):
        return _instead_of_items(value)
    if isinstance(value, np.ndarray) and value.ndim:
        items = value.ravel().tolist()
        if all(isinstance(item, int | float | complex | np.generic) and _is_array(item) for item in items):
            return "it is an array of objects, which are numbers: yield it as numbers, such as .astype('float32')"
        return _instead_of_items(items)
    package, name = type(value).__module__.partition(".")[0], type(value).__name__
    for library, end, advice in _OF_LIBRARY:
        if package == library and name.endswith(end):
            return advice
    if callable(value):
        return "it is a function or a class: yield what it returns"
    attributes = ", such as vars() of it" if hasattr(value, "__dict__") else ""
    return f"yield numbers, text and arrays, or tuples and dicts of them{attributes}"


def _instead_of_items(items: Sequence[Any]) -> str:
    """Say what to yield instead of a list, or an array of objects, with these items."""
    odd = next((item for item in items if not _is_array(item)), np.nan)
    if isinstance(odd, Mapping):
        lists = ", ".join(f"{key!r}: [...]" for key in list(odd)[:3])
        return (
            f"it holds dicts: yield one dict of lists, {{{lists}}}, or a tuple of the dicts if each sample has as many "
            "of them"
        )
    if isinstance(odd, tuple):
        return "it holds tuples of unequal items: yield a tuple of lists, one for each column"
    if odd is not np.nan:
        advice = instead_of(odd)
        return advice if odd is None else f"it holds {type(odd).__name__} objects, and for each: {advice}"
    if 0 < sum(isinstance(item, str | bytes) for item in items) < len(items):
        return MIXED
    return (
        'its items differ in length: give Feed(batching="pad") or Feed(batching="ragged") if samples do. If the items '
        "of one sample do, yield a tuple of arrays, or declare the leaf with Feed(spec=...), such as "
        'Leaf("float32", (None, None), ragged=True)'
    )


def _is_array(item: Any) -> bool:
    """Whether an item is a number, text, or an array or list of them."""
    if isinstance(item, list):
        return all(map(_is_array, item))
    if isinstance(item, np.ndarray):
        return not item.dtype.hasobject
    if isinstance(item, int):
        return -(2**63) <= item < 2**64
    return isinstance(item, str | bytes | float | complex | np.generic) or hasattr(item, "__array__")
