"""The console command `penstock`: the server's commands, and `bench`, `top` and `peek`, which use the client too.

The only module that imports both the server and the client.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_server.cli import main

# isort: split
import click  # after the server's command line, which says what to install if click is missing

if TYPE_CHECKING:
    from penstock_server.peeking.show import SeenFeed

__all__ = ["main"]


@main.command()
@click.argument("feed", metavar="URL|MODULE:ATTR")
@click.option("--workers", type=click.IntRange(1, 4096), default=None, help="Worker processes of a private daemon.")
@click.option(
    "--seconds", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, help="Seconds to measure."
)
@click.option(
    "--batches", type=click.IntRange(1), default=None, help="Stop after this many batches, if that is sooner."
)
@click.option(
    "--warmup",
    type=click.FloatRange(0),
    default=2.0,
    show_default=True,
    help="Seconds to read after the first batch before measuring.",
)
@click.option(
    "--step", type=click.FloatRange(0), default=0.0, show_default=True, help="Seconds that your training step takes."
)
@click.option(
    "--cached",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Afterwards read N batches from memory again and again, as from an infinitely fast loader.",
)
@click.option("--tensorflow", is_flag=True, help="Read with a tf.data.Dataset, not with NumPy.")
@click.option("--transport", type=click.Choice(["auto", "local", "tcp"]), default="auto", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def bench(
    feed: str,
    workers: int | None,
    seconds: float,
    batches: int | None,
    warmup: float,
    step: float,
    cached: int | None,
    tensorflow: bool,
    transport: str,
    as_json: bool,
) -> None:
    """Read a feed for a while, then report its speed, where the time went, and what to do about it.

    Give the URL of a running daemon's feed, which serves this command as one more consumer, or MODULE:ATTR to start a
    private daemon that ends with this command.

    \b
    Examples:
      penstock bench scenes.py:feed --workers 8
      penstock bench tcp://loader:5555/train --step 0.120
      penstock bench scenes.py:feed --tensorflow --cached 50
    """  # noqa: D301 (click wants a real \b)
    from penstock._bench import measure
    from penstock._bench_report import lines
    from penstock._bench_verdict import judged
    from penstock_server import control

    if tensorflow and importlib.util.find_spec("tensorflow") is None:
        raise click.UsageError("--tensorflow needs TensorFlow, which is not installed")
    seen = measure(
        feed,
        status=lambda url: dict(json.loads(control.status(url, 5.0))),
        workers=workers,
        transport=transport,
        seconds=seconds,
        batches=batches,
        warmup=warmup,
        step=step,
        cached=cached or 0,
        tensorflow=tensorflow,
    )
    if as_json:
        found = judged(seen)
        said = {"limit": found.limit, "sure": found.sure, "shares": found.shares, "verdict": found.text}
        click.echo(json.dumps({**dataclasses.asdict(seen), **said}, indent=2))
    else:
        click.echo("\n".join(lines(seen)))


@main.command()
@click.argument("url")
@click.option("--once", is_flag=True, help="Look twice, print the screen once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Likewise, but print JSON.")
@click.option(
    "--every",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Seconds between two looks.",
)
def top(url: str, once: bool, as_json: bool, every: float) -> None:
    """Show what a daemon does now: feeds, workers, consumers, and what limits each consumer.

    URL is a daemon's or a feed's address. The figures are averages of the last ten seconds.

    \b
    Examples:
      penstock top tcp://loader:5555
      penstock top tcp://loader:5555 --once
    """  # noqa: D301
    from penstock._top_screen import as_json as figures
    from penstock._top_screen import show, watch
    from penstock_server import control

    def status() -> dict[str, object]:
        return dict(json.loads(control.status(url, 5.0)))

    if once or as_json:
        looks = watch(status, every)
        click.echo(json.dumps(figures(looks), indent=2)) if as_json else show(looks)
    else:
        watch(status, every, live=True)


@main.command()
@click.argument("what", metavar="URL|MODULE:ATTR|FILE...", nargs=-1, required=True)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=None,
    show_default="256, or those that come within 3 s",
    help="Number of samples to read.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="SHEET.png",
    help="Write a contact sheet of the leaves that are images.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def peek(what: tuple[str, ...], samples: int | None, out: Path | None, as_json: bool) -> None:
    """Show what a feed or data files hold: leaves, shapes, ranges, lengths, some values.

    Of data files (HDF5, NumPy, TFRecord, Parquet, tar; a path, a pattern or a URL) it also shows how they are stored,
    and the command and the module that would serve them. Of several files it reads the first.

    MODULE:ATTR runs in this process, as with workers=0. The URL of a daemon's feed is read with a stream of its own
    from epoch 0 on, so no other consumer misses a batch.

    \b
    Examples:
      penstock peek digits.h5 --out sheet.png
      penstock peek train.tfrecord
      penstock peek scenes.py:feed
      penstock peek tcp://loader:5555/train --samples 1000
    """  # noqa: D301
    from penstock_server.peeking import data_files, show

    if out is not None and out.suffix.lower() != ".png":
        raise click.UsageError(f"--out writes a PNG file: its name must end in .png, got {str(out)!r}")
    most, seconds = (256, 3.0) if samples is None else (samples, float("inf"))
    if all(data_files.is_data_file(name) for name in what):
        seen: show.Seen = show.SeenFiles(data_files.peek_files(what, most, seconds))
    elif len(what) > 1:
        raise click.UsageError("give one feed, or data files of one format")
    else:
        seen = _read_feed(what[0], most, seconds)
    show.show(seen, out, as_json=as_json)


def _read_feed(feed: str, most: int, seconds: float) -> SeenFeed:
    """Read samples of one feed, with a stream that belongs to nobody else."""
    import penstock
    from penstock._samples import samples
    from penstock_server import control
    from penstock_server.peeking import data_files, show
    from penstock_server.peeking.sampling import limited
    from penstock_server.peeking.summary import Summary

    running = data_files.is_url_of_feed(feed)
    if running:
        control.status(feed, 5.0)  # says at once if nobody listens there
    summary, error = Summary(), ""
    with penstock.connect(feed, workers=None if running else 0, reconnect=0) as connection:
        began = time.monotonic()
        try:
            for sample in limited(samples(connection), most, seconds):
                summary.add(sample)
        except penstock.PenstockError as failed:
            if not summary.samples:
                raise
            error = str(failed)
        return show.SeenFeed(feed, connection.info, summary, time.monotonic() - began, error)


if __name__ == "__main__":
    main(prog_name="penstock")
