"""The element spec: the structure, dtypes and shapes of what a feed yields, as a small frozen tree.

A spec is a `Leaf`, a `TupleSpec` or a `DictSpec` of specs. It crosses the wire as it stands here, so that no container
type of msgpack decides whether a tuple stays a tuple. The order of leaves is that of the tree, dictionary keys sorted.

This file knows no slab, no batch and no TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from .errors import SpecError

MAX_LEAVES = 1024
MAX_DEPTH = 32
MAX_DIMS = 16

DTYPES: frozenset[str] = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 bfloat16 complex64 complex128".split()
)
"""Names of the dtypes that can be served. bfloat16 is that of the package ml_dtypes."""

Dim: TypeAlias = Annotated[int, Meta(ge=0, le=2**40)] | None


class Leaf(Struct, frozen=True, tag="leaf", forbid_unknown_fields=True):
    """One array: its dtype's name (one of `DTYPES`) and its shape, None where a dimension varies."""

    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIMS)]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} cannot be served; these can: {', '.join(sorted(DTYPES))}")

    @property
    def static(self) -> bool:
        """Whether every dimension is known."""
        return None not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('None' if d is None else str(d) for d in self.shape)}]"


class TupleSpec(Struct, frozen=True, tag="tuple", forbid_unknown_fields=True):
    """A tuple of specs."""

    items: Annotated[tuple[Spec, ...], Meta(max_length=MAX_LEAVES)]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))}{',' if len(self.items) == 1 else ''})"


class DictSpec(Struct, frozen=True, tag="dict", forbid_unknown_fields=True):
    """A dictionary of specs; `keys` are sorted, and `items[i]` belongs to `keys[i]`."""

    keys: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=MAX_LEAVES)]
    items: Annotated[tuple[Spec, ...], Meta(max_length=MAX_LEAVES)]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.items) or list(self.keys) != sorted(set(self.keys)):
            raise ValueError("a DictSpec has one item for each key, and sorted, distinct keys")

    def __str__(self) -> str:
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(self.keys, self.items, strict=True)) + "}"


Spec: TypeAlias = Leaf | TupleSpec | DictSpec


def check_size(spec: Spec | None) -> None:
    """Refuse a spec that is deeper or wider than any that `infer` makes, so that functions may recurse into all others.

    Raises:
        ValueError: it is; the message says in what.
    """
    level: list[Spec] = [] if spec is None else [spec]
    ends = 0
    for depth in itertools.count():
        if not level:
            return
        if depth > MAX_DEPTH:
            raise ValueError(f"a spec that is nested more than {MAX_DEPTH} deep")
        below: list[Spec] = []
        for node in level:
            if isinstance(node, Leaf) or not node.items:
                ends += 1
            else:
                below += node.items
            if ends + len(below) > MAX_LEAVES:
                raise ValueError(f"a spec with more than {MAX_LEAVES} leaves")
        level = below


def leaves(spec: Spec) -> Iterator[tuple[str, Leaf]]:
    """Each leaf with its path, such as `['x'][0]`, in order."""
    yield from _leaves(spec, "")


