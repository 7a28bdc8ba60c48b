"""The options of `penstock serve` for hosts that an engine places: --on ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from .option_groups import Group, option
from .parameters import HostBounds, WholeNumber

if TYPE_CHECKING:
    from ..daemon.config import DaemonConfig
    from ..on_ray.launch import RayDriver

_OPTIONS = (
    option(
        "--on",
        "engine",
        group=Group.HOSTS,
        type=click.Choice(["ray"]),
        default=None,
        show_default="none",
        help="Let Ray place, start and restart hosts that join (penstock join), on the cluster of RAY_ADDRESS or this "
        "machine.",
    ),
    option(
        "--hosts",
        group=Group.HOSTS,
        type=HostBounds(),
        default=None,
        metavar="N|MIN:MAX",
        help="With --on: number of hosts, each on a machine of its own; MIN:MAX: as many as trainers need, measured "
        "while they read.",
    ),
    option(
        "--workers-per-host",
        group=Group.HOSTS,
        type=WholeNumber(1, 4096),
        default=None,
        metavar="N",
        help="With --on: worker processes of each of these hosts, which reserve as many CPUs.",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, whose config goes to `hosts`."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


DEFAULTS_WITH_ENGINE: dict[str, Any] = {"workers": 0, "bind": "tcp://0.0.0.0:5555"}
"""The defaults with --on, where they differ from those of `DaemonConfig`."""


def hosts(config: DaemonConfig) -> contextlib.AbstractContextManager[RayDriver | None]:
    """Run the hosts that the options ask for, inside the `with` statement. The value is their driver, or None if there
    are none.

    Raises:
        StartError: the hosts cannot be started.
    """
    if config.engine is None:
        return contextlib.nullcontext()
    from ..on_ray.launch import hosts_on_ray

    return hosts_on_ray(config)
