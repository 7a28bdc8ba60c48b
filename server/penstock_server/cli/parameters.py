"""Types of values on the command line, and options that several commands share."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from ..machine.size_text import parsed_size
from ..workers.worker_config import LEAST_WORKER_MEMORY
from .option_groups import Group, option

_F = TypeVar("_F", bound=Callable[..., Any])


class WholeNumber(click.IntRange):
    """A whole number from a range. (click calls it "integer range" in its errors.)"""

    name = "whole number"


class Number(click.FloatRange):
    """A number from a range."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return `value` if it is a finite number of the range. (nan is in every range of click.)"""
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return found


def keys_option(text: str, default: str = "PENSTOCK_KEYS, or none") -> Callable[[_F], _F]:
    """Declare --keys with this help."""
    return option(
        "--keys",
        group=Group.SAFETY,
        type=click.Path(file_okay=False),
        default=None,
        metavar="DIR",
        show_default=default,
        help=text,
    )


client_keys_option = keys_option("A client's folder of keys, for a daemon with --keys.")

answer_timeout_option = click.option(
    "--timeout",
    type=Number(0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to wait for an answer.",
)

allow_uid_option = option(
    "--allow-uid",
    "allow_uids",
    group=Group.SAFETY,
    type=WholeNumber(0),
    multiple=True,
    metavar="UID",
    help="Let trainers of this user, on this host, share memory with Penstock; they can then change its batches.",
)

hang_timeout_option = option(
    "--hang-timeout",
    group=Group.WORKERS,
    type=Number(0, min_open=True),
    default=None,
    metavar="SECONDS",
    show_default="off",
    help="Kill and replace a worker whose generator yields no sample for this long; the log names the line it hung at.",
)


def _enough(context: click.Context, option: click.Parameter, value: int | None) -> int | None:
    if value is not None and value < LEAST_WORKER_MEMORY:
        raise click.BadParameter(f"must be at least {LEAST_WORKER_MEMORY >> 20}M, got {value} bytes", context, option)
    return value


log_level_option = option(
    "--log-level",
    group=Group.OPERATION,
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Log lines of this level and above.",
)

until_stdin_closes_option = click.option(
    "--until-stdin-closes", is_flag=True, hidden=True, help="Stop at the end of standard input."
)

log_format_option = option(
    "--log-format",
    "form",
    group=Group.OPERATION,
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Write the log as text, or as a JSON object on each line.",
)


class Workers(click.ParamType[int | Literal["auto"]]):
    """A number of workers, or `auto`."""

    name = "workers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        """Return `value` as a number, or `auto`."""
        if value == "auto":
            return "auto"
        try:
            return _COUNT.convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"must be a number from 0 to {_MOST}, or auto, got {value!r}", param, ctx)


_MOST = 4096
_COUNT = WholeNumber(0, _MOST)


class HostBounds(click.ParamType[tuple[int, int]]):
    """A number of hosts, or MIN:MAX. The value is (fewest, most)."""

    name = "hosts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        """Return the fewest and the most."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", str(value))
        if match is None:
            self.fail(f"must be a number, or MIN:MAX such as 2:8, got {value!r}", param, ctx)
        least, most = int(match[1]), int(match[2] or match[1])
        if least > most:
            self.fail(f"MIN must not be more than MAX, got {value!r}", param, ctx)
        if least < 1 or most > _MOST:
            self.fail(f"must be from 1 to {_MOST}, got {value!r}", param, ctx)
        return least, most


class Bytes(click.ParamType[int]):
    """A size in bytes: 500000000, 500M, 4G (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return `value` as a number of bytes."""
        try:
            number = parsed_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not number:
            self.fail(f"must be more than 0, got {value!r}", param, ctx)
        return number


