"""Looks into a data file: finds its format, its description and a summary of its samples."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock_proto import FeedError, StartError

from ...sources import files as fs
from ...sources import registry
from ...sources.description import Description
from ...sources.format import Format
from ..leaves.summary import Summary
from .sampling import PLACES, feed_of, limited, splits_of, spread

_ERRORS = (OSError, ValueError, LookupError, TypeError, ImportError)
"""The exceptions that readers raise for a file that they cannot read."""


@dataclass(frozen=True, slots=True)
class PeekedFile:
    """The facts about data files, after a look into the first of them.

    Attributes:
        files: the names, patterns or URLs that the user gave.
        first: the file that was read.
        count: the number of all files.
        nbytes: the size of the first file; None if it is unknown.
        format: the format of the files.
        description: the description of the first file.
        summary: the summary of its samples.
        places: how many places of the file the samples come from, if no error ended the reading.
        seconds: how long reading the samples took.
        error: the error that ended the reading, or "".
    """

    files: tuple[str, ...]
    first: str
    count: int
    nbytes: int | None
    format: Format
    description: Description
    summary: Summary
    places: int
    seconds: float
    error: str

    @property
    def kind(self) -> str:
        """The kind of file, for people."""
        return self.description.kind or self.format.name


def peek_files(files: Sequence[str], most: int, seconds: float) -> PeekedFile:
    """Look into the first of these files.

    Args:
        files: paths, patterns or URLs for which `registry.format_of` finds a format.
        most: how many samples to read, at most.
        seconds: time after which no more samples are read.

    Raises:
        FeedError: the first file cannot be read, or holds nothing that can be served; the message says why.
        StartError: the files have several formats.
    """
    if len({registry.format_of(file) for file in files}) > 1:
        raise StartError("the files have several formats: look at one format at a time")
    try:
        found = fs.expand(files)
        first = found[0]
        nbytes = None if os.path.isdir(first) else fs.size_of(first)
        if nbytes == 0:
            raise FeedError(f"{first} is empty (0 bytes): was it written to the end?")
        format = registry.format_of(first) or registry.format_of(files[0])
        assert format is not None
        description = format.describe(first)
    except _ERRORS as error:
        raise FeedError(_said(error)) from None
    if not description.columns:
        if not description.left_out:
            raise FeedError(f"{first} holds no data")
        why = "; ".join(f"{name!r} {reason}" for name, reason in description.left_out.items())
        raise FeedError(f"{first}: nothing in it can be served: {why}")
    began = time.monotonic()
    summary, places, said = _read(format, description, first, most, seconds)
    if not summary.samples and len(description.columns) > 1:
        description = _readable(format, description, first)
        summary, places, said = _read(format, description, first, most, seconds)
    if not summary.samples:
        raise FeedError(said or f"{first} holds no samples")
    taken = time.monotonic() - began
    return PeekedFile(tuple(files), first, len(found), nbytes, format, description, summary, places, taken, said)


def _read(format: Format, description: Description, first: str, most: int, seconds: float) -> tuple[Summary, int, str]:
    """Return the summary of some samples, the number of places they come from, and the error that ended the reading."""
    splits: Sequence[Any] = ()
    summary, said = Summary(), ""
    try:
        feed = feed_of(format, description, first)
        splits = splits_of(feed)
        for sample in limited(spread(feed, splits, most), most, seconds):
            summary.add(sample)
    except _ERRORS as error:
        said = _said(error)
    return summary, min(PLACES, len(splits)), said


def _readable(format: Format, description: Description, first: str) -> Description:
    """Return the description without the columns that cannot be read; unchanged if no column can be read."""
    unread: dict[str, str] = {}
    for column in description.columns:
        summary, _, said = _read(format, replace(description, columns=(column,)), first, 1, 0)
        if not summary.samples:
            unread[column.name] = "cannot be read: " + said.removeprefix(f"{first}: ")
    columns = tuple(column for column in description.columns if column.name not in unread)
    if not columns:
        return description
    return replace(description, columns=columns, left_out={**description.left_out, **unread})


def is_url_of_feed(name: str) -> bool:
    """Return whether `name`, not a data file, is the URL of a running daemon's feed (True) or MODULE:ATTR (False).

    Raises:
        StartError: the name is neither; the message says what to give instead.
    """
    if "://" in name:
        if not name.startswith("tcp://"):
            raise StartError(
                f"{name!r}: expected the URL of a daemon's feed, tcp://HOST:PORT/FEED, or that of a data file, which "
                f"ends in {registry.all_endings()}"
            )
        url, query, _ = name.partition("?")
        if query:
            raise StartError(
                f"{name!r}: penstock peek cannot read as a member of a group or as a rank, since it would take their "
                f"batches. It reads the same samples with a stream of its own: penstock peek {url}"
            )
        return True
    module, _, attribute = name.rpartition(":")
    if module and attribute.isidentifier() and not os.path.exists(name):
        return False
    if os.path.isdir(name):
        refuse_directory(name)
    if name.endswith(".py") and os.path.exists(name):
        raise StartError(f"{name}: which feed in it? Write {name}:ATTR, such as {name}:feed")
    if os.path.exists(name):
        raise StartError(
            f"{name}: expected a file that ends in {registry.all_endings()}. Other files need a generator: "
            "write a Feed and give MODULE:ATTR, such as scenes.py:feed"
        )
    where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
    raise StartError(
        f"{name!r}: no such file{where}. Give a file, the URL of a daemon's feed (tcp://HOST:PORT/FEED) or "
        "MODULE:ATTR, such as scenes.py:feed"
    )


def refuse_directory(name: str) -> None:
    """Raise the error for a directory that is no dataset.

    Raises:
        StartError: always; the message says how to serve the files in it.
    """
    data: Counter[str] = Counter()
    for folder, _, names in os.walk(name):
        deeper = "" if os.path.samefile(folder, name) else "**/"
        data.update(deeper + "*" + "".join(Path(one).suffixes[-1:]) for one in names if registry.by_ending(one))
        if data.total() > 10_000:
            break
    if data:
        pattern, count = data.most_common(1)[0]
        raise StartError(
            f"{name} is a directory: give the files in it, such as '{name.rstrip('/')}/{pattern}' ({count})"
        )
    raise StartError(f"{name} is a directory without data files: give a file that ends in {registry.all_endings()}")


def _said(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError | LookupError) and error.args else str(error)
    return text or type(error).__name__
