"""`penstock profile`: shows where workers spend their time."""

from __future__ import annotations

from pathlib import Path

import click

from penstock_proto.security.keys import client_keys
from penstock_server.cli.command_group import complete_files
from penstock_server.cli.parameters import Number, client_keys_option

from .options import workers_option


@click.command()
@click.argument("feed", metavar="URL|MODULE:ATTR", shell_complete=complete_files)
@workers_option
@click.option(
    "--seconds",
    type=Number(0, 3600, min_open=True),
    default=10.0,
    metavar="SECONDS",
    show_default=True,
    help="How long to sample.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Write a flame graph: a page (.html), or a file for speedscope.app (.json). May be given twice.",
)
@client_keys_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def profile(
    feed: str, workers: int | None, seconds: float, out: tuple[Path, ...], keys: str | None, as_json: bool
) -> None:
    """Show which lines of your code take the workers' time.

    Samples the stacks of all workers 100 times a second. This needs no permission to trace processes, and costs nothing
    while nobody profiles.

    Give the URL of a daemon that you run on this host, to profile its workers, and those of hosts that have joined it,
    while trainers read. Or give MODULE:ATTR to start a private daemon, which this command reads as fast as it can.
    Ctrl-C ends the profile early.

    \b
    Examples:
      penstock profile scenes.py:feed
      penstock profile scenes.py:feed --workers 8 --seconds 30 --out profile.html
      penstock profile tcp://127.0.0.1:5555 --out profile.html --out profile.json
    """  # noqa: D301
    from penstock_server.profiling.show import progress, show
    from penstock_server.profiling.watching import profile as sampled

    for path in out:
        if path.suffix.lower() not in (".html", ".json"):
            raise click.UsageError(f"--out writes a page (.html) or a speedscope file (.json), got {str(path)!r}")
    running = feed.startswith("tcp://")
    if running and workers is not None:
        raise click.UsageError("--workers is for MODULE:ATTR; `penstock scale` changes those of a running daemon")
    error = None
    if running:
        with progress() as tell:
            seen = sampled(feed, seconds, tell=tell, may_go_on=lambda: True, keys=client_keys(keys))
    else:
        import penstock
        from penstock.commands.reading import Reading, epochs

        with penstock.connect(feed, workers=workers, reconnect=0) as connection:
            url = connection._handle.handoff.url
            with progress() as tell, Reading(connection, epochs(connection)) as reading:
                seen = sampled(url, seconds, tell=tell, may_go_on=reading.goes_on)
            error = reading.error
    show(seen, feed, out, reads=not running, prints_json=as_json)
    if error is not None:
        raise error
