"""Converts the spec that a user declares with `Feed(spec=...)` from plain dicts and tuples, and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_proto import SpecError
from penstock_proto.spec import MAX_DEPTH, DictSpec, Leaf, Spec, TupleSpec, check, leaf_list, leaves, map_leaves
from penstock_proto.value_text import shown

from .values import Pad


def checked_spec(spec: Any, batch_size: int | None, batching: str | Pad) -> Spec:
    """Return the spec of a sample, or of a batch if `batch_size` is None.

    Raises:
        TypeError, ValueError: it cannot be served; the message says what to do.
    """
    plain = _spec_of(spec, "", 0)
    try:
        checked: Spec = msgspec.convert(msgspec.to_builtins(plain), type=Spec)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"cannot serve spec {plain}: {error}") from None
    if not leaf_list(checked):
        raise ValueError("spec has no leaves: a sample needs at least one array")
    try:
        check(checked)
    except SpecError as error:
        raise ValueError(f"cannot serve spec: {error.message}") from None
    if batch_size is None:
        for path, leaf in leaves(checked):
            if leaf.text and None in leaf.shape[1:]:
                raise ValueError(f"spec{path} is {leaf}: of text, only the first dimension of a batch may vary")
        return checked
    if batching == "stack" and not all(leaf.static for leaf in leaf_list(checked)):
        raise ValueError(
            f"samples that are stacked into batches need one shape, and spec is {spec}. Give "
            'batching="pad" or batching="ragged", or yield whole batches with batch_size=None'
        )
    if batching != "ragged":
        for path, leaf in leaves(checked):
            if leaf.text and not leaf.static and not leaf.ragged:
                raise ValueError(
                    f"spec{path} is {leaf}: if the number of strings varies, they can be ragged, but not padded: "
                    f"declare Leaf(str, {leaf.shape}, ragged=True), or join them, or fill up with ''"
                )
        return checked
    try:
        return map_leaves(lambda leaf: leaf if leaf.static else Leaf(leaf.dtype, leaf.shape, ragged=True), checked)
    except ValueError as error:
        raise ValueError(f'with batching="ragged", {error}') from None


def _spec_of(spec: Any, path: str, depth: int) -> Spec:
    """Convert a spec that the user wrote, perhaps with plain dicts and tuples."""
    if depth > MAX_DEPTH:
        raise ValueError(f"spec{path} is nested more than {MAX_DEPTH} deep")
    if isinstance(spec, Leaf):
        return spec
    if isinstance(spec, TupleSpec | tuple):
        items = spec.items if isinstance(spec, TupleSpec) else spec
        return TupleSpec(tuple(_spec_of(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(items)))
    if isinstance(spec, DictSpec):
        spec = {spec.keys[i]: spec.items[i] for i in spec.in_order}
    if isinstance(spec, Mapping) and all(isinstance(key, str) for key in spec):
        return DictSpec.of({key: _spec_of(item, f"{path}[{key!r}]", depth + 1) for key, item in spec.items()})
    raise TypeError(
        f"spec{path} must be a Leaf, such as Leaf(np.float32, (28, 28)), or a tuple of those, or a dict of those with "
        f"str keys, got {shown(spec)}"
    )
