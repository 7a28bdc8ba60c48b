"""`penstock scale`: changes the number of workers of a daemon that runs, or of a host that has joined it."""

from __future__ import annotations

import click

from penstock_proto.keys import client_keys

from .parameters import client_keys_option


@click.command()
@click.argument("url")
@click.argument("workers", metavar="N", type=click.IntRange(1, 4096))
@click.option(
    "--host",
    default=None,
    metavar="NAME",
    show_default="the daemon's own workers",
    help="Change the workers of the host of this name, which has joined (penstock join).",
)
@click.option("--now", is_flag=True, help="Stop surplus workers at once; the others redo their work.")
@client_keys_option
@click.option("--timeout", default=5.0, metavar="SECONDS", show_default=True, help="Time to wait for an answer.")
def scale(url: str, workers: int, host: str | None, now: bool, keys: str | None, timeout: float) -> None:
    """Change the number of workers of a daemon on this host to N.

    URL is a daemon's or a feed's address. Trainers keep reading the same data. Surplus workers stop as soon as they
    have handed over their lanes. With --host, N is the number of workers of a host that has joined.

    \b
    Examples:
      penstock scale tcp://127.0.0.1:5555 16
      penstock scale tcp://127.0.0.1:5555 --host second 32
      kill -TTIN PID     # add a worker; -TTOU removes one
    """  # noqa: D301
    from . import control

    if host == "":
        raise click.UsageError("--host needs the name of a host: `penstock status URL` shows them")
    scaled = control.scale(url, workers, now=now, timeout=timeout, keys=client_keys(keys), host=host or "")
    click.echo(f"{'workers' if host is None else f'workers of host {host}'}: {scaled.before} -> {scaled.after}")
