"""Describes LMDB stores: the patterns of their keys."""

from __future__ import annotations

import re
from collections import Counter

from ..description import Column, Description
from ..image_encodings import encoding
from .opening import opened

_LOOKED_AT = 10_000
"""Keys that are looked at, at most."""

_PATTERNS = 20
"""Patterns that are proposed, at most."""


def describe(file: str) -> Description:
    """Describe an LMDB store.

    Raises:
        ImportError: lmdb is not installed.
        OSError: it cannot be read; the message names it.
        ValueError: it has no keys.
    """
    often: Counter[str] = Counter()
    examples: dict[str, bytes] = {}
    left_out: dict[str, str] = {}
    with opened(file) as transaction:
        entries = transaction.stat()["entries"]
        for _, (key, value) in zip(range(_LOOKED_AT), transaction.cursor().iternext(), strict=False):
            text = bytes(key).decode(errors="surrogateescape")
            pattern = "*" if not re.search("[^0-9]", text) else re.sub("[0-9]+", "*", text, count=1)
            often[pattern] += 1
            examples.setdefault(pattern, bytes(value[: 1 << 16]))
    if not often:
        raise ValueError(f"{file} has no keys")
    numbered = {pattern: count for pattern, count in often.items() if "*" in pattern and count > 1}
    if not numbered or sum(numbered.values()) < sum(often.values()) // 2:  # keys such as the names of files
        numbered = {"*": sum(often.values())}
        examples = {"*": next(iter(examples.values()))}
    most = max(numbered.values())
    columns = []
    for pattern, count in [*numbered.items()][:_PATTERNS]:
        if count == most:
            name = re.sub("[^A-Za-z0-9_]+", "_", pattern.replace("*", "")).strip("_") or "value"
            image = bool(encoding(examples[pattern]))
            columns.append(Column(pattern, name, f"values of the keys {pattern}", image))
        else:
            left_out[pattern] = f"has {count} keys, not {most}"
    facts = [f"{entries:,} keys"]
    if any(examples[column.name][:1] == b"\x80" for column in columns if column.name in examples):
        facts.append("values seem to be pickles, which Penstock does not read: if you trust them, give decode={...}")
    rows = most if entries <= _LOOKED_AT else None
    return Description(tuple(columns), left_out, tuple(facts), rows)
