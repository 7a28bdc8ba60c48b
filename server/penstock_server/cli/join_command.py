"""`penstock join`: lets this host's workers work for a daemon on another host."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any
from urllib.parse import urlsplit

import click

from penstock_proto import PenstockError
from penstock_proto.security.keys import host_keys

from ..logs import log_format
from ..machine import cpus
from .command_group import complete_files
from .file_options import file_options, targets_of
from .option_groups import Group, GroupedCommand, option
from .parameters import (
    Bytes,
    Variable,
    allow_uid_option,
    hang_timeout_option,
    log_format_option,
    log_level_option,
    worker_memory_option,
)


@click.command(cls=GroupedCommand)
@click.argument("url")
@click.argument("feeds", metavar="MODULE:ATTR...|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@option(
    "--workers",
    group=Group.WORKERS,
    type=click.IntRange(1, 4096),
    default=cpus.usable,
    metavar="N",
    show_default="one for each CPU that it may use",
    help="Number of worker processes on this host, until the head asks for another number (penstock scale --host).",
)
@option(
    "--memory",
    group=Group.WORKERS,
    type=Bytes(),
    default=None,
    metavar="SIZE",
    show_default="a quarter of what is free, at most 8G",
    help="Most memory for batches that are built here and not sent yet, such as 4G.",
)
@option(
    "--host-name",
    group=Group.OPERATION,
    default=socket.gethostname,
    metavar="HOST",
    show_default="this host's name",
    help="Name of this host in the head's log and status.",
)
@option(
    "--keys",
    group=Group.SAFETY,
    type=click.Path(file_okay=False),
    default=None,
    metavar="DIR",
    show_default="PENSTOCK_KEYS, or none",
    help="A host's folder of keys, for a head with --keys; `penstock keygen DIR --host NAME` makes it.",
)
@option(
    "--grace",
    group=Group.OPERATION,
    type=click.FloatRange(0),
    default=25.0,
    metavar="SECONDS",
    show_default=True,
    help="After SIGTERM: time for other workers to take over the work of this host.",
)
@option(
    "--patience",
    group=Group.OPERATION,
    type=click.FloatRange(0),
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to wait for a head that does not answer, at the start or after it was lost.",
)
@option(
    "--fetch-port",
    group=Group.LISTENING,
    type=click.IntRange(0, 65535),
    default=0,
    metavar="PORT",
    show_default="any free port",
    help="Port at which trainers fetch batches from this host. Those that cannot reach it get them from the head.",
)
@allow_uid_option
@hang_timeout_option
@worker_memory_option
@option(
    "--env",
    "environment",
    group=Group.WORKERS,
    type=Variable(),
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set an environment variable in the workers, as for `penstock serve`.",
)
@log_level_option
@log_format_option
@file_options
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="End at the end of standard input.")
@click.option("--keys-from-stdin", is_flag=True, hidden=True, help="Read the files of --keys as a line of JSON.")
def join(
    url: str,
    feeds: tuple[str, ...],
    workers: int,
    memory: int | None,
    host_name: str,
    keys: str | None,
    grace: float,
    patience: float,
    fetch_port: int,
    allow_uids: tuple[int, ...],
    hang_timeout: float | None,
    worker_memory: int | None,
    environment: tuple[tuple[str, str | None], ...],
    log_level: str,
    form: str,
    until_stdin_closes: bool,
    keys_from_stdin: bool,
    **of_files: Any,
) -> None:
    """Let this host's workers work for a daemon on another host, the head.

    URL is the head's address. Give the feeds that the head serves, in the same order. Their code, their files and the
    versions of Python and NumPy must be the same here. Trainers read the same batches in the same order as without this
    host. The host may leave at any time (SIGTERM), and nothing is lost if it dies.

    \b
    Examples:
      penstock serve scenes.py:train --bind tcp://0.0.0.0:5555 --keys keys                  # at the head
      penstock join tcp://head:5555 scenes.py:train --workers 16 --keys keys/hosts/second   # on another host
    """  # noqa: D301
    from ..machine.numpy_threads import no_threads

    with no_threads():
        from ..join import sent_keys
        from ..join.agent import join as run
        from ..machine.memory_limits import default_memory
        from ..to_daemon.control import endpoint_of

    log_format.configure(log_level, form)
    parts = urlsplit(endpoint_of(url))
    assert parts.hostname is not None
    assert parts.port is not None
    try:
        run(
            targets_of(feeds, of_files),
            (parts.hostname, parts.port),
            workers=workers,
            memory=default_memory() if memory is None else memory,
            name=host_name[:128] or "host",
            keys=sent_keys.read() if keys_from_stdin else host_keys(keys),
            hang_timeout=hang_timeout,
            worker_memory=worker_memory,
            environment=dict(environment),
            grace=grace,
            patience=patience,
            fetch_port=fetch_port,
            allow_uids=allow_uids,
            until_stdin_closes=until_stdin_closes,
        )
    except PenstockError as error:
        if form == "json":
            logging.getLogger(__name__).critical("%s", error, extra={"event": "failed", "error": error})
            sys.exit(1)
        raise
