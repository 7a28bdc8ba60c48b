"""`penstock top`: shows what a daemon is doing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from penstock_proto.security.keys import client_keys
from penstock_server.cli.parameters import Number, client_keys_option

if TYPE_CHECKING:
    from penstock_proto.status.status_shape import Status


@click.command()
@click.argument("url")
@click.option("--once", is_flag=True, help="Print the screen once, after --every seconds, and end.")
@click.option("--json", "as_json", is_flag=True, help="Likewise, but print JSON.")
@client_keys_option
@click.option(
    "--every",
    type=Number(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two updates.",
)
def top(url: str, once: bool, as_json: bool, keys: str | None, every: float) -> None:
    """Show what a daemon is doing: its feeds, workers and consumers, and what limits each consumer.

    URL is a daemon's or a feed's address. The figures are averages over the last ten seconds. Where standard output is
    no terminal, --once is the default.

    \b
    Examples:
      penstock top tcp://loader:5555
      penstock top tcp://loader:5555 --once
    """  # noqa: D301
    from penstock.commands.top_screen import as_json as figures
    from penstock.commands.top_screen import show, watch
    from penstock_server.to_daemon import control

    own = client_keys(keys)

    def status() -> Status:
        return control.status(url, 5.0, own)

    if once or as_json or not sys.stdout.isatty():
        looks = watch(status, every)
        click.echo(json.dumps(figures(looks), indent=2)) if as_json else show(looks)
    else:
        watch(status, every, live=True)