def _leaves(spec: Spec, path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(spec, Leaf):
        yield path, spec
    elif isinstance(spec, TupleSpec):
        for i, item in enumerate(spec.items):
            yield from _leaves(item, f"{path}[{i}]")
    else:
        for key, item in zip(spec.keys, spec.items, strict=True):
            yield from _leaves(item, f"{path}[{key!r}]")


def leaf_list(spec: Spec) -> list[Leaf]:
    """The leaves in order."""
    return [leaf for _, leaf in leaves(spec)]


def unflatten(spec: Spec, flat: Sequence[Any]) -> Any:
    """The structure of `spec` (tuples and dicts) with `flat`'s items, in order, for leaves."""
    return _unflatten(spec, iter(flat))


def _unflatten(spec: Spec, flat: Iterator[Any]) -> Any:
    if isinstance(spec, Leaf):
        return next(flat)
    if isinstance(spec, TupleSpec):
        return tuple(_unflatten(item, flat) for item in spec.items)
    return {key: _unflatten(item, flat) for key, item in zip(spec.keys, spec.items, strict=True)}


def map_leaves(change: Callable[[Leaf], Leaf], spec: Spec) -> Spec:
    """`spec` with `change(leaf)` for each leaf."""
    if isinstance(spec, Leaf):
        return change(spec)
    if isinstance(spec, TupleSpec):
        return TupleSpec(tuple(map_leaves(change, item) for item in spec.items))
    return DictSpec(spec.keys, tuple(map_leaves(change, item) for item in spec.items))


def flatten(spec: Spec, sample: Any) -> list[Any]:
    """The leaves of `sample` in order.

    Raises:
        SpecError: the structure of `sample` is not that of `spec`.
    """
    flat: list[Any] = []
    _flatten(spec, sample, "", flat)
    return flat


def _flatten(spec: Spec, sample: Any, path: str, flat: list[Any]) -> None:
    if isinstance(spec, Leaf):
        flat.append(sample)
    elif isinstance(spec, TupleSpec):
        if not isinstance(sample, tuple) or len(sample) != len(spec.items):
            raise SpecError(
                f"sample{path} should be a tuple of {len(spec.items)}, as {spec}, but is {shown(sample)}: "
                "every sample of a feed needs the same structure"
            )
        for i, (item, part) in enumerate(zip(spec.items, sample, strict=True)):
            _flatten(item, part, f"{path}[{i}]", flat)
    else:
        if not isinstance(sample, Mapping) or sample.keys() != set(spec.keys):
            raise SpecError(
                f"sample{path} should be a dict with the keys {list(spec.keys)}, but is {shown(sample)}: "
                "every sample of a feed needs the same structure"
            )
        for key, item in zip(spec.keys, spec.items, strict=True):
            _flatten(item, sample[key], f"{path}[{key!r}]", flat)


def infer(sample: Any) -> Spec:
    """The spec of one sample: nested tuples and dicts (with text keys) of arrays and scalars.

    Lists are arrays, as in tf.data. A Python int becomes int64, a float float64, a bool bool, as in NumPy.

    Raises:
        SpecError: something in it cannot be served; the message says what to yield instead.
    """
    spec = _infer(sample, "", 0)
    count = len(leaf_list(spec))
    if not 1 <= count <= MAX_LEAVES:
        raise SpecError(f"a sample has {count} leaves; 1 to {MAX_LEAVES} can be served")
    return spec


def _infer(sample: Any, path: str, depth: int) -> Spec:
    if depth > MAX_DEPTH:
        raise SpecError(f"sample{path} is nested more than {MAX_DEPTH} deep")
    if isinstance(sample, tuple):
        return TupleSpec(tuple(_infer(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(sample)))
    if isinstance(sample, Mapping):
        if not all(isinstance(key, str) for key in sample):
            raise SpecError(f"sample{path} is a dict with keys that are no text: {shown(list(sample))}; use str keys")
        keys = sorted(sample)
        return DictSpec(tuple(keys), tuple(_infer(sample[key], f"{path}[{key!r}]", depth + 1) for key in keys))
    array = as_array(sample, path)
    if array.ndim > MAX_DIMS:
        raise SpecError(f"sample{path} has {array.ndim} dimensions; up to {MAX_DIMS} can be served")
    return Leaf(array.dtype.name, array.shape)


def as_array(value: Any, path: str = "") -> npt.NDArray[Any]:
    """`value` as an array of a dtype that can be served.

    Raises:
        SpecError: its dtype cannot be served; the message says what to yield instead.
    """
    if isinstance(value, np.ma.MaskedArray):
        text = "is a masked array, whose mask would be lost: yield `.filled(...)` and the mask apart"
        raise SpecError(f"sample{path} {text}")
    try:
        array = np.asarray(value)
    except ValueError as error:
        mend = "a list is read as one array: yield a tuple, such as (X, y), and where lengths differ, pad them"
        raise SpecError(f"sample{path} is no array ({error}); {mend}") from None
    if _can_be_served(array.dtype):
        return array
    if array.dtype.kind in "SU":
        hint = "text and bytes cannot be served yet: yield ids, or np.frombuffer(value, np.uint8) padded to one length"
    elif array.dtype.kind == "O":
        hint = "yield numeric arrays; where lengths differ, pad them"
    elif array.dtype.kind in "mM":
        hint = "yield .astype('int64') of it"
    else:
        hint = f"these can be: {', '.join(sorted(DTYPES))}"
    raise SpecError(f"sample{path} is {shown(value)} of dtype {array.dtype}, which cannot be served; {hint}")


@functools.cache
def _can_be_served(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES  # which NumPy makes up anew each time, in more time than all else takes


def shown(value: Any, limit: int = 120) -> str:
    """A short text that shows `value` in a message: arrays by dtype and shape, others by their repr."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name} array of shape {value.shape}"
    if isinstance(value, tuple):
        text = f"({', '.join(shown(item, 40) for item in value[:8])}{', ...' if len(value) > 8 else ''})"
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key!r}: {shown(item, 40)}' for key, item in list(value.items())[:8])}}}"
    else:
        try:
            text = repr(value)
        except Exception:
            text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name in `DTYPES`, in native byte order.

    Raises:
        SpecError: bfloat16 without the package ml_dtypes.
    """
    if name == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise SpecError("the feed has bfloat16 leaves: install ml_dtypes to read them") from None
        bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return bfloat16
    return np.dtype(name)
