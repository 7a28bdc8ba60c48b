"""Inspects a sample: its spec, its size, and digests to compare it with another worker's."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock_proto import SpecError
from penstock_proto.batches.inferring import as_array, as_text, infer, is_nested
from penstock_proto.spec import Leaf, Spec, flatten, leaf_list, leaves, map_leaves, numpy_dtype

from .leaf_check import joined


def infer_spec(sample: Any, batch_size: int | None, batching: str = "stack") -> Spec:
    """Return the spec of a feed with this first sample.

    If `batch_size` is None, the sample is a ready batch, and its first dimension varies. With `batching` "pad" or
    "ragged" the length of each array with one dimension varies.

    Raises:
        SpecError: it cannot be served.
    """
    spec = infer(sample)
    if batch_size is not None:
        if batching == "stack":
            return spec
        ragged = batching == "ragged"
        return map_leaves(
            lambda leaf: leaf if leaf.text or len(leaf.shape) != 1 else Leaf(leaf.dtype, (None,), ragged), spec
        )
    check_lengths(spec, flatten(spec, sample))
    return map_leaves(lambda leaf: Leaf(leaf.dtype, (None, *leaf.shape[1:])) if leaf.shape else leaf, spec)


def check_lengths(spec: Spec, flat: Sequence[Any]) -> None:
    """Check that all leaves of a ready batch have the same number of rows. (A leaf without dimensions has none.)

    Raises:
        SpecError: the numbers differ.
    """
    shapes = [np.shape(value) for value in flat]
    if len({shape[0] for shape in shapes if shape}) > 1:
        rows = [f"batch{path} has {shape[0]}" for (path, _), shape in zip(leaves(spec), shapes, strict=True) if shape]
        raise SpecError(
            f"the leaves of a batch have different numbers of rows: {', '.join(rows[:8])}"
            f"{', ...' if len(rows) > 8 else ''}. Yield the "
            "same number for each, or, if they are meant to differ (the nodes and edges of a graph), declare them with "
            "Feed(spec=...)"
        )


DIGEST = 8
"""Bytes of a leaf's digest."""


def digests_of(sample: Any) -> bytes:
    """Return the digests of a sample's leaves, concatenated. Each digest covers dtype, shape and bytes.

    Raises:
        SpecError: the sample cannot be served.
    """
    return b"".join(map(_digest, flatten(infer(sample, nested=True), sample)))


def paths_of(sample: Any) -> list[str]:
    """Return the paths of a sample's leaves, in the order of `digests_of`.

    Raises:
        SpecError: the sample cannot be served.
    """
    return [path for path, _ in leaves(infer(sample, nested=True))]


def _digest(value: Any) -> bytes:
    text = as_text(value)
    if text is not None:
        data, array = joined(text.reshape(-1).tolist())
        digest = hashlib.blake2b(f"string{text.shape}".encode() + array.tobytes(), digest_size=DIGEST)
        digest.update(data.data)
    elif is_nested(value):
        digest = hashlib.blake2b(f"list[{len(value)}]".encode(), digest_size=DIGEST)
        for item in value:
            digest.update(_digest(item))
    else:
        array = as_array(value)
        digest = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=DIGEST)
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


def nbytes_of(spec: Spec, sample: Any) -> int:
    """Return the bytes of one sample or ready batch; `sample` is used only if the spec does not give its size."""
    total = 0
    flat = flatten(spec, sample) if sample is not None else [None] * len(leaf_list(spec))
    for value, leaf in zip(flat, leaf_list(spec), strict=True):
        if leaf.text:
            total += 0 if value is None else _text_nbytes(value)
            continue
        total += 8 * leaf.ragged
        items = math.prod(dim or 0 for dim in leaf.shape) if leaf.static else _items(value)
        total += numpy_dtype(leaf.dtype).itemsize * items
    return total


def _text_nbytes(value: Any) -> int:
    text = as_text(value)
    if text is None:  # lists of lists of strings
        return sum(map(_text_nbytes, value)) + 8
    return sum(map(len, text.reshape(-1))) + 8 * (text.size + 1)


def _items(value: Any) -> int:
    return sum(map(_items, value)) + 1 if is_nested(value) else int(as_array(value).size)
