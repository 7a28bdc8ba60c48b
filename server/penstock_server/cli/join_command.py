"""`penstock join`: lets this host's workers work for a daemon on another host."""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

from penstock_proto import PenstockError
from penstock_proto.security.keys import host_keys
from penstock_proto.transport import urls

from ..join.config import JoinConfig
from ..logs import log_format
from .command_group import complete_files
from .file_options import file_options, targets_of
from .option_groups import Group, GroupedCommand, option
from .param_options import param_options, taken, with_given
from .parameters import (
    Number,
    WholeNumber,
    allow_uid_option,
    given_for,
    keys_option,
    log_format_option,
    log_level_option,
    memory_option,
    until_stdin_closes_option,
    worker_options,
)


@click.command(cls=GroupedCommand)
@click.argument("url")
@click.argument("feeds", metavar="MODULE:ATTR...|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@option(
    "--workers",
    group=Group.WORKERS,
    type=WholeNumber(1, 4096),
    default=None,
    metavar="N",
    show_default="one for each CPU that it may use",
    help="Number of worker processes on this host, until the head asks for another number (penstock scale --host).",
)
@memory_option("Most memory for batches that are built here and not sent yet, such as 4G.")
@option(
    "--host-name",
    group=Group.OPERATION,
    default=None,
    metavar="HOST",
    show_default="this host's name",
    help="Name of this host in the head's log and status.",
)
@keys_option("A host's folder of keys, for a head with --keys; `penstock keygen DIR --host NAME` makes it.")
@option(
    "--grace",
    group=Group.OPERATION,
    type=Number(0),
    default=JoinConfig.grace,
    metavar="SECONDS",
    show_default=True,
    help="After SIGTERM: time for other workers to take over the work of this host.",
)
@option(
    "--patience",
    group=Group.OPERATION,
    type=Number(0),
    default=JoinConfig.patience,
    metavar="SECONDS",
    show_default=True,
    help="Time to wait for a head that does not answer, at the start or after it was lost.",
)
@option(
    "--fetch-port",
    group=Group.LISTENING,
    type=WholeNumber(0, 65535),
    default=JoinConfig.fetch_port,
    metavar="PORT",
    show_default="any free port",
    help="Port at which trainers fetch batches from this host. Those that cannot reach it get them from the head.",
)
@allow_uid_option
@worker_options
@log_level_option
@log_format_option
@file_options
@param_options
@until_stdin_closes_option
@click.option("--keys-from-stdin", is_flag=True, hidden=True, help="Read the files of --keys as a line of JSON.")
def join(
    url: str, feeds: tuple[str, ...], keys: str | None, log_level: str, form: str, keys_from_stdin: bool, **options: Any
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

    log_format.configure(log_level, form)
    head = urls.parse(url)
    given = given_for(JoinConfig, options)
    of_factory = taken(options)
    try:
        run(
            JoinConfig(
                feeds=tuple(with_given(targets_of(feeds, options), of_factory)),
                head=(head.hostname, head.port),
                keys=sent_keys.read() if keys_from_stdin else host_keys(keys),
                **given,
            )
        )
    except PenstockError as error:
        if form == "json":
            logging.getLogger(__name__).critical("%s", error, extra={"event": "failed", "error": error})
            sys.exit(1)
        raise
