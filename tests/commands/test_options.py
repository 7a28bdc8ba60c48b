"""The help of a command with many options shows them under headings."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

import penstock_command
from penstock_server.cli.option_groups import MOST_IN_ONE_LIST, Group

COMMANDS = penstock_command.main.commands


def options(name: str) -> list[click.Option]:
    """Return the options of a command that its help shows, without --help."""
    return [option for option in COMMANDS[name].params if isinstance(option, click.Option) and not option.hidden]


def headings(name: str) -> dict[str, set[str]]:
    """Return the options in the help of a command, by heading."""
    shown = CliRunner().invoke(penstock_command.main, [name, "--help"], prog_name="penstock").output
    found: dict[str, set[str]] = {}
    here: set[str] = set()
    for line in shown.splitlines():
        if re.fullmatch(r"\S.*:", line):
            found[line.removesuffix(":")] = here = set()
        elif flag := re.match(r"  (?:-h, )?(--[a-z-]+)", line):
            here.add(flag[1])
    return {heading: flags for heading, flags in found.items() if flags}


# --- headings ---


def test_the_help_of_serve_has_its_options_under_headings() -> None:
    shown = headings("serve")
    assert list(shown) == [group for group in Group if group is not Group.CHECK]
    assert shown["Where it listens"] == {"--bind", "--advertise", "--http"}
    assert shown["Workers and memory"] == {"--workers", "--memory", "--hang-timeout", "--worker-memory", "--env"}
    assert shown["Safety"] == {"--keys", "--insecure", "--allow-uid"}
    assert shown["Hosts on a cluster"] == {"--on", "--hosts", "--workers-per-host"}
    assert shown["Development"] == {"--reload"}
    assert shown["Other options"] == {"--help"}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_only_commands_with_many_options_have_headings_and_show_each_option_once(name: str) -> None:
    shown, flags = headings(name), {max(option.opts, key=len) for option in options(name)} | {"--help"}
    assert sorted(flag for under in shown.values() for flag in under) == sorted(flags)
    if len(options(name)) > MOST_IN_ONE_LIST:
        assert shown[Group.OTHERS] == {"--help"}, "each option has a heading"
    else:
        assert list(shown) == ["Options"]
