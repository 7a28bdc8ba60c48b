"""Describes MDS datasets, by their index."""

from __future__ import annotations

from collections import Counter

from ..description import Column, Description, leaf_names
from .index import shards_of
from .reader import hash_of
from .values import IMAGES, decoder


def describe(folder: str) -> Description:
    """Describe an MDS dataset.

    Raises:
        OSError, ValueError: its index cannot be read, or lists no shards; the message names it.
    """
    shards = shards_of(folder)
    if not shards:
        raise ValueError(f"{folder}: the index lists no shards: was the dataset written to its end?")
    left_out: dict[str, str] = {}
    columns = []
    short = leaf_names(name for name, _ in shards[0].columns)
    for name, encoding in shards[0].columns:
        try:
            decoder(encoding)
        except TypeError as error:
            left_out[name] = str(error)
            continue
        columns.append(Column(name, short[name], f"column {name!r}, {encoding}", encoding in IMAGES))
    rows = sum(one.samples for one in shards)
    facts = [f"{len(shards)} shards" if len(shards) > 1 else "1 shard"]
    packed = Counter(one.compression for one in shards if one.compression)
    if packed:
        facts.append(
            f"{packed.total()} compressed with {', '.join(packed)}: each is a split, which a worker holds as a whole"
        )
    hashes = dict.fromkeys(name for one in shards for name, _ in one.hashes)
    if missing := [name for name in hashes if hash_of(name) is None]:
        facts.append(f"hashes that are not compared, as xxhash is not installed: {', '.join(missing)}")
    return Description(tuple(columns), left_out, tuple(facts), rows, needs_leaves=bool(left_out))
