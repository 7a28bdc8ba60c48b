"""Keeps a command going whose standard input, output or error is closed, full, or has nobody at its other end."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

import click

_WRITERS = (click.echo.__module__, "rich.console")
"""The modules that write the output of commands."""


def open_missing() -> None:
    """Open /dev/null in place of each stream that is closed. Otherwise the next file or socket gets its number, and
    receives what is written to the stream."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the smallest number that is free: fd
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 (it lives as long as the process)


def say(line: str) -> None:
    """Print a line on standard output. If nobody reads it (`| head -1`) or the disk is full, go on without."""
    with contextlib.suppress(OSError):
        click.echo(line)


def is_of_output(error: OSError) -> bool:
    """Return whether `error` came from writing the output of a command, and not from a file or a socket."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return error.filename is None and frames[-1].f_globals.get("__name__") in _WRITERS


def flush() -> None:
    """Drop what can no longer be written. Otherwise Python tries again at its end, and exits with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
