"""`penstock scale`: changes the number of workers, or of hosts, of a running daemon."""

from __future__ import annotations

import re

import click

from penstock_proto.security.keys import client_keys

from .parameters import WholeNumber, answer_timeout_option, client_keys_option


@click.command()
@click.argument("url")
@click.argument("workers", metavar="[N]", type=WholeNumber(1, 4096), required=False)
@click.option(
    "--host",
    default=None,
    metavar="NAME",
    show_default="the daemon's own workers",
    help="Change the workers of the host of this name, which has joined (penstock join).",
)
@click.option(
    "--hosts",
    type=WholeNumber(1, 4096),
    default=None,
    metavar="N",
    help="Change the number of hosts, if Ray runs them (penstock serve --on ray).",
)
@click.option("--now", is_flag=True, help="Stop surplus workers at once; the others redo their work.")
@client_keys_option
@answer_timeout_option
def scale(
    url: str, workers: int | None, host: str | None, hosts: int | None, now: bool, keys: str | None, timeout: float
) -> None:
    """Change the number of workers of a daemon on this host to N.

    URL is a daemon's or a feed's address. Trainers keep reading the same data. Surplus workers stop as soon as they
    have handed over their lanes. With --host, N is the number of workers of a host that has joined. With --hosts, the
    number of hosts that Ray runs is changed.

    \b
    Examples:
      penstock scale tcp://127.0.0.1:5555 16
      penstock scale tcp://127.0.0.1:5555 --host second 32
      penstock scale tcp://127.0.0.1:5555 --hosts 6
      kill -TTIN PID     # add a worker; -TTOU removes one
    """  # noqa: D301
    from ..to_daemon import control

    if hosts is not None:
        if host is not None or workers is not None or now:
            other = "N" if workers is not None else "--host" if host is not None else "--now"
            raise click.UsageError(f"--hosts is the number of hosts, and {other} is about workers: give one of them")
        scaled = control.scale_hosts(url, hosts, timeout=timeout, keys=client_keys(keys))
        click.echo(f"hosts: {scaled.before} -> {scaled.after}")
        return
    if workers is None:
        if re.fullmatch(r"[0-9]+|[a-z]+", url):
            raise click.UsageError(f"{url!r} is not a URL: give both, penstock scale tcp://127.0.0.1:5555 N")
        raise click.UsageError("give the number of workers, N, or --hosts N")
    if host == "":
        raise click.UsageError("--host needs the name of a host: `penstock status URL` shows them")
    scaled = control.scale(url, workers, now=now, timeout=timeout, keys=client_keys(keys), host=host or "")
    click.echo(f"{'workers' if host is None else f'workers of host {host}'}: {scaled.before} -> {scaled.after}")
