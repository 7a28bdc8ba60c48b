"""Single samples of a feed, for `penstock peek`: the rows of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_proto.spec import flatten, unflatten

from ._connection import Connection


def samples(connection: Connection) -> Iterator[Any]:
    """Yield the samples of one epoch, as views of the batches' memory.

    If the generator makes whole batches, a sample is a row of one, or all of it if its leaves have no rows in common.

    Raises:
        PenstockError: as reading a feed.
    """
    spec = connection.element_spec
    for batch in connection.batches():
        leaves = flatten(spec, batch)
        rows = {len(leaf) if getattr(leaf, "shape", None) != () else None for leaf in leaves}
        if len(rows) > 1 or None in rows:
            yield batch
            continue
        (count,) = rows
        for row in range(count or 0):
            yield unflatten(spec, [leaf[row] for leaf in leaves])
