"""Each option is declared once: the help shows it under a heading, and its value reaches the config of its command."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from typing import Any

import click
import pytest
from click.testing import CliRunner

import penstock_command
from penstock_proto import StartError
from penstock_server.cli import join_command
from penstock_server.cli.file_options import file_options
from penstock_server.cli.option_groups import MOST_IN_ONE_LIST, Group
from penstock_server.cli.param_options import param_options
from penstock_server.cli.parameters import given_for
from penstock_server.daemon.config import DaemonConfig
from penstock_server.join.config import JoinConfig
from penstock_server.worker_state.start_arguments import StartArguments
from penstock_server.workers.worker_config import WorkerConfig

COMMANDS = penstock_command.main.commands
FEEDS = ("feeds.py:feed",)


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
    assert list(shown) == [group for group in Group if group not in (Group.CHECK, Group.MEASUREMENT)]
    assert shown["Where it listens"] == {"--bind", "--advertise", "--http"}
    assert shown["Workers and memory"] == {
        *("--workers", "--memory", "--hang-timeout", "--worker-memory", "--env"),
        *("--file-cache", "--file-cache-size"),
    }
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


# --- configs ---


@pytest.mark.parametrize(("name", "config"), [("serve", DaemonConfig), ("join", JoinConfig)])
def test_each_option_has_one_reader(name: str, config: type[WorkerConfig]) -> None:
    """An option is a field of the config, describes data files or parameters, or is read by the command itself."""
    command = COMMANDS[name]
    assert command.callback is not None
    by_command = set(inspect.signature(command.callback).parameters) - {"options"}
    of_files = {option.name for option in param_options(file_options(click.Command("files"))).params}
    fields = {field.name for field in dataclasses.fields(config)}
    given = {parameter.name for parameter in command.params}
    assert given <= by_command | of_files | fields
    assert fields <= given | {"head"}, "each field can be set"
    assert not of_files & fields


@pytest.mark.parametrize(("name", "config"), [("serve", DaemonConfig), ("join", JoinConfig)])
def test_the_defaults_in_the_help_are_those_of_the_config(name: str, config: type[WorkerConfig]) -> None:
    for field in dataclasses.fields(config):
        option = next((option for option in options(name) if option.name == field.name), None)
        if option is None or field.default in (dataclasses.MISSING, None) or option.is_flag or option.multiple:
            continue
        if option.default is None:
            assert str(field.default) in str(option.show_default), option.opts
        else:
            assert option.default == field.default, option.opts


def test_the_options_of_workers_reach_hosts_on_ray() -> None:
    config = WorkerConfig(
        feeds=FEEDS,
        hang_timeout=2.5,
        worker_memory=1 << 30,
        file_cache="/cache",
        file_cache_size=0,
        environment={"A": "1", "GONE": None},
    )
    plain = WorkerConfig(feeds=FEEDS)
    for field in dataclasses.fields(WorkerConfig):
        if field.name != "feeds":
            assert getattr(config, field.name) != getattr(plain, field.name), "set each field here"
    words = ["tcp://head:5555", *FEEDS, *config.join_words()]
    context = join_command.join.make_context("join", words)
    given = given_for(WorkerConfig, dict(context.params) | {"feeds": FEEDS})
    assert WorkerConfig(**given) == config


def test_what_workers_are_told_at_their_start_arrives() -> None:
    config = WorkerConfig(feeds=FEEDS, hang_timeout=2.5, worker_memory=1 << 30, file_cache="/cache", file_cache_size=5)
    told = config.start_arguments()
    assert told == StartArguments(feeds=FEEDS, ticks=True, memory=1 << 30, file_cache="/cache", file_cache_size=5)
    for arguments in (told, StartArguments(feeds=(*FEEDS, "others:feed"))):
        parser = argparse.ArgumentParser()
        StartArguments.add_to(parser)
        assert StartArguments.of(parser.parse_args(arguments.words())) == arguments


@pytest.mark.parametrize(
    ("contradiction", "message"),
    [
        ({"keys": "keys", "insecure": True}, "give --keys or --insecure, not both"),
        ({"hosts": (2, 2)}, "--hosts and --workers-per-host need --on ray"),
        ({"workers_per_host": 2}, "--hosts and --workers-per-host need --on ray"),
        ({"engine": "ray", "hosts": (2, 2)}, "--on ray needs --hosts N"),
        ({"engine": "ray", "hosts": (1, 4), "workers_per_host": 2, "workers": "auto"}, "would both follow the load"),
        ({"engine": "ray", "hosts": (2, 2), "workers_per_host": 2, "reload": True}, "--reload is for one host"),
    ],
)
def test_a_config_whose_options_contradict_each_other_cannot_be_made(
    contradiction: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DaemonConfig(feeds=FEEDS, **contradiction)


@pytest.mark.parametrize(
    ("wrong", "option"),
    [
        ({"hang_timeout": 0.0}, "--hang-timeout"),
        ({"worker_memory": (64 << 20) - 1}, "--worker-memory"),
        ({"file_cache_size": -1}, "--file-cache-size"),
        ({"workers": -1}, "--workers"),
        ({"memory": 0}, "--memory"),
    ],
)
def test_a_config_with_a_value_out_of_range_cannot_be_made(wrong: dict[str, Any], option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be "):
        DaemonConfig(feeds=FEEDS, **wrong)
    with pytest.raises(ValueError, match=f"^{option} must be "):
        JoinConfig(feeds=FEEDS, head=("head", 5555), **wrong)


def test_a_changed_config_is_checked_again_and_none_is_changed_in_place() -> None:
    config = DaemonConfig(feeds=FEEDS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.bind = "tcp://127.0.0.1:1"  # type: ignore[misc]
    with pytest.raises(StartError, match="can be reached from other hosts"):
        dataclasses.replace(config, bind="tcp://0.0.0.0:5555")
    with pytest.raises(StartError, match="cannot listen on nowhere"):
        DaemonConfig(feeds=FEEDS, bind="nowhere")
    assert dataclasses.replace(config, bind="tcp://0.0.0.0:5555", insecure=True).insecure