def memory_option(text: str, *names: str) -> Callable[[_F], _F]:
    """Declare --memory with this help."""
    return option(
        "--memory",
        *names,
        group=Group.WORKERS,
        type=Bytes(),
        default=None,
        metavar="SIZE",
        show_default="a quarter of what is free, at most 8G",
        help=text,
    )


worker_memory_option = option(
    "--worker-memory",
    group=Group.WORKERS,
    type=Bytes(),
    callback=_enough,
    default=None,
    metavar="SIZE",
    show_default="no limit",
    help="Most memory of its own for each worker, such as 4G. User code that asks for more gets a MemoryError.",
)


class BytesOrNone(Bytes):
    """A size in bytes, or 0."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return `value` as a number of bytes."""
        return 0 if str(value).strip() == "0" else super().convert(value, param, ctx)


file_cache_option = option(
    "--file-cache",
    group=Group.WORKERS,
    type=click.Path(file_okay=False),
    default=None,
    metavar="DIR",
    show_default="PENSTOCK_FILE_CACHE, or ~/.cache/penstock/files",
    help="Folder on a local disk in which the workers of a host keep the files of URLs that they read.",
)

file_cache_size_option = option(
    "--file-cache-size",
    group=Group.WORKERS,
    type=BytesOrNone(),
    default=None,
    metavar="SIZE",
    show_default="PENSTOCK_FILE_CACHE_SIZE, or a fifth of the free disk, at most 16G",
    help="Most bytes of that folder, such as 200G: the files that were not read for longest are removed. With 0, "
    "nothing is kept.",
)


class Variable(click.ParamType[tuple[str, str | None]]):
    """NAME=VALUE, or NAME for its value in this process (None if it is not set)."""

    name = "variable"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str | None]:
        """Return the name and the value."""
        from ..machine.environment import checked

        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        result = text if equals else os.environ.get(name)
        try:
            checked({name: result}, "--env")
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return name, result


environment_option = option(
    "--env",
    "environment",
    group=Group.WORKERS,
    type=Variable(),
    multiple=True,
    callback=lambda context, option, value: dict(value),
    metavar="NAME[=VALUE]",
    help="Set an environment variable in the workers, whatever their feeds and the defaults say (each library one "
    "thread, no GPU); NAME alone takes the value that it has here.",
)


def worker_options(command: _F) -> _F:
    """Add the options of `WorkerConfig` to a command."""
    for one in (
        environment_option,
        file_cache_size_option,
        file_cache_option,
        hang_timeout_option,
        worker_memory_option,
    ):
        command = one(command)
    return command


class Advertised(click.ParamType[str]):
    """HOST or HOST:PORT; an IPv6 address is in brackets."""

    name = "host"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return `value` if it can be part of a URL."""
        text = str(value)
        match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/]+)(?::([0-9]{1,5}))?", text)
        if match is None or not 1 <= int(match[1] or 1) <= 65535:
            self.fail(
                f"must be HOST or HOST:PORT, such as loader.example.org, 10.0.0.5:5555 or [fd00::5], got {text!r}",
                param,
                ctx,
            )
        return text


class HttpAddress(click.ParamType[tuple[str, int]]):
    """HOST:PORT, or PORT alone for a server that only this host can reach; an IPv6 address is in brackets."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        """Return host and port."""
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(?:(\[[0-9A-Fa-f:.%\w]+\]|[^\s\[\]:/]+):)?([0-9]{1,5})", str(value))
        if match is None or int(match[2]) > 65535:
            self.fail(f"must be HOST:PORT or PORT, such as 127.0.0.1:8090 or 8090, got {value!r}", param, ctx)
        return (match[1] or "127.0.0.1").strip("[]"), int(match[2])


def given_for(config: type[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Take the options that are fields of a config out of `options`. Return those that were given; the config has the
    defaults of the others."""
    names = {field.name for field in dataclasses.fields(config)} & options.keys()
    taken = {name: options.pop(name) for name in names}
    return {name: value for name, value in taken.items() if value is not None}
