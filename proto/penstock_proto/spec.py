"""The element spec: the structure, dtypes and shapes of a feed's samples or batches, as a small frozen tree.

A spec is a `Leaf`, a `TupleSpec` or a `DictSpec` of specs. It crosses the wire in this form, because msgpack does not
tell tuples from lists. The order of leaves is that of the tree, dictionary keys sorted.

This file knows no slab, no batch and no TensorFlow.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from .errors import SpecError
from .value_text import shown

MAX_LEAVES = 1024
MAX_DEPTH = 32
MAX_DIMS = 16
MAX_RAGGED = 8
"""Most ragged dimensions of a leaf."""
MAX_DIM = 2**40
MAX_KEY = 256
MAX_SPEC = 80 * 1024
"""Most bytes of a spec in a message. Other specs and restart records need room there too."""
MAX_NBYTES = 2**50
"""Most bytes of a sample."""

DTYPES: frozenset[str] = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 "
    "float16 float32 float64 bfloat16 complex64 complex128 string".split()
)
"""Names of the dtypes that can be served. bfloat16 is that of the package ml_dtypes. Text is "string": bytes of any
length, with `str` encoded as UTF-8."""

Dim: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_DIM)] | None


class Leaf(Struct, frozen=True, tag="leaf", forbid_unknown_fields=True, omit_defaults=True):
    """One array: its dtype's name (one of `DTYPES`) and its shape, with None for each dimension that varies.

    If dimensions vary, samples are padded to one shape. With `ragged`, a batch holds them one after another instead,
    and is a `tf.RaggedTensor`. The first dimensions of a ragged leaf vary, one or more, and no others:
    `Leaf("int32", (None, None), ragged=True)` is for lists of lists. Text varies only if it is ragged.

    Users may give anything that NumPy accepts as a dtype of such a name (`np.float32`), `str` or `bytes` for text, and
    a list or a single number as the shape: `Leaf(np.float32, 3)` is `Leaf("float32", (3,))`.
    """

    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Dim, ...], Meta(max_length=MAX_DIMS)]
    ragged: bool = False

    if TYPE_CHECKING:

        def __init__(self, dtype: npt.DTypeLike, shape: int | Sequence[int | None], ragged: bool = False) -> None: ...

    def __post_init__(self) -> None:
        # The decoder has checked that these are text and a tuple before this runs.
        if not isinstance(self.dtype, str):
            force_setattr(self, "dtype", _dtype_name(self.dtype))
        if not isinstance(self.shape, tuple):
            force_setattr(self, "shape", _shape(self.shape))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} cannot be served; these can: {', '.join(sorted(DTYPES))}")
        rest = self.shape[self.ragged_dims :]
        if self.ragged and (not self.ragged_dims or None in rest or (self.text and rest)):
            raise ValueError(
                f"{self} cannot be ragged: the first dimensions of a ragged leaf are None, at least one, and no other "
                f"ones are{'. Of text, all are; a single string needs no ragged=True' if self.text else ''}"
            )
        if self.ragged_dims > MAX_RAGGED:
            raise ValueError(f"{self} has {self.ragged_dims} ragged dimensions; up to {MAX_RAGGED} can be served")

    @property
    def ragged_dims(self) -> int:
        """How many dimensions, from the first on, a ragged leaf stores by their row splits; 0 if it is not ragged."""
        return sum(1 for _ in itertools.takewhile(lambda dim: dim is None, self.shape)) if self.ragged else 0

    @property
    def static(self) -> bool:
        """Whether every dimension is known."""
        return None not in self.shape

    @property
    def text(self) -> bool:
        """Whether it holds text, whose strings vary in length."""
        return self.dtype == "string"

    @property
    def sized(self) -> bool:
        """Whether its size in bytes is known."""
        return self.static and not self.text

    def __str__(self) -> str:
        dims = ["None" if dim is None else str(dim) for dim in self.shape]
        dims[: self.ragged_dims] = ["ragged"] * self.ragged_dims
        return f"{self.dtype}[{', '.join(dims)}]"


def _dtype_name(dtype: Any) -> str:
    if dtype in (str, bytes):
        return "string"
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise ValueError(f"dtype is {shown(dtype)}; it is a name such as 'float32', or NumPy's np.float32") from None


def _shape(shape: Any) -> tuple[Any, ...]:
    if isinstance(shape, int | np.integer):
        return (int(shape),)
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes):
        raise ValueError(f"shape is {shown(shape)}; it is a tuple such as (224, 224, 3), or () for a number")
    return tuple(shape)


class TupleSpec(Struct, frozen=True, tag="tuple", forbid_unknown_fields=True):
    """A tuple of specs."""

    items: Annotated[tuple[Spec, ...], Meta(max_length=MAX_LEAVES)]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.items))}{',' if len(self.items) == 1 else ''})"


class DictSpec(Struct, frozen=True, eq=False, tag="dict", forbid_unknown_fields=True, omit_defaults=True):
    """A dictionary of specs; `keys` are sorted, and `items[i]` belongs to `keys[i]`.

    The user's dictionaries may have another order: key `order[i]` comes at place i. An empty `order` is the sorted one.
    The trainer gets batches in that order. The data do not depend on it, so it does not matter when specs are compared.
    """

    keys: Annotated[tuple[Annotated[str, Meta(max_length=MAX_KEY)], ...], Meta(max_length=MAX_LEAVES)]
    items: Annotated[tuple[Spec, ...], Meta(max_length=MAX_LEAVES)]
    order: Annotated[tuple[int, ...], Meta(max_length=MAX_LEAVES)] = ()

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.items) or list(self.keys) != sorted(set(self.keys)):
            raise ValueError("a DictSpec has one item for each key, and sorted, distinct keys")
        if self.order and sorted(self.order) != list(range(len(self.keys))):
            raise ValueError(f"the order of a DictSpec has the number of each of its {len(self.keys)} keys once")

    @classmethod
    def of(cls, items: Mapping[str, Spec]) -> DictSpec:
        """Return the spec of a dictionary with these items, in this order."""
        keys = sorted(items)
        order = tuple(map(keys.index, items)) if list(items) != keys else ()
        return cls(tuple(keys), tuple(items[key] for key in keys), order)

    @property
    def in_order(self) -> Sequence[int]:
        """The numbers of the keys in the order of the user's dictionary."""
        return self.order or range(len(self.keys))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DictSpec) and (self.keys, self.items) == (other.keys, other.items)

    def __ne__(self, other: object) -> bool:
        return not self == other  # a Struct has its own __ne__, which compares identity

    def __hash__(self) -> int:
        return hash((self.keys, self.items))

    def __str__(self) -> str:
        return "{" + ", ".join(f"{self.keys[i]!r}: {self.items[i]}" for i in self.in_order) + "}"


