"""`penstock wait`: waits until a daemon's feeds can be read."""

from __future__ import annotations

import sys

import click

from penstock_proto.security.keys import any_keys

from .parameters import Number, client_keys_option

NOT_READY, NOBODY = 3, 4
"""Exit codes when the time is over: the daemon is not ready, or no daemon answers."""


@click.command()
@click.argument("url")
@client_keys_option
@click.option(
    "--timeout",
    type=Number(0),
    default=None,
    metavar="SECONDS",
    show_default="as long as the daemon makes progress, and 30 s without any",
    help="Give up after this time; 0 looks once.",
)
def wait(url: str, keys: str | None, timeout: float | None) -> None:
    """Wait until a daemon's feeds can be read, and print their URLs.

    URL is a daemon's or a feed's address. With a feed's, the other feeds need not be ready. Trainers wait on their own;
    this is for scripts and health checks.

    \b
    Exit codes:
      0  the feeds can be read
      1  they never will: the daemon failed and says why, has no such feed, refuses the key, or is something else
      3  the time is over, and the daemon is still not ready
      4  the time is over, and no daemon answers

    \b
    Examples:
      penstock wait tcp://127.0.0.1:5555
      penstock wait tcp://loader:5555/train --timeout 600 && python train.py
      penstock wait tcp://127.0.0.1:5555 --timeout 0
    """  # noqa: D301
    from penstock_proto import Unreachable
    from penstock_proto.status.readiness import NO_PROGRESS, Patience

    from ..to_daemon import control
    from .terminal import Line

    patience = Patience(NO_PROGRESS, lambda: None) if timeout is None else Patience(timeout)
    line = Line()
    say_at = 2.0

    def tell(phase: str) -> None:
        nonlocal say_at
        text = f"waiting for {url}: {phase}"
        if line.drawn:
            line.show(text)
        elif patience.lasted >= say_at:
            say_at = patience.lasted + min(60.0, patience.lasted)
            click.echo(text, err=True)

    try:
        state = control.wait(url, patience, any_keys(keys), tell)
    except Unreachable as error:
        if patience.left:
            raise
        click.echo(f"penstock: {error}", err=True)
        sys.exit(NOBODY if patience.state is None else NOT_READY)
    finally:
        line.show("")
    for feed in state.feeds:
        click.echo(f"ready {feed.url}")
