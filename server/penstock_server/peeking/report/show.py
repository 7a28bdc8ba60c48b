"""Prints the report about a feed or data files, and writes the contact sheet."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click

from penstock_proto import FeedError, StartError
from penstock_proto.messages import FeedInfo

from ..files.data_files import PeekedFile
from ..files.proposal import propose, unfit
from ..leaves.summary import Summary
from ..leaves.words import counted
from .feed_report import feed_json, feed_lines
from .file_report import file_json, file_lines, left_out_lines, proposal_lines
from .sheet import write_sheet


@dataclass(frozen=True, slots=True)
class SeenFiles:
    """Data files; the first was read."""

    peeked: PeekedFile

    @property
    def summary(self) -> Summary:
        """The summary of the samples."""
        return self.peeked.summary

    @property
    def error(self) -> str:
        """The error that ended the reading, or ""."""
        return self.peeked.error

    def lines(self, blocks: bool) -> Iterator[str]:
        """Yield the report."""
        yield from file_lines(self.peeked, blocks=blocks)
        yield from left_out_lines(unfit(self.peeked))
        if not self.error:
            yield from proposal_lines(propose(self.peeked))

    def json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return file_json(self.peeked, None if self.error else propose(self.peeked))


@dataclass(frozen=True, slots=True)
class SeenFeed:
    """The first samples of a feed."""

    url: str
    info: FeedInfo
    summary: Summary
    seconds: float
    error: str

    def lines(self, blocks: bool) -> Iterator[str]:
        """Yield the report."""
        return feed_lines(self.url, self.info, self.summary, self.seconds, blocks=blocks)

    def json(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return feed_json(self.url, self.info, self.summary, self.seconds, self.error)


Seen: TypeAlias = SeenFiles | SeenFeed


def show(seen: Seen, out: Path | None, *, as_json: bool) -> None:
    """Print the report, and write a contact sheet to `out` unless that is None.

    Raises:
        FeedError: the reading ended with an error; the report covers the samples before it.
        StartError: the contact sheet cannot be written.
    """
    written, unwritten = "", None
    if out is not None:  # before printing, as a pipe may close after the beginning of the report
        try:
            written = write_sheet(out, seen.summary)
        except StartError as error:
            unwritten = error
    if as_json:
        click.echo(json.dumps(seen.json(), indent=2))
    else:
        encoding = sys.stdout.encoding or "ascii"
        for line in (*seen.lines(_has_blocks(encoding)), *(("", written) if written else ())):
            click.echo(line.encode(encoding, "backslashreplace").decode(encoding))
    if seen.error:
        raise FeedError(f"after {counted(seen.summary.samples, 'sample')}: {seen.error}")
    if unwritten is not None:
        raise unwritten


def _has_blocks(encoding: str) -> bool:
    try:
        "\u2588\u258f".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
