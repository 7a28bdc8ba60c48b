"""Infers the spec of a sample and converts values to arrays. Errors say what to yield instead of unsupported values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..drop import DROP
from ..errors import SpecError
from ..spec import (
    DTYPES,
    MAX_DEPTH,
    MAX_DIM,
    MAX_DIMS,
    MAX_KEY,
    MAX_LEAVES,
    DictSpec,
    Leaf,
    Spec,
    TupleSpec,
    check,
    numpy_dtype,
)
from ..text import is_unicode
from ..value_text import shown
from .instead import MIXED, instead_of


class Advice(Protocol):
    """Says where else than in the generator a sample can be converted."""

    def __call__(self, path: str, *, is_list: bool = False) -> str:
        """Return the advice for the value at `path`. `is_list`: it is a list of arrays that becomes a tuple."""
        ...


def in_transform(path: str, *, is_list: bool = False) -> str:
    """Return the advice for a feed whose `transform=` gets the same value as the spec is inferred from."""
    advice = "A function given as Feed(transform=) can do so too"
    examples = {
        "": "def pack(sample): return tuple(sample)",
        "[0]": "def pack(sample): inputs, y = sample; return tuple(inputs), y",
    }
    return f"{advice}, such as `{examples[path]}`" if is_list and path in examples else advice


def infer(sample: Any, advice: Advice = in_transform, *, nested: bool = False) -> Spec:
    """Infer the spec of one sample: nested tuples and dicts (with text keys) of arrays and scalars.

    Lists of numbers are arrays, as in tf.data. A Python int becomes int64, a float float64, a bool bool, as in NumPy.

    Args:
        sample: what user code made.
        advice: says where else the sample can be converted.
        nested: whether its leaves may be lists of lists of different lengths, and of arrays. In the spec, each
            dimension of such a leaf varies.

    Raises:
        SpecError: something in it cannot be served; the message says what to yield instead.
        Exception: anything that the user's objects in it raise.
    """
    spec = _infer(sample, "", 0, advice, nested)
    check(spec)
    return spec


def _infer(sample: Any, path: str, depth: int, advice: Advice, nested: bool) -> Spec:
    if depth > MAX_DEPTH:
        raise SpecError(f"sample{path} is nested more than {MAX_DEPTH} deep")
    if isinstance(sample, tuple | Mapping) and len(sample) > MAX_LEAVES:
        raise SpecError(f"sample{path} has {len(sample)} items; up to {MAX_LEAVES} can be served: stack them")
    if isinstance(sample, tuple):
        items = (_infer(item, f"{path}[{i}]", depth + 1, advice, nested) for i, item in enumerate(sample))
        return TupleSpec(tuple(items))
    if isinstance(sample, Mapping):
        keys = [_key(key, path) for key in sample]
        return DictSpec.of({key: _infer(sample[key], f"{path}[{key!r}]", depth + 1, advice, nested) for key in keys})
    if nested and is_nested(sample):
        parts = [_infer(item, f"{path}[{i}]", depth + 1, advice, nested) for i, item in enumerate(sample)]
        found = next((part for part in parts if isinstance(part, Leaf) and 0 not in part.shape), Leaf("float64", (0,)))
        return Leaf(found.dtype, (None,) * min(MAX_DIMS, 1 + len(found.shape)))
    if not nested:
        _refuse_list_of_arrays(sample, path, advice)
    text = as_text(sample)
    array = as_array(sample, path, advice) if text is None else text
    if array.ndim > MAX_DIMS:
        raise SpecError(f"sample{path} has {array.ndim} dimensions; up to {MAX_DIMS} can be served")
    if max(array.shape, default=0) > MAX_DIM:
        raise SpecError(f"sample{path} has the shape {array.shape}; a dimension can be up to {MAX_DIM}")
    return Leaf("string" if text is not None else array.dtype.name, array.shape)


def _key(key: Any, path: str) -> str:
    if not isinstance(key, str):
        raise SpecError(f"sample{path} is a dict with a key that is not text, {shown(key)}: use str keys")
    text = str.__str__(key)  # of a subclass, such as an Enum's
    if len(text) > MAX_KEY or not is_unicode(text):
        what = f"of {len(text)} characters" if len(text) > MAX_KEY else "that is not valid Unicode"
        raise SpecError(
            f"sample{path} is a dict with a key {what}, {shown(text, 60)}: use keys of up to {MAX_KEY} characters"
        )
    return text


def _refuse_list_of_arrays(value: Any, path: str, advice: Advice) -> None:
    """Refuse a list of arrays: it could mean one array or several. (A list of numbers is an array.)"""
    item = _first_of(value)
    if item is not value and len(getattr(item, "shape", ())):
        if len({np.shape(part) if hasattr(part, "shape") else None for part in value}) > 1:
            alike = len({(len(getattr(part, "shape", ())), getattr(part, "dtype", None)) for part in value}) == 1
            one_leaf = f", if they are separate leaves. If they are one leaf, {_how_to_declare(value)}" if alike else ""
            raise SpecError(
                f"sample{path} is a list of {len(value)} arrays of different shapes: yield a tuple of them, such as "
                f"((a, b), y){one_leaf}. {advice(path, is_list=True)}"
            )
        raise SpecError(
            f"sample{path} is a list of {len(value)} arrays: yield a tuple of them, such as ((a, b), y), if they "
            f"are separate leaves, or np.stack() of them if they are one array. {advice(path, is_list=True)}"
        )


def _how_to_declare(value: list[Any]) -> str:
    """Say how lists of different lengths can be one leaf."""
    try:
        found = _infer(value, "", 0, in_transform, nested=True) if is_nested(value) else None
    except SpecError:
        found = None
    if not isinstance(found, Leaf) or len(found.shape) < 2:
        return "yield one array, filled up to the largest"
    dtype = "str" if found.text else f'"{found.dtype}"'
    rest = "" if found.text else ', or with batching="pad" and without ragged=True to fill them up'
    return f'declare it with batching="ragged" and spec=, here Leaf({dtype}, {found.shape}, ragged=True){rest}'


def is_nested(value: Any) -> bool:
    """Return whether it is a list (or an array of objects) of lists or arrays that differ in shape, so that NumPy
    makes no array of numbers of it."""
    of_objects = isinstance(value, np.ndarray) and value.dtype == object and value.ndim > 0
    if not (isinstance(value, list) or of_objects) or not len(value) or not all(map(_has_items, value)):
        return False
    try:
        return np.asarray(value).dtype.kind == "O"
    except Exception:  # "inhomogeneous shape", or what the user's objects raise: each is looked at alone then
        return True


def _has_items(value: Any) -> bool:
    return isinstance(value, list | tuple) or len(getattr(value, "shape", ())) > 0


def is_masked(value: object) -> bool:
    """Return whether it is a masked array, without the import of `numpy.ma`, which takes a worker 10 ms."""
    module = sys.modules.get("numpy.ma")
    return isinstance(value, getattr(module, "MaskedArray", ()))


def as_array(value: Any, path: str = "", advice: Advice = in_transform) -> npt.NDArray[Any]:
    """Convert `value` to an array of a dtype that can be served.

    Raises:
        SpecError: its dtype cannot be served; the message says what to yield instead.
        Exception: anything that the object raises during the conversion, unless it is a list.
    """
    if value is DROP:
        raise SpecError(
            f"sample{path} is penstock.DROP, which leaves a sample out if a transform= returns it instead of the whole "
            "sample, or an indexable object with Feed(drops=True). A generator leaves a sample out by not yielding it"
        )
    if is_masked(value):
        text = "is a masked array, whose mask would be lost: yield `.filled(...)` and the mask separately"
        raise SpecError(f"sample{path} {text}")
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a torch tensor
        value = _from_torch(value, path)
    try:
        array = np.asarray(value)
    except ValueError as error:
        if not isinstance(value, list):
            raise
        hint = (
            f"yield a tuple, such as (X, y), if its items are separate leaves. If they are one leaf, "
            f"{_how_to_declare(value)}. {advice(path)}"
        )
        why = "its lists differ in length" if "inhomogeneous" in str(error) else error
        raise SpecError(f"sample{path} is not an array ({why}); {hint}") from None
    if _can_be_served(array.dtype):
        return array
    if array.dtype.kind in "SU":
        hint = MIXED if isinstance(value, list) else "this leaf holds numbers: yield a number or an array of numbers"
    elif array.dtype.kind == "O":
        hint = f"{instead_of(value)}. {advice(path)}"
    elif array.dtype.kind in "mM":
        hint = "yield .astype('int64') of it"
    elif array.dtype.names:
        name = array.dtype.names[0]
        hint = f"yield a dict of its fields, such as {{{name!r}: array[{name!r}]}}"
    else:
        hint = f"these can be: {', '.join(sorted(DTYPES))}"
    raise SpecError(f"sample{path} is {shown(value)} of dtype {shown(array.dtype)}, which cannot be served; {hint}")


def as_text(value: Any) -> npt.NDArray[Any] | None:
    """Return text as an array of `bytes` objects (dtype object): of a `str` or `bytes`, of a list or an array of them,
    or of a TensorFlow tensor of strings.

    `str` becomes UTF-8. Return None if `value` is not text. An empty list or array of objects is not.

    Raises:
        SpecError: a `str` is not valid Unicode.
    """
    kind = type(value)
    if kind is bytes or kind is str or isinstance(value, str | bytes):
        array = np.empty((), object)
        array[()] = _as_bytes(value)
        return array
    if is_masked(value):
        return None
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "SUOT":
            return None
        array = value.astype(object)
    elif isinstance(value, list) and isinstance(_first_of(value), str | bytes):
        try:
            array = np.array(value, object)  # not by way of U and S, which lose trailing NULs
        except ValueError:  # lists of different lengths
            return None
    elif getattr(getattr(value, "dtype", None), "name", "") == "string" and hasattr(value, "numpy"):
        return as_text(value.numpy())
    else:
        return None
    flat = array.reshape(-1)
    if not flat.size and value.dtype.kind == "O":
        return None
    for at, item in enumerate(flat):
        if not isinstance(item, str | bytes):
            return None
        flat[at] = _as_bytes(item)
    return flat.reshape(array.shape)


def strings_of(value: list[Any]) -> list[bytes] | None:
    """Return what `as_text` makes of a list of `str` and `bytes`, but sooner; None for any other list.

    Raises:
        SpecError: a `str` is not valid Unicode.
    """
    found = []
    for item in value:
        kind = type(item)
        if kind is not str and kind is not bytes:
            return None
        found.append(item if kind is bytes else _as_bytes(item))
    return found


def _first_of(value: Any) -> Any:
    """Return the first item of nested lists that is not a list, or `value` itself if it is not one."""
    for _ in range(MAX_DIMS):
        if not isinstance(value, list) or not value:
            break
        value = value[0]
    return value


def _as_bytes(value: str | bytes) -> bytes:
    if isinstance(value, bytes):
        return bytes(value)
    try:
        return str.__str__(value).encode(errors="surrogateescape")  # file names that are not UTF-8 keep their bytes
    except UnicodeEncodeError:
        raise SpecError(f"{shown(value)} is not valid Unicode, so it has no UTF-8: yield bytes") from None


def _from_torch(tensor: Any, path: str) -> Any:
    """Return the array that shares a torch tensor's memory. (This file does not import torch.)"""
    if tensor.device.type != "cpu":
        raise SpecError(
            f"sample{path} is a torch tensor on {tensor.device}: workers have no GPU, so make it on the CPU, or yield "
            "tensor.cpu()"
        )
    if tensor.layout is not sys.modules["torch"].strided:
        raise SpecError(f"sample{path} is a torch tensor of layout {tensor.layout}: yield tensor.to_dense()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        return tensor.view(sys.modules["torch"].uint16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


@functools.cache
def _can_be_served(dtype: np.dtype[Any]) -> bool:
    return dtype.name in DTYPES  # NumPy builds the name each time, which takes longer than everything else here
