"""Options under headings: the help of a command with many options shows them in groups."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import click

_F = TypeVar("_F", bound=Callable[..., Any])

MOST_IN_ONE_LIST = 12
"""The help of a command with more options has headings."""


class Group(enum.StrEnum):
    """The headings, in their order."""

    CHECK = "The check"
    MEASUREMENT = "The measurement"
    LISTENING = "Where it listens"
    WORKERS = "Workers and memory"
    SAFETY = "Safety"
    DATA_FILES = "Data files"
    PARAMETERS = "Feeds with parameters"
    HOSTS = "Hosts on a cluster"
    OPERATION = "Operation"
    DEVELOPMENT = "Development"
    OTHERS = "Other options"


class GroupedOption(click.Option):
    """An option that knows its heading."""

    def __init__(self, *args: Any, group: Group, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def option(*declarations: str, group: Group, **attributes: Any) -> Callable[[_F], _F]:
    """Declare an option of a command, as `click.option` does, and its heading."""
    return click.option(*declarations, cls=GroupedOption, group=group, **attributes)


class GroupedCommand(click.Command):
    """A command that shows its options under their headings if they are many."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the help."""
        groups: dict[Group, list[tuple[str, str]]] = {group: [] for group in Group}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[getattr(parameter, "group", Group.OTHERS)].append(record)
        if sum(map(len, groups.values())) <= MOST_IN_ONE_LIST + 1:  # one is --help
            super().format_options(ctx, formatter)
            return
        for group, records in groups.items():
            if records:
                with formatter.section(group.value):
                    formatter.write_dl(records)
