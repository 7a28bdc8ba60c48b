"""Behaviour that all commands of `penstock` share: errors, exit codes, environment variables, and examples in the help.

A command gets this behaviour when it is added to the group. Its own file only describes its options.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from penstock_proto import PenstockError, distribution

from . import standard_streams
from .option_groups import GroupedCommand

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_INTERRUPTED = 130
"""The exit code after Ctrl-C, as in shells: 128 + SIGINT."""


class PenstockGroup(click.Group):
    """A group of commands. Penstock's own errors end a command with one message and exit code 1; Ctrl-C ends it with
    130.

    Every option can be set by an environment variable: `--hang-timeout` of `serve` by PENSTOCK_SERVE_HANG_TIMEOUT. The
    examples at the end of a command's docstring come at the end of its help.
    """

    command_class = GroupedCommand

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _end_in_examples(self)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line, whatever its standard streams are."""
        standard_streams.open_missing()
        try:
            os.getcwd()
        except FileNotFoundError:
            click.echo("penstock: the working directory has been deleted: change to one that exists", err=True)
            sys.exit(1)
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if not standard_streams.is_of_output(error):
                raise
            with contextlib.suppress(OSError):  # standard error may be on the same disk
                click.echo(f"penstock: cannot write the output: {error.strerror or error}", err=True)
            sys.exit(1)
        finally:
            standard_streams.flush()

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command."""
        for option, variable in variables(name or cmd.name or "", cmd):
            option.envvar = variable
            if option.multiple:
                # split at spaces; click splits paths at colons
                option.type.envvar_list_splitter = None  # type: ignore[misc]
        _end_in_examples(cmd)
        super().add_command(cmd, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, and warn of environment variables that look like a misspelling of one of its variables."""
        name, command, rest = super().resolve_command(ctx, args)
        if name and command is not None and not ctx.resilient_parsing:
            for warning in _misspelt(name, command):
                click.echo(f"penstock: warning: {warning}", err=True)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.BadParameter as error:
            raise _with_variable(error) from None
        except PenstockError as error:
            click.echo(f"penstock: {error}", err=True)
            ctx.exit(1)
        except (ImportError, AttributeError) as error:
            if not (explained := distribution.explained(error)):
                raise
            click.echo(f"penstock: {explained}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            click.echo(err=True)  # ends the terminal's line that shows ^C
            ctx.exit(_INTERRUPTED)


def variables(name: str, command: click.Command) -> Iterator[tuple[click.Option, str]]:
    """Yield the options of the command with this name, each with its environment variable."""
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            flag = max(option.opts, key=len)
            yield option, f"PENSTOCK_{name}_{flag.lstrip('-')}".replace("-", "_").upper()


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete file names for an argument that may be a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _end_in_examples(command: click.Command) -> None:
    """Move the examples in the command's description to the end of its help, after the options."""
    described, examples, given = inspect.cleandoc(command.help or "").partition("\b\nExamples:")
    if examples:
        command.help, command.epilog = described.rstrip(), examples + given


def _with_variable(error: click.BadParameter) -> click.BadParameter:
    """Return the error. If the wrong value came from an environment variable, return an error that says so."""
    option, ctx = error.param, error.ctx
    if option is None or ctx is None or option.name is None:
        return error
    if ctx.get_parameter_source(option.name) is not click.core.ParameterSource.ENVIRONMENT:
        return error
    return click.BadParameter(f"{error.message} (from the environment variable {option.envvar})", ctx, option)


def _misspelt(name: str, command: click.Command) -> Iterator[str]:
    known = [variable for _, variable in variables(name, command)]
    prefix = f"PENSTOCK_{name}_".replace("-", "_").upper()
    for given in sorted(os.environ):
        if given.startswith(prefix) and given not in known:
            # Kubernetes sets variables with such names too, so warn only of those that are close to one of ours.
            for meant in difflib.get_close_matches(given, known, n=1, cutoff=0.85):
                yield f"{given} sets nothing; did you mean {meant}?"
