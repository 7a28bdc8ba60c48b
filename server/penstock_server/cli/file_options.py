"""The options of `penstock serve` that describe a feed of data files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import click

from .option_groups import Group, option
from .parameters import WholeNumber


class Rows(click.ParamType[tuple[int, int | None]]):
    """A range of rows: 100:200, 100: or :200."""

    name = "rows"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int | None]:
        """Return `value` as (start, stop)."""
        match = re.fullmatch(r"([0-9]*):([0-9]*)", str(value))
        if match is None or str(value) == ":":
            self.fail(f"must be START:STOP, such as 0:50000 or 50000:, got {value!r}", param, ctx)
        return int(match[1] or 0), int(match[2]) if match[2] else None


class Size(click.ParamType[tuple[int, int]]):
    """The size of images, HEIGHTxWIDTH."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return `value` as (height, width)."""
        match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", str(value))
        if match is None:
            self.fail(f"must be HEIGHTxWIDTH, such as 224x224, got {value!r}", param, ctx)
        return int(match[1]), int(match[2])


_OPTIONS = (
    option(
        "--leaf",
        "leaves",
        group=Group.DATA_FILES,
        multiple=True,
        metavar="NAME=DATASET",
        help="With FILE: a leaf of the samples and the dataset, array, column or extension that holds it; once for "
        "each leaf. DATASET without a name, for all leaves, makes samples tuples.",
    ),
    option(
        "--batch-size",
        group=Group.DATA_FILES,
        type=WholeNumber(1),
        default=None,
        metavar="N",
        help="With FILE: samples in a batch.",
    ),
    option(
        "--shuffle",
        group=Group.DATA_FILES,
        type=WholeNumber(0),
        default=None,
        metavar="N",
        help="With FILE: number of samples to mix.",
    ),
    option(
        "--seed",
        group=Group.DATA_FILES,
        type=WholeNumber(0),
        default=None,
        metavar="N",
        help="With FILE: seed of the order.",
    ),
    option(
        "--rows",
        group=Group.DATA_FILES,
        type=Rows(),
        default=None,
        metavar="START:STOP",
        show_default="all",
        help="With FILE: rows to serve, counted over all files.",
    ),
    option(
        "--size",
        group=Group.DATA_FILES,
        type=Size(),
        default=None,
        metavar="HEIGHTxWIDTH",
        show_default="the files'",
        help="With a folder of images, or --images: their size in pixels.",
    ),
    option(
        "--images",
        group=Group.DATA_FILES,
        default=None,
        metavar="COLUMN",
        help="With a CSV file: the column that holds the paths of images, which are read in its place.",
    ),
    option(
        "--transform",
        group=Group.DATA_FILES,
        multiple=True,
        metavar="MODULE:FUNCTION",
        help="With FILE: a function that turns each sample that was read into another; several are applied in order.",
    ),
    option(
        "--on-error",
        group=Group.DATA_FILES,
        type=click.Choice(["raise", "skip", "retry"]),
        default=None,
        show_default="raise",
        help="With FILE: what to do with images, rows and splits that cannot be read. skip leaves them out and names "
        "them in the log.",
    ),
    option(
        "--cache",
        group=Group.DATA_FILES,
        type=click.Path(file_okay=False),
        default=None,
        metavar="DIR",
        help="With FILE: a directory that keeps the splits that were read, for later epochs and daemons.",
    ),
    option(
        "--name",
        group=Group.DATA_FILES,
        default=None,
        metavar="NAME",
        show_default="the first file's",
        help="With FILE: the feed's name.",
    ),
)


def file_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command. The command passes their values to `targets_of`."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


def targets_of(arguments: Sequence[str], options: dict[str, Any]) -> list[str]:
    """Return the targets that workers load: MODULE:ATTR arguments unchanged, or one feed of all data files.

    Raises:
        click.UsageError: arguments and options contradict each other.
    """
    from penstock_proto.transport import urls

    from ..sources.other_formats import not_the_data
    from ..sources.registry import format_of
    from ..targets.file_target import make_target

    formats = {argument: format_of(argument) for argument in arguments}
    files = [argument for argument in arguments if formats[argument] is not None]
    for argument in arguments:
        if formats[argument] is None and ("://" in argument or urls.is_address_alone(argument)):
            raise click.UsageError(_url(argument))
        if formats[argument] is None and ":" not in argument and not argument.endswith(".py"):  # no feed either
            raise click.UsageError(_unknown(argument))
    for file in files:
        if words := not_the_data(file):
            raise click.UsageError(words)
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if not files:
        if given:
            named = " and ".join(f"--{name.replace('_', '-')}" for name in given).replace("--leaves", "--leaf")
            verb = "is" if len(given) == 1 else "are"
            raise click.UsageError(f"{named} {verb} for data files: a feed has them in its module, as Feed(...)")
        return list(arguments)
    if len(files) < len(arguments):
        feed = next(argument for argument in arguments if formats[argument] is None)
        raise click.UsageError(
            f"{files[0]} is a data file, and {feed} is a feed: serve either data files or MODULE:ATTR feeds, or start "
            "a second daemon on another port"
        )
    try:
        return [make_target(files, **options)]
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _url(argument: str) -> str:
    """Say why a URL is no data file, or what to do with that of a running daemon."""
    from penstock_proto.transport import urls

    from ..sources.other_formats import words_for
    from ..sources.registry import all_endings
    from ..sources.remote.urls import shown

    if argument.startswith("tcp://") or "://" not in argument:
        address = urls.shown(argument)
        url = address if "://" in address else f"tcp://{address}"
        return (
            f"{address} is the address of a running daemon, not a feed or data file to serve: penstock status {url} "
            f"shows it, and penstock.connect('{url}') reads from it"
        )
    name = shown(argument)
    return words_for(name) or (
        f"{name}: expected the URL of a data file, which ends in {all_endings()}. The files of a folder are given by a "
        "pattern, such as 's3://bucket/train/*.tar'"
    )


def _unknown(argument: str) -> str:
    """Say why an argument is neither a data file nor a feed, and name the most similar file."""
    from ..sources.other_formats import words_for
    from ..sources.registry import all_endings, similar_file

    expected = f"expected a data file, which ends in {all_endings()}, or MODULE:ATTR, such as scenes.py:feed"
    if not argument.strip():
        return f"the name of the feed or data file is empty, perhaps as a variable is not set; {expected}"
    if os.path.isdir(argument):
        return (
            f"{argument} is a directory: give the files in it, as a pattern in quotes, such as "
            f"'{argument.rstrip('/')}/*.h5'. penstock peek {argument} says which it has"
        )
    if os.path.exists(argument):
        if words := words_for(argument):
            return words
        return f"{argument}: no kind of file that Penstock reads. Other files need a Feed with a generator ({expected})"
    if similar := similar_file(argument):
        return f"{argument}: no such file. Did you mean {similar}?"
    return f"{argument}: no such file; {expected}"
