"""Describes files of JSON lines, by their first lines."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

from .. import files as fs
from ..description import Column, Description
from ..splits.byte_range import ByteRange
from .reader import objects

_LINES = 256


def describe(file: str) -> Description:
    """Describe a file of JSON lines.

    Raises:
        OSError, ValueError: its first lines cannot be read; the message says what to do.
    """
    split = ByteRange(file, 0, None, fs.size_of(file))
    often: Counter[str] = Counter()
    nulls: Counter[str] = Counter()
    kinds: dict[str, set[type]] = {}
    count = 0
    for _, value in islice(objects(split), _LINES):
        count += 1
        for key, item in value.items():
            often[key] += 1
            nulls[key] += item is None
            kinds.setdefault(key, set()).add(_kind(item))
    if not count:
        raise ValueError(f"{file} has no lines with objects")
    left_out = {
        key: f"is missing in {count - seen} of the first {count} lines" for key, seen in often.items() if seen < count
    }
    left_out |= {key: f"is null in {seen} of the first {count} lines" for key, seen in nulls.items() if seen}
    mixed = [key for key, found in kinds.items() if {int, float} <= found and key not in left_out]
    options: dict[str, Any] = {"dtypes": dict.fromkeys(mixed, "float64")} if mixed else {}
    columns = tuple(Column(key, key.replace("=", "_")) for key in often if key not in left_out)
    return Description(columns, left_out, options=options, needs_leaves=bool(left_out))


def _kind(value: Any) -> type:
    """Return the type of a value, or of the numbers in a list: float if any of them is one."""
    if not isinstance(value, list):
        return type(value)
    kinds = {_kind(item) for item in value if item != []}
    return float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else list
