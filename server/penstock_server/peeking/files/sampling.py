"""Reads samples of data files through the sources that serve them, spread over the file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

from ...feed.feed import Feed
from ...sources.description import Description
from ...sources.format import Format

PLACES = 8
"""Places of a file that samples are read from: enough to see whether the file is sorted, but few, since each place of a
Parquet file costs a row group."""


def feed_of(format: Format, description: Description, file: str) -> Feed:
    """Return a feed of one file with all columns that are proposed as leaves.

    Raises:
        TypeError, ValueError: the columns cannot be leaves.
    """
    leaves: Any = {column.leaf: column.name for column in description.columns}
    if description.features is not None:
        leaves = {column.name: description.features[column.name] for column in description.columns}
    elif not description.names_leaves:
        leaves = None
    return Feed.from_files(file, leaves, batch_size=1, format=format, **description.options)


def splits_of(feed: Feed) -> Sequence[Any]:
    """Return the splits of a feed of data files, or the indices of its samples if it has no splits.

    Raises:
        Exception: the feed's source failed.
    """
    listed, source = feed.splits, feed.generate
    if not callable(source):
        return range(len(source))
    assert callable(listed)
    return list(listed())


def spread(feed: Feed, splits: Sequence[Any], most: int, at: Callable[[Any], None]) -> Iterator[Any]:
    """Yield up to `most` samples, spread evenly over up to `PLACES` places among the splits. Call `at(split)` before a
    split is read.

    Raises:
        Exception: the feed's source failed.
    """
    source: Any = feed.generate
    read = source if callable(source) else lambda index: (source[index] for _ in range(1))
    places = min(PLACES, len(splits))
    for place in range(places):
        left = (place + 1) * most // places - place * most // places
        for split in splits[place * len(splits) // places : (place + 1) * len(splits) // places]:
            if not left:
                break
            at(split)
            with closing(read(split)) as samples:
                for sample in islice(samples, left):
                    left -= 1
                    yield sample


def limited(samples: Iterable[Any], most: int, seconds: float) -> Iterator[Any]:
    """Yield up to `most` samples, and no more once `seconds` seconds have passed after the first."""
    deadline = None
    for sample in islice(samples, most):
        yield sample
        deadline = deadline or time.monotonic() + seconds
        if time.monotonic() > deadline:
            return
