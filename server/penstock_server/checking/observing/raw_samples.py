"""Digests of samples as a generator yields them, also of those that only `transform=` makes servable.

Numbers and text are compared by value, any other object by its pickle.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from penstock_proto.batches.inferring import as_array, as_text

from ...worker.batch.sample_spec import DIGEST, digests_of


class NotComparable(Exception):
    """A sample has no digest; the message says why."""


def digests_of_raw(sample: Any) -> bytes:
    """Return the digests of a sample's leaves, concatenated. If it has dicts, the digest of their keys follows.

    Raises:
        NotComparable: one of the leaves can be neither served nor pickled.
    """
    keys: list[str] = []
    digests = [_digest(leaf) for leaf in _leaves(sample, keys)]
    if keys or not digests:
        digests.append(_hash(repr(keys).encode()))
    return b"".join(digests)


def digests_of_rows(batch: Any) -> Iterator[bytes]:
    """Yield the digests of each row of a batch. Leaves without rows, such as an empty list or a number, are left out. A
    batch is compared as a whole if no leaf has rows, or if leaves have different numbers of them.

    Raises:
        NotComparable: see `digests_of_raw`.
    """
    found = [_array(leaf) for leaf in _leaves(batch, [])]
    arrays = [array for array in found if array is not None and array.ndim and len(array)]
    lengths = {*map(len, arrays)}
    if len(lengths) != 1:
        yield digests_of_raw(batch)
        return
    for row in range(lengths.pop()):
        yield b"".join(digests_of(array[row]) for array in arrays)


def _leaves(sample: Any, keys: list[str]) -> Iterator[Any]:
    """Yield the leaves of nested tuples, dicts with text keys, and lists of arrays. Add the keys of dicts to `keys`."""
    if isinstance(sample, Mapping) and all(isinstance(key, str) for key in sample):
        keys += sorted(sample)
        parts = [sample[key] for key in sorted(sample)]
    elif isinstance(sample, tuple) or _is_list_of_arrays(sample):
        parts = list(sample)
    else:
        yield sample
        return
    for part in parts:
        yield from _leaves(part, keys)


def _is_list_of_arrays(sample: Any) -> bool:
    """Return whether it is a list of several leaves. (A list of numbers or text is one array.)"""
    return isinstance(sample, list) and any(_is_compound(part) for part in sample)


def _is_compound(part: Any) -> bool:
    return isinstance(part, tuple | Mapping) or len(getattr(part, "shape", ())) > 0 or _is_list_of_arrays(part)


def _array(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Return a leaf as an array, or None if it cannot be one."""
    try:
        text = as_text(leaf)
        return as_array(leaf) if text is None else text
    except Exception:  # the user's object may raise anything
        return None


def _digest(leaf: Any) -> bytes:
    try:
        return digests_of(leaf)
    except Exception:  # it cannot be served as it is
        return _hash(_pickled(leaf))


def _pickled(leaf: Any) -> bytes:
    """Pickle a leaf. Without the memo, equal objects have equal pickles, whether or not they share their parts."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.fast = True
    try:
        pickler.dump(leaf)
        return file.getvalue()
    except Exception:
        pass  # an object that contains itself needs the memo
    try:
        return pickle.dumps(leaf)
    except Exception as error:
        name = type(leaf).__name__
        raise NotComparable(f"samples contain {name} objects, which cannot be pickled ({error})") from None


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()
