"""A copied batch as the page shows it: pictures, text, values, and the range and the histogram of each leaf. No I/O.

It takes some milliseconds, so it is made on a thread.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto.batches.columns import Column
from penstock_proto.spec import unflatten

from ..coordinator.model.feeds import ServedFeed
from ..peeking.leaves.contact_sheet import painted, png
from ..peeking.leaves.leaf_report import is_image, kind_of, range_of
from ..peeking.leaves.numbers import Numbers
from ..peeking.leaves.summary import LeafSummary, leaves, shown_list, shown_numbers, shown_text
from .copied_rows import CopiedBatch, CopiedRows

_TOO_LARGE = "too large to show"
_BINS = 24
_MOST_VALUES = 1 << 16
"""Values that a histogram counts. If there are more, it counts evenly spaced ones."""


def preview(feed: ServedFeed, batch: CopiedBatch) -> dict[str, Any]:
    """Return everything to show of a batch, as JSON types.

    `leaves` has for each leaf its path, its kind in words, its range, and a histogram: the ends (`low`, `high`), the
    `counts`, and whether it counts `lengths`. `more_leaves` is the number of leaves that are left out. `samples` has
    for each sample a list with an entry for each leaf: a `picture` (a PNG file in base64) or a `text`.
    """
    columns = feed.columns.columns
    paths = list(leaves(unflatten(feed.info.spec, list(range(len(columns))))))  # as the user's dictionaries have them
    found, cells = [], []
    for path, place in paths:
        if place < len(batch.leaves):
            shape = _row_shape(columns[place], feed, batch)
            leaf, its_cells = _leaf(path, columns[place], batch.leaves[place], shape, batch.samples)
            found.append(leaf)
            cells.append(its_cells)
    return {
        "feed": feed.name,
        "epoch": batch.epoch,
        "lane": batch.lane,
        "index": batch.index,
        "rows": batch.rows,
        "one": batch.one,
        "bytes": batch.nbytes,
        "leaves": found,
        "more_leaves": len(paths) - len(found),
        "samples": [list(sample) for sample in zip(*cells, strict=True)],
    }


def _leaf(
    path: str, column: Column, copied: CopiedRows | None, shape: tuple[int | None, ...], samples: int
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Return the figures of one leaf, whose rows have this shape, and its cell in each sample."""
    if copied is None or not samples:
        said = _TOO_LARGE if copied is None else "empty"
        return {"path": path, "kind": said, "range": "", "strange": False, "histogram": None}, [
            {"text": said}
        ] * samples
    values = [copied.row(number, shape) for number in range(samples)]
    summary = LeafSummary()
    for value in values:
        summary.add(value, path)
    return {"path": path, "kind": kind_of(summary), **_figures(copied, column, summary.dtype)}, _cells(summary, values)


def _row_shape(column: Column, feed: ServedFeed, batch: CopiedBatch) -> tuple[int | None, ...]:
    """Return the shape of one row of a leaf. In ready batches, the leaf's own shape is that of the batch."""
    shape = column.leaf.shape
    return shape if feed.plan.batch_size is not None or batch.one else shape[1:]


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return shown_text(value)
    if isinstance(value, list):
        return shown_list(value)
    if value.dtype == object:
        return ", ".join(shown_text(item) for item in value.reshape(-1)[:4]) + (", ..." if value.size > 4 else "")
    return shown_numbers(value)


def _figures(copied: CopiedRows, column: Column, dtype: str) -> dict[str, Any]:
    """Return the range of a leaf, and its histogram."""
    numbers = Numbers()
    if not column.text:
        numbers.add(copied.values)
    return {
        "range": "" if column.text else range_of(numbers, dtype),
        "strange": bool(numbers.nans or numbers.infinities),
        "histogram": _histogram(copied, column, numbers),
    }


def _cells(leaf: LeafSummary, values: list[Any]) -> list[dict[str, str]]:
    """Return the cell of a leaf in each sample."""
    pictures = painted(leaf.tiles) if is_image(leaf) else []
    return [
        {"picture": base64.b64encode(png(pictures[number], level=1)).decode()}
        if pictures and leaf.tiles[number] is not None
        else {"text": _shown(value)}
        for number, value in enumerate(values)
    ]


def _histogram(copied: CopiedRows, column: Column, numbers: Numbers) -> dict[str, Any] | None:
    """Count the values of a leaf, or the lengths of text, in bins of equal width; None if all are equal."""
    if column.text:
        values: npt.NDArray[Any] = np.diff(copied.ends or [0])
        numbers.add(values)
    else:
        values = copied.values.reshape(-1)
        values = values[:: max(1, -(-values.size // _MOST_VALUES))]
    low, high = numbers.low, numbers.high
    if low is None or high is None or not 0 < float(high) - float(low) < np.inf:
        return None
    whole = values.dtype.kind in "biu"
    values = (np.abs(values) if values.dtype.kind == "c" else values).astype(np.float64)
    each = whole and high - low < _BINS  # a bin for each number
    ends = (low - 0.5, high + 0.5) if each else (low, high)
    counts, _ = np.histogram(values, bins=int(high - low) + 1 if each else _BINS, range=ends)  # leaves NaN out
    return {"low": low, "high": high, "counts": counts.tolist(), "lengths": column.text}
