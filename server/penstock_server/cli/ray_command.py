"""The options of `penstock serve` for hosts that an engine places: --on ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from .option_groups import Group, option
from .parameters import HostBounds

if TYPE_CHECKING:
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
        type=click.IntRange(1, 4096),
        default=None,
        metavar="N",
        help="With --on: worker processes of each of these hosts, which reserve as many CPUs.",
    ),
)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which passes their values to `hosts`."""
    for one in reversed(_OPTIONS):
        command = one(command)
    return command


@contextlib.contextmanager
def hosts(
    feeds: list[str],
    *,
    engine: str | None,
    hosts: tuple[int, int] | None,
    workers_per_host: int | None,
    workers: int | str,
    reload: bool,
    bind: str,
    keys: str | None,
    insecure: bool,
    hang_timeout: float | None,
    worker_memory: int | None,
    environment: tuple[tuple[str, str | None], ...],
) -> Iterator[RayDriver | None]:
    """Run the hosts that the options ask for, inside the `with` statement. Yield their driver, or None if there are
    none.

    Raises:
        click.UsageError: the options contradict each other.
        StartError: the hosts cannot be started.
    """
    if engine is None:
        if hosts is not None or workers_per_host is not None:
            raise click.UsageError("--hosts and --workers-per-host need --on ray")
        yield None
        return
    if hosts is None or workers_per_host is None:
        raise click.UsageError("--on ray needs --hosts N (or MIN:MAX) and --workers-per-host N")
    if hosts[0] < hosts[1] and workers == "auto":
        raise click.UsageError(
            "--workers auto and --hosts MIN:MAX would both follow the load: give a number for one of them"
        )
    if reload:
        raise click.UsageError("--reload is for one host: the hosts on Ray keep the code that they were started with")
    from ..daemon.access import Access
    from ..on_ray.launch import hosts_on_ray

    access = Access(bind, keys, insecure)

    options = [] if hang_timeout is None else [f"--hang-timeout={hang_timeout}"]
    options += [] if worker_memory is None else [f"--worker-memory={worker_memory}"]
    options += [f"--env={name}" if value is None else f"--env={name}={value}" for name, value in environment]
    with hosts_on_ray(
        feeds, hosts=hosts, workers=workers_per_host, bind=bind, keys=access.keys, options=options
    ) as driver:
        yield driver
