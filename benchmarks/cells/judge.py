"""Compares a loader's samples with those that the source yields without a loader. One judge for all loaders.

`judged` takes rows from any loader, and says whether they are the same samples, with the same structure and dtypes,
each as often as the source yields it. If not, it finds the smallest difference that must be ignored to make them equal,
and names it.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np

IGNORED = {  # what to ignore, and what it means if the samples are equal then
    "lists": "tuples become lists",
    "order": "the order of a dict's keys is lost",
    "dtypes": "other dtypes",
    "ends": "NULs at the end of texts are lost",
}
ATTEMPTS = [
    ("lists",),
    ("order",),
    ("dtypes",),
    ("ends",),
    ("lists", "order"),
    ("order", "ends"),
    ("lists", "dtypes"),
    tuple(IGNORED),
]


class Rows(list):
    """Rows that a loader gives as a list, without stacking them."""


def plain(leaf: Any) -> Any:
    """Return a leaf as a NumPy array, or a list of bytes or arrays for text and ragged leaves."""
    if hasattr(leaf, "to_list") and hasattr(leaf, "row_splits"):  # tf.RaggedTensor
        values, splits = leaf.values.numpy(), leaf.row_splits.numpy()
        return [values[a:b] for a, b in itertools.pairwise(splits)]
    if hasattr(leaf, "detach"):  # torch.Tensor
        if str(leaf.dtype) == "torch.bfloat16":
            import ml_dtypes
            import torch

            return leaf.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return leaf.detach().numpy()
    if hasattr(leaf, "numpy"):  # tf.Tensor
        leaf = leaf.numpy()
    if isinstance(leaf, bytes | str):
        return leaf
    if isinstance(leaf, list) and leaf and isinstance(leaf[0], bytes | str):  # torch's batch of text
        return leaf
    return np.asarray(leaf)


def branch(value: Any) -> bool:
    """Return whether the value is a structure, not a leaf."""
    return isinstance(value, dict | tuple) or (
        isinstance(value, list) and not (value and isinstance(value[0], bytes | str))
    )


def rows(batch: Any) -> Iterator[Any]:
    """Yield the rows of a batch, each with its structure."""
    if isinstance(batch, Rows):
        yield from batch
    elif isinstance(batch, dict):
        columns = [list(rows(leaf)) for leaf in batch.values()]
        yield from (type(batch)(zip(batch, row, strict=True)) for row in zip(*columns, strict=True))
    elif branch(batch):
        columns = [list(rows(leaf)) for leaf in batch]
        yield from (type(batch)(row) for row in zip(*columns, strict=True))
    else:
        yield from plain(batch)


def canonical(value: Any, ignored: tuple[str, ...] = ()) -> Hashable:
    """Return the value's structure, dtypes and bytes in a form that compares exactly."""
    if isinstance(value, dict):
        items = [(key, canonical(leaf, ignored)) for key, leaf in value.items()]
        return ("dict", *(sorted(items, key=repr) if "order" in ignored else items))
    if branch(value):
        kind = "tuple" if "lists" in ignored else type(value).__name__
        return (kind, *(canonical(leaf, ignored) for leaf in value))
    leaf = plain(value)
    if isinstance(leaf, np.ndarray) and leaf.ndim == 0 and leaf.dtype.kind in "OSU":
        leaf = leaf.item()
    if isinstance(leaf, bytes | str):
        data = leaf.encode() if isinstance(leaf, str) else leaf
        return ("text", data.rstrip(b"\0") if "ends" in ignored else data)
    if "dtypes" in ignored:
        return (leaf.shape, leaf.astype(np.complex128).tobytes())
    return (str(leaf.dtype), leaf.shape, leaf.tobytes())


def times(number: int) -> str:
    return {2: "twice", 3: "three times"}.get(number, f"{number} times")


def judged(got: Iterable[Any], expected: Iterable[Any]) -> str | None:
    """Return what is wrong with the samples that came, or None."""
    got, expected = list(got), list(expected)
    have, want = Counter(map(canonical, got)), Counter(map(canonical, expected))
    if have == want:
        return None
    for ignored in ATTEMPTS:
        some = [Counter(canonical(row, ignored) for row in side) for side in (got, expected)]
        if some[0] == some[1]:
            return "; ".join(IGNORED[one] for one in ignored)
    if set(have) == set(want) and len({have[one] / want[one] for one in want}) == 1:
        return f"every sample comes {times(have.total() // want.total())}"
    missing, extra = (want - have).total(), have - want
    known = sum(count for one, count in extra.items() if one in want)
    found = [(missing, "missing"), (known, "too often"), (extra.total() - known, "not of the source")]
    return f"of {want.total()} samples, " + ", ".join(f"{count} {what}" for count, what in found if count)


def kinds(value: Any) -> Hashable:
    """Return only the structure, dtypes and shapes. Whether a sequence is a list does not count."""
    if branch(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return tuple((key, kinds(leaf)) for key, leaf in items)
    leaf = plain(value)
    return ("text",) if isinstance(leaf, bytes | str) else (str(leaf.dtype), leaf.shape)


def judged_random(got: Iterable[Any], example: Any) -> str | None:
    """Return what is wrong with random batches, which should all differ, or None."""
    got = list(got)
    if {kinds(one) for one in got} != {kinds(example)}:
        return "another structure or other dtypes"
    repeated = len(got) - len(set(map(canonical, got)))
    return f"{repeated} of {len(got)} batches are copies: workers draw the same random numbers" if repeated else None


def same_order(got: Iterable[Any], other: Iterable[Any]) -> str | None:
    """Return what differs between two streams, or None if they are equal, batch by batch."""
    one, two = list(map(canonical, got)), list(map(canonical, other))
    if one == two:
        return None
    return "the order changes" if Counter(one) == Counter(two) else "the data change"


def parallel(log: Iterable[int]) -> bool:
    """Return whether two or more processes each made at least a tenth of the samples."""
    counts = Counter(log)
    return sum(count >= counts.total() / 10 for count in counts.values()) >= 2
