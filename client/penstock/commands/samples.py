"""Single samples of a feed, for `penstock peek`: the rows of its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_proto.spec import flatten, unflatten

from .._adapters.connection import Connection
from .._transport.ragged import Ragged


def samples(connection: Connection) -> Iterator[Any]:
    """Yield the samples of one epoch, as views of the batches' memory.

    If the generator makes whole batches, a sample is one row of a batch, or the whole batch if its leaves do not all
    have the same number of rows.

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
            yield unflatten(spec, [_lists(leaf[row]) if isinstance(leaf, Ragged) else leaf[row] for leaf in leaves])


def _lists(row: Any) -> Any:
    """Return a row of a ragged leaf: an array of numbers, or a list of arrays or of strings, perhaps in lists."""
    if isinstance(row, Ragged):
        return [_lists(item) for item in row]
    return row.tolist() if row.dtype == object else row
