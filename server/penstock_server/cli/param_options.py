"""The options --param and --params: parameters of the functions that return feeds."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from penstock_proto.params import with_params

from .option_groups import Group, option


class Param(click.ParamType[tuple[str, str]]):
    """NAME=VALUE. In an environment variable several of them are words, as for a shell."""

    name = "param"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Return the name and the value."""
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"must be NAME=VALUE, such as size=128, got {value!r}", param, ctx)
        return name, text

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        """Return the words of an environment variable."""
        try:
            return shlex.split(rv)
        except ValueError as error:
            self.fail(f"expected NAME=VALUE words as for a shell, got {rv!r} ({error})")


_OPTIONS = (
    option(
        "--param",
        "param",
        group=Group.PARAMETERS,
        type=Param(),
        multiple=True,
        metavar="NAME=VALUE",
        help="With MODULE:FUNCTION: a parameter of the function, which returns the feed; once for each. "
        "`penstock params MODULE:FUNCTION` lists them.",
    ),
    option(
        "--params",
        "params_file",
        group=Group.PARAMETERS,
        type=click.Path(dir_okay=False),
        default=None,
        metavar="FILE",
        show_default="none",
        help="With MODULE:FUNCTION: a TOML or JSON file with parameters; --param comes before it.",
    ),
)


def param_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command. The command passes their values to `taken` or `given`."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


def taken(options: dict[str, Any]) -> dict[str, Any]:
    """Take the two options out of `options`, and return the parameters.

    Raises:
        click.UsageError: the file cannot be read.
    """
    return given(options.pop("param"), options.pop("params_file"))


def given(param: Sequence[tuple[str, str]], params_file: str | None) -> dict[str, Any]:
    """Return the parameters from the values of the two options.

    Raises:
        click.UsageError: the file cannot be read.
    """
    return {**({} if params_file is None else _read(Path(params_file))), **dict(param)}


def with_given(targets: Sequence[str], params: dict[str, Any]) -> list[str]:
    """Return MODULE:FUNCTION targets with these parameters.

    Raises:
        click.UsageError: the parameters cannot be passed on.
    """
    from ..targets.file_target import is_file_target

    if params and any(map(is_file_target, targets)):
        raise click.UsageError("--param and --params are for MODULE:FUNCTION: data files have --leaf and the like")
    try:
        return [with_params(target, params) for target in targets] if params else list(targets)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
        found = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:  # a file that is no JSON or TOML raises a ValueError
        raise click.UsageError(f"--params {file}: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"--params {file}: expected an object with parameters, got {type(found).__name__}")
    return found
