"""Looks into a data file: finds its format, its description and a summary of its samples."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock_proto import FeedError, PenstockError, StartError
from penstock_proto.status.figures import size
from penstock_proto.transport import urls as addresses

from ...sources import files as fs
from ...sources import other_formats, registry
from ...sources.description import Description
from ...sources.format import Format
from ...sources.remote import urls
from ..leaves.summary import Summary
from .bounded import Bounds, EndedError, run
from .sampling import PLACES, feed_of, limited, splits_of, spread

_ERRORS = (OSError, ValueError, LookupError, TypeError, ImportError)
"""The exceptions that readers raise for a file that they cannot read, with a message for people."""

BOUNDS = Bounds(memory=768 << 20, cpu=6, wall=30)
"""The bounds of a look that is not told how many samples to read: with those of Python itself, 1 GiB and 10 s."""

_TELL = 0.5
"""Seconds between two reports of the facts so far."""

_MORE_TIME = "If the file is as it should be, --samples 256 lets it take as long as it needs"


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


def peek_files(files: Sequence[str], most: int, seconds: float, bounds: Bounds) -> PeekedFile:
    """Look into the first of these files, in a child process, since a file can ask for any amount of memory and time.

    Args:
        files: paths, patterns or URLs for which `registry.format_of` finds a format.
        most: how many samples to read, at most.
        seconds: time after which no more samples are read.
        bounds: what the look may take.

    Raises:
        FeedError: the first file cannot be read, or holds nothing that can be served; the message says why.
        StartError: the files have several formats.
    """
    files = fs.checked(files)
    _check_one_format(files)
    place = files[0]
    seen: PeekedFile | None = None
    try:
        for report in run(partial(_look, files, most, seconds, bounds), bounds):
            if isinstance(report, PenstockError):
                raise report
            if isinstance(report, str):
                place = report
            else:
                seen = report
    except EndedError as ended:
        said = f"{place}: reading it {ended}, and was stopped. {_MORE_TIME}"
        if seen is None:
            raise FeedError(said) from None
        seen = replace(seen, error=said)
    assert seen is not None
    return replace(seen, format=registry.by_name(seen.format.name))  # the object that all parts of this process have


def _look(files: Sequence[str], most: int, seconds: float, bounds: Bounds, report: Callable[[Any], None]) -> None:
    """Report the place that is read next, in words; the facts so far, again and again; or the error that ends it."""
    first = files[0]

    def at(place: str) -> None:
        nonlocal first
        first = first if place.startswith(first) else place  # the name of a file, for which the user gave a pattern
        report(place)

    try:
        for seen in _looks(files, most, seconds, bounds, at):
            report(seen)
    except PenstockError as error:
        report(error)
    except Exception as error:
        report(FeedError(_said(error, first, first, bounds)))


def _looks(
    files: Sequence[str], most: int, seconds: float, bounds: Bounds, at: Callable[[str], None]
) -> Iterator[PeekedFile]:
    """Yield the facts so far; the last ones are complete.

    Raises:
        Exception: any that a reader raises before the first sample.
    """
    found = fs.expand(files)
    first = found[0]
    at(first)
    is_folder = os.path.isdir(first) or (fs.is_url(first) and urls.without_query(first).rstrip("/").endswith(".zarr"))
    nbytes = None if is_folder else fs.size_of(first)
    if nbytes == 0:
        raise FeedError(f"{first} is empty (0 bytes): was it written to the end?")
    if words := other_formats.not_the_data(first):
        raise FeedError(words)
    format = registry.format_of(first) or registry.format_of(files[0])
    assert format is not None
    description = format.describe(first)
    if not description.columns:
        if not description.left_out:
            raise FeedError(f"{first} holds no data")
        why = "; ".join(f"{name!r} {reason}" for name, reason in description.left_out.items())
        raise FeedError(f"{first}: nothing in it can be served: {why}")
    look = _Look(first, most, seconds, bounds, at)
    began = time.monotonic()

    def facts() -> PeekedFile:
        taken = time.monotonic() - began
        return PeekedFile(
            tuple(files), first, len(found), nbytes, format, description, look.summary, look.places, taken, look.error
        )

    for _ in look.read(format, description):
        yield facts()
    if not look.summary.samples and len(description.columns) > 1:
        description = look.readable(format, description)
        for _ in look.read(format, description):
            yield facts()
    if not look.summary.samples:
        raise FeedError(look.error or f"{first} holds no samples")
    yield facts()


class _Look:
    """Reads samples of one file.

    Attributes:
        summary: the summary of the samples so far.
        places: how many places of the file they come from, if no error ends the reading.
        error: the error that ended the reading, or "".
    """

    def __init__(self, first: str, most: int, seconds: float, bounds: Bounds, at: Callable[[str], None]) -> None:
        self._first = first
        self._most = most
        self._seconds = seconds
        self._bounds = bounds
        self._at = at
        self.summary = Summary()
        self.places = 0
        self.error = ""

    def read(self, format: Format, description: Description) -> Iterator[None]:
        """Start again, and read samples of these columns. Yield now and then, so that the facts can be told."""
        self.summary, self.places, self.error = Summary(), 0, ""
        last = float("-inf")
        place = self._first

        def at(split: Any) -> None:
            nonlocal place
            place = ", ".join(map(repr, split)) if isinstance(split, tuple) else repr(split)
            place = f"sample {place}" if isinstance(split, int) else place
            if self._first not in place:
                place = f"{self._first}: {place}"
            self._at(place)

        try:
            feed = feed_of(format, description, self._first)
            splits = splits_of(feed)
            self.places = min(PLACES, len(splits))
            for sample in limited(spread(feed, splits, self._most, at), self._most, self._seconds):
                self.summary.add(sample)
                if time.monotonic() - last > _TELL:
                    yield
                    last = time.monotonic()
        except Exception as error:
            self.error = _said(error, self._first, place, self._bounds)

    def readable(self, format: Format, description: Description) -> Description:
        """Return the description without the columns that cannot be read; unchanged if no column can be read."""
        one = _Look(self._first, 1, 0, self._bounds, self._at)
        unread: dict[str, str] = {}
        for column in description.columns:
            for _ in one.read(format, replace(description, columns=(column,))):
                pass
            if not one.summary.samples:
                unread[column.name] = "cannot be read: " + one.error.removeprefix(f"{self._first}: ")
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
            if words := other_formats.words_for(name):
                raise StartError(words)
            raise StartError(
                f"{urls.shown(name)}: expected the URL of a daemon's feed, tcp://HOST:PORT/FEED, or that of a data "
                f"file, which ends in {registry.all_endings()}"
            )
        url, query, _ = name.partition("?")
        if query:
            raise StartError(
                f"{addresses.shown(name)!r}: penstock peek cannot read as a member of a group or as a rank, since it "
                f"would take their batches. It reads the same samples with a stream of its own: penstock peek "
                f"{addresses.shown(url)}"
            )
        return True
    module, _, attribute = name.rpartition(":")
    if module and attribute.isidentifier() and not os.path.exists(name):
        return False
    if os.path.isdir(name):
        refuse_directory(name)
    if name.endswith(".py") and os.path.exists(name):
        raise StartError(f"{name}: which feed in it? Write {name}:ATTR, such as {name}:feed")
    if os.path.exists(name) and (words := other_formats.words_for(name)):
        raise StartError(words)
    if os.path.exists(name):
        raise StartError(
            f"{name}: no kind of file that Penstock reads. Write a generator that reads it, and give its feed as "
            f"MODULE:ATTR, such as scenes.py:feed (expected a file that ends in {registry.all_endings()})"
        )
    if not name.strip():
        raise StartError(
            "the name is empty, perhaps as a variable is not set. Give a file, the URL of a daemon's feed "
            "(tcp://HOST:PORT/FEED) or MODULE:ATTR, such as scenes.py:feed"
        )
    where = "" if os.path.isabs(name) else f" in {os.getcwd()}"
    if similar := registry.similar_file(name):
        raise StartError(f"{name!r}: no such file{where}. Did you mean {similar}?")
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
    others: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for folder, _, names in os.walk(name):
        deeper = "" if os.path.samefile(folder, name) else "**/"
        for one in names:
            format = registry.by_ending(one)
            pattern = f"{deeper}*{_ending(one, format)}"
            (others if format is None else data)[pattern] += 1
            examples.setdefault(pattern, os.path.join(folder, one))
        if data.total() + others.total() > 10_000:
            break
    if data:
        pattern, count = data.most_common(1)[0]
        raise StartError(
            f"{name} is a directory: give the files in it, such as '{name.rstrip('/')}/{pattern}' ({count})"
        )
    for pattern, count in others.most_common(3):
        if words := other_formats.words_for(examples[pattern]):
            raise StartError(f"{name} is a directory without data files (it has {count} {pattern}): {words}")
    raise StartError(f"{name} is a directory without data files: give a file that ends in {registry.all_endings()}")


def _ending(name: str, format: Format | None) -> str:
    """Return the end of a file name that files of its kind share."""
    for ending in sorted(format.endings if format else (), key=len, reverse=True):
        if name.lower().endswith(ending):
            return name[-len(ending) :]
    found = "".join(Path(name).suffixes[-1:])
    return re.sub("-[0-9]+-of-[0-9]+$", "*", found)  # of the shards of TFRecord files


def _check_one_format(files: Sequence[str]) -> None:
    formats: dict[str, str] = {}
    for file in files:
        found = registry.format_of(file)
        formats.setdefault(found.name if found else "", file)
    if len(formats) > 1:
        have = " and ".join(f"{file} is {name}" for name, file in formats.items())
        raise StartError(f"the files have several formats ({have}): look at one format at a time")


def _said(error: Exception, file: str, place: str, bounds: Bounds) -> str:
    """Return what went wrong, at which place of the file, and what to do."""
    text = str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)
    if isinstance(error, MemoryError):
        return (
            f"{place}: reading it needs more than {size(bounds.memory)} of memory, and was stopped. If the file is as "
            "it should be, allow more, such as --memory 4G"
        )
    if isinstance(error, ImportError):
        return text
    if not isinstance(error, _ERRORS):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
        return (
            f"{place}: it cannot be read ({text}). Is it damaged, or does it use something that Penstock's reader does "
            "not know? Copy it again, or write it in another way"
        )
    return text if file in text else f"{place}: {text or type(error).__name__}"
