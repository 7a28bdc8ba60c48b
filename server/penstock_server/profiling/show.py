"""Shows a profile: in the terminal, as JSON, and as files."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

from penstock_proto import distribution

from . import report, speedscope
from .page import profile_page
from .profile import Profile


def show(profile: Profile, target: str, out: Sequence[Path], *, reads: bool, prints_json: bool) -> None:
    """Print the report, and write the files.

    Args:
        profile: what was sampled.
        target: what the user asked for.
        out: files to write: a page (.html), or speedscope's format (.json).
        reads: whether the command read the feed itself.
        prints_json: print JSON, not text.

    Raises:
        click.FileError: a file cannot be written.
    """
    for path in out:
        write(path, _text(profile, target, path, reads=reads))
    if prints_json:
        click.echo(json.dumps(report.as_json(profile, target), indent=2))
        return
    click.echo("\n".join(report.lines(profile, target, reads=reads)))
    if out:
        click.echo(f"\nwritten: {', '.join(map(str, out))}")
    elif any(worker.samples for worker in profile.workers):
        click.echo("\n--out profile.html writes a flame graph, --out profile.json one for speedscope.app")


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        click.FileError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or str(error)) from None


def _text(profile: Profile, target: str, path: Path, *, reads: bool) -> str:
    if path.suffix.lower() == ".json":
        return json.dumps(speedscope.document(profile, f"Profile of {target}", distribution.version()))
    return profile_page(profile, target, time.strftime("%Y-%m-%d %H:%M"), reads=reads)


@contextmanager
def progress() -> Iterator[Callable[[float], None]]:
    """Show a progress bar meanwhile, if standard error is a terminal; yield what tells it how much is done."""
    if not sys.stderr.isatty():
        yield lambda part: None
        return
    with click.progressbar(length=1000, file=sys.stderr, label="sampling stacks", show_percent=False) as bar:
        yield lambda part: bar.update(int(1000 * part) - bar.pos)
