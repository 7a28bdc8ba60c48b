"""`penstock peek`: shows the contents of a feed or of data files."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock_proto.security.keys import client_keys
from penstock_server.cli.command_group import complete_files
from penstock_server.cli.param_options import given, param_options
from penstock_server.cli.parameters import Bytes, WholeNumber, client_keys_option

if TYPE_CHECKING:
    from penstock_server.peeking.report.show import SeenFeed


@click.command()
@click.argument("what", metavar="URL|MODULE:ATTR|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--samples",
    type=WholeNumber(1),
    default=None,
    metavar="N",
    show_default="256, or those that come within 3 s",
    help="Number of samples to read. With it, a data file is read for as long as that takes.",
)
@click.option(
    "--memory",
    type=Bytes(),
    default=None,
    metavar="SIZE",
    show_default="768M",
    help="Most memory that reading a data file may take.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="SHEET.png",
    help="Write a contact sheet of the leaves that are images.",
)
@client_keys_option
@param_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def peek(
    what: tuple[str, ...],
    samples: int | None,
    memory: int | None,
    out: Path | None,
    keys: str | None,
    as_json: bool,
    param: tuple[tuple[str, str], ...],
    params_file: str | None,
) -> None:
    """Show what a feed or data files hold: leaves, shapes, ranges, lengths, some values.

    For data files (HDF5, NumPy, TFRecord, Parquet, CSV, tar and others; a path, a pattern or a URL) it also shows how
    they are stored, and a command and a module that serve them. Of several files it reads only the first. For a file of
    a kind that is not served, it says what the file is, and what to do with it.

    A feed given as MODULE:ATTR runs in this process, as with workers=0. A daemon's feed, given as a URL, is read from
    epoch 0 on with a separate stream, so no other consumer misses a batch.

    \b
    Examples:
      penstock peek digits.h5 --out sheet.png
      penstock peek train.tfrecord
      penstock peek scenes.py:feed
      penstock peek tcp://loader:5555/train --samples 1000
    """  # noqa: D301
    from penstock_server.peeking.files import data_files
    from penstock_server.peeking.report import show
    from penstock_server.sources.registry import format_of

    if out is not None and out.suffix.lower() != ".png":
        raise click.UsageError(f"--out writes a PNG file: its name must end in .png, got {str(out)!r}")
    before = threading.enumerate()
    most, seconds = (256, 3.0) if samples is None else (samples, float("inf"))
    if all(format_of(name) is not None for name in what):
        bounds = data_files.BOUNDS if samples is None else replace(data_files.BOUNDS, cpu=None, wall=None)
        bounds = bounds if memory is None else replace(bounds, memory=memory)
        seen: show.Seen = show.SeenFiles(data_files.peek_files(what, most, seconds, bounds))
    elif len(what) > 1:
        raise click.UsageError("give one feed, or data files of one format")
    else:
        seen = _read_feed(what[0], most, seconds, keys, given(param, params_file))
    show.show(seen, out, as_json=as_json)
    _leave_threads(before)


def _leave_threads(before: list[threading.Thread]) -> None:
    """End the process at once if the feed's code has left threads that Python would wait for. A thread that fills a
    queue waits forever once nobody reads from the queue."""
    if any(thread not in before and not thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _read_feed(feed: str, most: int, seconds: float, keys: str | None, params: dict[str, Any]) -> SeenFeed:
    """Read samples of one feed, with a stream of its own."""
    import penstock
    from penstock.commands.samples import samples
    from penstock_server.peeking.files import data_files
    from penstock_server.peeking.files.sampling import limited
    from penstock_server.peeking.leaves.summary import Summary
    from penstock_server.peeking.report import show
    from penstock_server.targets.world import as_served
    from penstock_server.to_daemon import control

    running = data_files.is_url_of_feed(feed)
    if running:
        control.status(feed, 5.0, client_keys(keys))  # raises soon if no daemon listens there
    else:
        as_served(feed)
    summary, error = Summary(), ""
    with penstock.connect(feed, workers=None if running else 0, reconnect=0, keys=keys, params=params) as connection:
        began = time.monotonic()
        try:
            for sample in limited(samples(connection), most, seconds):
                summary.add(sample)
        except penstock.PenstockError as failed:
            if not summary.samples:
                raise
            error = str(failed)
        return show.SeenFeed(feed, connection.info, summary, time.monotonic() - began, error)