Spec: TypeAlias = Leaf | TupleSpec | DictSpec


def check_size(spec: Spec | None) -> None:
    """Refuse a spec that is deeper or wider than any that `infer` makes, so that functions can safely recurse into
    specs.

    Raises:
        ValueError: it is deeper or wider; the message says which.
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
    """Yield each leaf with its path, such as `['x'][0]`, in order."""
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
    """Return the leaves in order."""
    return [leaf for _, leaf in leaves(spec)]


def unflatten(spec: Spec, flat: Sequence[Any]) -> Any:
    """Build the structure of `spec` (tuples and dicts) with the items of `flat`, in order, as leaves."""
    return _unflatten(spec, iter(flat))


def _unflatten(spec: Spec, flat: Iterator[Any]) -> Any:
    if isinstance(spec, Leaf):
        return next(flat)
    if isinstance(spec, TupleSpec):
        return tuple(_unflatten(item, flat) for item in spec.items)
    values = [_unflatten(item, flat) for item in spec.items]
    return {spec.keys[i]: values[i] for i in spec.in_order}


def map_leaves(change: Callable[[Leaf], Leaf], spec: Spec) -> Spec:
    """Return `spec` with each leaf replaced by `change(leaf)`."""
    if isinstance(spec, Leaf):
        return change(spec)
    if isinstance(spec, TupleSpec):
        return TupleSpec(tuple(map_leaves(change, item) for item in spec.items))
    return DictSpec(spec.keys, tuple(map_leaves(change, item) for item in spec.items), spec.order)


def flatten(spec: Spec, sample: Any) -> list[Any]:
    """Return the leaves of `sample` in order.

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
            fix = "every sample of a feed needs the same structure"
            if is_list(sample):
                fix = "of a list of dicts, make one dict of lists, which a transform= can do too"
            raise SpecError(
                f"sample{path} should be a dict with the keys {list(spec.keys)}, but is {shown(sample)}: {fix}"
            )
        for key, item in zip(spec.keys, spec.items, strict=True):
            _flatten(item, sample[key], f"{path}[{key!r}]", flat)


def is_list(value: Any) -> bool:
    """Return whether a value may hold lists or arrays of different lengths."""
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object)


def check(spec: Spec) -> None:
    """Check the bounds that hold for a spec as a whole.

    Raises:
        SpecError: it is too large to be served.
    """
    found = leaf_list(spec)
    if not 1 <= len(found) <= MAX_LEAVES:
        raise SpecError(
            f"a sample has {len(found)} leaves; 1 to {MAX_LEAVES} can be served"
            f"{': stack those of one shape into one array' if found else ''}"
        )
    arrays = sum(1 + leaf.text + leaf.ragged_dims for leaf in found)
    if arrays > MAX_LEAVES:
        raise SpecError(
            f"the leaves of a sample are stored in {arrays} arrays: text and ragged leaves take more than one; "
            f"{MAX_LEAVES} can be served"
        )
    nbytes = len(msgspec.msgpack.encode(spec))
    if nbytes > MAX_SPEC:
        raise SpecError(
            f"the spec of a sample takes {nbytes} bytes, keys, dtypes and shapes of {len(found)} leaves; up to "
            f"{MAX_SPEC} can be served: use shorter keys, or stack leaves of one shape into one array"
        )
    nbytes = sum(numpy_dtype(leaf.dtype).itemsize * math.prod(dim or 0 for dim in leaf.shape) for leaf in found)
    if nbytes > MAX_NBYTES:
        raise SpecError(f"a sample takes {nbytes} bytes, more than any machine has")


@functools.cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name in `DTYPES`, in native byte order. Text is an array of objects.

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
    return np.dtype(object if name == "string" else name)
