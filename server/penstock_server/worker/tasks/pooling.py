"""Copies rows of a pool, which lie in the slots of its visits, into new batches, and applies `batch_transform` to
batches with rows of several lanes: to those of pools, and to merged ones."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto import messages as m
from penstock_proto.batches.layout import POOL_LANE, TAIL_LANE, lay_out

from ...shuffling.pool_order import source_rows
from ..reading.lane_batches import LaneBatches
from ..reading.loaded_feed import LoadedFeed
from .memfds import Memfds

_LARGE = 16384
"""Rows of at least this many bytes are copied one by one. Smaller ones are copied together, through a temporary array,
as items of one dtype: NumPy copies those faster than rows of an array."""


def pool_rows(message: m.PoolRows, feed: LoadedFeed, memfds: Memfds, transforms: LaneBatches | None = None) -> None:
    """Copy the rows that the message asks for, and transform their batches with `transforms`.

    Raises:
        ProtocolError: it does not fit the feed or the pool.
        GeneratorError, SpecError: as `LaneBatches.put`.
    """
    layout, from_layout, batch_rows = feed.layout, feed.sample_layout, feed.plan.batch_size
    counts = [visit.batches for visit in message.sources]
    if layout is None or from_layout is None or batch_rows is None or max(message.batches, *counts) > layout.batches:
        raise ProtocolError(f"rows of a pool of feed {feed.plan.name}, which has no such slots")
    if message.first + message.batches > sum(counts):
        raise ProtocolError(f"batches from {message.first} on of a pool of {sum(counts)}")
    target = memfds.batches(layout, message.memfd)
    wanted = source_rows(
        feed.plan.seed,
        message.epoch,
        message.visit,
        message.part,
        sum(counts) * batch_rows,
        message.first * batch_rows,
        message.batches * batch_rows,
    )
    to = np.argsort(wanted)
    rows = wanted[to]
    starts = [count * batch_rows for count in accumulate(counts, initial=0)]
    cuts = np.searchsorted(rows, starts).tolist()
    leaves = target.leaves
    if transforms is not None:
        leaves = [np.empty((message.batches, *place.shape), place.dtype) for place in from_layout.places]
    into = [_rows(leaf) for leaf in leaves]
    for visit, start, first, stop in zip(message.sources, starts, cuts, cuts[1:], strict=False):
        if first < stop:
            source = memfds.batches(from_layout, visit.memfd)
            for leaf, target_leaf in zip(source.leaves, into, strict=True):
                _copy(_rows(leaf), rows[first:stop] - start, target_leaf, to[first:stop])
    if transforms is not None:
        for place in range(message.batches):
            made = [leaf[place] for leaf in target.leaves]
            number = message.index + place
            transforms.put_arrays([leaf[place] for leaf in leaves], message.epoch, POOL_LANE, number, made)
    headers = target.headers[: message.batches]
    headers[:, :3] = batch_rows, message.epoch, POOL_LANE
    headers[:, 3] = np.arange(message.index, message.index + message.batches)


def transform_rows(
    message: m.TransformRows, feed: LoadedFeed, memfds: Memfds, transforms: LaneBatches
) -> m.RowsWritten | m.NeedRoom:
    """Transform the merged batch whose rows are in the slot. The result takes their place, unless it is too large.
    Return the answer.

    Raises:
        ProtocolError: the slot is smaller than the message says.
        GeneratorError, SpecError: as `LaneBatches.put`.
    """
    number = message.epoch, TAIL_LANE, message.index
    if feed.sample_layout is not None:
        stored = [leaf[0, : message.rows] for leaf in memfds.batches(feed.sample_layout, message.memfd).leaves]
    else:
        written = lay_out(feed.collate_variable.dtypes, message.shapes)
        stored = [leaf[0, ...] for leaf in memfds.batches(written, message.memfd).leaves]
    arrays = [leaf.copy() for leaf in stored]
    shapes: m.Shapes = ()
    if feed.layout is not None:
        slot = memfds.batches(feed.layout, message.memfd)
        transforms.put_arrays(arrays, *number, [leaf[0] for leaf in slot.leaves])
    else:
        collate = feed.collate_alone
        store = collate.store(message.rows)
        transforms.put_arrays(arrays, *number, store)
        shapes = collate.shapes(store, message.rows)
        made = lay_out(collate.dtypes, shapes)
        if made.nbytes > message.nbytes:
            return m.NeedRoom(run=message.run, ticket=message.ticket, nbytes=made.nbytes)
        slot = memfds.batches(made, message.memfd)
        collate.write(store, message.rows, [leaf[0, ...] for leaf in slot.leaves])
    slot.headers[0, :4] = message.rows, *number
    return m.RowsWritten(run=message.run, ticket=message.ticket, shapes=shapes)


def _rows(leaf: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the rows of all batches of a slot as bytes [rows, bytes of a row]."""
    return leaf.reshape(-1).view(np.uint8).reshape(leaf.shape[0] * leaf.shape[1], -1)


def _copy(
    source: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], target: npt.NDArray[np.uint8], to: npt.NDArray[np.int64]
) -> None:
    """Copy these rows of `source` to the rows `to` of `target`."""
    nbytes = source.shape[1]
    if 0 < nbytes < _LARGE:
        item = np.dtype((np.void, nbytes))
        target.view(item)[to] = source.view(item)[rows]
        return
    for row, at in zip(rows.tolist(), to.tolist(), strict=True):
        target[at] = source[row]
