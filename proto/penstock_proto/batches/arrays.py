"""Small NumPy arrays inside control messages: msgpack-numpy behind a guard.

msgpack-numpy alone unpickles arrays of dtype object (so any peer could run code), takes any map with a key `nd` for an
array, and reads raw pointers for a descriptor such as `|O`. So this file packs and unpacks only plain numeric dtypes,
checks every size before NumPy sees it, and refuses everything else. Batches never pass through here.
"""

from __future__ import annotations

import math
from typing import Any

import msgpack
import msgpack_numpy
import numpy as np

from ..errors import ProtocolError

MAX_BYTES = 64 * 1024
_NATIVE = frozenset(
    np.dtype(name).str
    for name in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)


def pack(value: Any) -> bytes:
    """Pack `value`: None, bools, numbers, text, bytes, lists, dicts with text keys, small arrays.

    Raises:
        ProtocolError: something in it is not allowed, or the whole is over 64 KiB.
    """
    try:
        packed: bytes = msgpack.packb(value, default=_encode, strict_types=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"cannot be packed: {error}") from None
    if len(packed) > MAX_BYTES:
        raise ProtocolError(f"{len(packed)} bytes of small arrays; at most {MAX_BYTES} fit a control message")
    return packed


def unpack(data: bytes) -> Any:
    """Unpack the output of `pack`. Arrays come back read-only, tuples as lists.

    Raises:
        ProtocolError: `data` was not made by `pack`.
    """
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"{len(data)} bytes of small arrays; at most {MAX_BYTES} are read")
    try:
        return msgpack.unpackb(data, object_hook=_decode, raw=False, strict_map_key=False)
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"malformed record: {error}") from None


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.str not in _NATIVE:
            raise TypeError(f"an array of dtype {value.dtype} is not carried in messages")
        return msgpack_numpy.encode(value)
    raise TypeError(f"{type(value).__name__} is not carried in messages")


def _decode(value: dict[Any, Any]) -> Any:
    # msgpack-numpy marks its maps by a bytes key: b'nd' (arrays also have kind and shape; scalars do not) or
    # b'complex'.
    if not any(isinstance(key, bytes) for key in value):
        return value
    is_array = value.get(b"nd")
    wanted = {b"nd", b"type", b"kind", b"shape", b"data"} if is_array is True else {b"nd", b"type", b"data"}
    if is_array not in (True, False) or value.keys() != wanted:
        raise ProtocolError("malformed record: a map that is neither an array nor plain")
    descr, data, shape = value[b"type"], value[b"data"], value.get(b"shape", ())
    if isinstance(descr, bytes):
        descr = descr.decode("ascii", "replace")
    if descr not in _NATIVE or not isinstance(data, bytes) or value.get(b"kind", b"") not in (b"", ""):
        raise ProtocolError(f"malformed record: an array of type {descr!r:.40} is not carried in messages")
    if not isinstance(shape, list | tuple) or not all(type(dim) is int and 0 <= dim <= MAX_BYTES for dim in shape):
        raise ProtocolError("malformed record: an array without a proper shape")
    if len(shape) > 8 or math.prod(shape) * np.dtype(descr).itemsize != len(data):
        raise ProtocolError("malformed record: an array's shape and bytes differ")
    return msgpack_numpy.decode(value)
