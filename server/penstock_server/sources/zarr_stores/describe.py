"""Describes Zarr stores: the arrays that share a length, their chunks, and how many chunks are stored."""

from __future__ import annotations

import math
from typing import Any

from penstock_proto.status.figures import size

from ..description import Column, Description, leaf_names, other_length, together
from .reader import arrays_of, opened, row_nbytes, unfit

_LEAVES = 100
"""Arrays that are proposed as leaves, at most."""


def describe(file: str) -> Description:
    """Describe a Zarr store.

    Raises:
        ImportError: zarr is not installed.
        OSError: the store cannot be read; the message names it.
        ValueError: too many arrays share a length; the message says what to do.
    """
    with opened(file) as store:
        arrays = arrays_of(store)
        left_out = {name: why for name, array in arrays.items() if (why := unfit(array))}
        fit = {name: array for name, array in arrays.items() if name not in left_out}
        lengths = {name: array.shape[0] for name, array in fit.items()}
        rows = together(lengths, {name: lengths[name] * row_nbytes(array) for name, array in fit.items()})
        left_out |= {name: other_length(length, rows or 0) for name, length in lengths.items() if length != rows}
        proposed = [name for name in fit if name not in left_out]
        if len(proposed) > _LEAVES:
            raise ValueError(
                f"{file} has {len(proposed)} arrays of length {rows}: if each is a sample, write a generator that "
                "yields them, and give its feed as MODULE:ATTR. Otherwise name those to serve with --leaf NAME=ARRAY"
            )
        short = leaf_names(proposed)
        columns = tuple(Column(name, short[name], _storage(fit[name])) for name in proposed)
        facts = tuple(fact for name in proposed if (fact := _missing(name, fit[name])))
        return Description(columns, left_out, facts, rows, names_leaves=not hasattr(store, "shape"))


def _storage(array: Any) -> str:
    words = [
        f"array {array.path!r}, " if array.path else "",
        f"{array.dtype}{[*array.shape]}, chunks {[*array.chunks]}",
    ]
    words.append(f" of {size(math.prod(array.chunks) * array.dtype.itemsize)}")
    if array.shards:
        words.append(f", shards {[*array.shards]}")
    return "".join(words)


def _missing(name: str, array: Any) -> str:
    """Return how many chunks are not stored. zarr fills them, so chunks that were lost look like these."""
    stored, count = array.nchunks_initialized, array.nchunks
    if stored >= count:
        return ""
    return f"{name!r}: {count - stored} of {count} chunks are not stored, and are read as {array.fill_value}"
