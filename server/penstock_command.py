"""The console command `penstock`: the server's commands, and those that use the client as well.

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

from penstock_proto.keys import client_keys
from penstock_server.command_group import complete_files
from penstock_server.parameters import client_keys_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_proto.figures import Figures
    from penstock_proto.keys import ClientKeys
    from penstock_server.checking.connection import Read
    from penstock_server.peeking.show import SeenFeed
    from penstock_server.profiling.profile import Profile

__all__ = ["main"]

_workers_option = click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    default=None,
    metavar="N",
    show_default="the number of CPUs",
    help="Worker processes of a private daemon.",
)


@main.command()
@click.argument("feed", metavar="URL|MODULE:ATTR", shell_complete=complete_files)
@_workers_option
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to measure.",
)
@click.option(
    "--batches",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Stop after this many batches, if that is sooner.",
)
@click.option(
    "--warmup",
    type=click.FloatRange(0),
    default=2.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to read after the first batch before measuring.",
)
@click.option(
    "--step",
    type=click.FloatRange(0),
    default=0.0,
    metavar="SECONDS",
    show_default=True,
    help="Time that your training step takes.",
)
@click.option(
    "--cached",
    type=click.IntRange(1),
    default=None,
    metavar="N",
    help="Afterwards read N batches from memory again and again, as from an infinitely fast loader.",
)
@click.option("--tensorflow", is_flag=True, help="Read with a tf.data.Dataset, not with NumPy.")
@click.option(
    "--transport",
    type=click.Choice(["auto", "local", "tcp"]),
    default="auto",
    show_default=True,
    help="How batches come: local by shared memory, tcp over the network, auto by the better one that works.",
)
@client_keys_option
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="PAGE.html",
    help="Write a page with all of this and a flame graph of the workers, sampled afterwards for up to 10 s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
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
    report: Path | None,
    keys: str | None,
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
      penstock bench scenes.py:feed --report bench.html
    """  # noqa: D301 (click wants a real \b)
    from penstock._bench import measure
    from penstock._bench_report import lines
    from penstock._bench_verdict import judged
    from penstock_server import control
    from penstock_server.terminal import bar

    if tensorflow and importlib.util.find_spec("tensorflow") is None:
        raise click.UsageError("--tensorflow needs TensorFlow, which is not installed")
    if report is not None and report.suffix.lower() != ".html":
        raise click.UsageError(f"--report writes a page: its name must end in .html, got {str(report)!r}")
    own = client_keys(keys) if "://" in feed else None  # a private daemon has none
    profiler = _Profiler(min(seconds, 10.0), own)
    with bar() as tell:
        seen = measure(
            feed,
            status=lambda url: dict(json.loads(control.status(url, 5.0, own))),
            workers=workers,
            keys=keys,
            transport=transport,
            seconds=seconds,
            batches=batches,
            warmup=warmup,
            step=step,
            cached=cached or 0,
            tensorflow=tensorflow,
            afterwards=None if report is None else profiler.sample,
            tell=tell,
        )
    if report is not None:
        _write_report(report, feed, seen, profiler)
    if as_json:
        found = judged(seen)
        said = {"limit": found.limit, "sure": found.sure, "shares": found.shares, "verdict": found.text}
        click.echo(json.dumps({**dataclasses.asdict(seen), **said}, indent=2))
    else:
        click.echo("\n".join(lines(seen)))
        if report is not None:
            click.echo(f"\nwritten: {report}")


class _Profiler:
    """Profiles the workers for `bench --report`, if the daemon allows it.

    Attributes:
        profile: what was sampled, or None.
        why_not: why it is None.
    """

    def __init__(self, seconds: float, keys: ClientKeys | None) -> None:
        self.profile: Profile | None = None
        self.why_not = ""
        self._seconds = seconds
        self._keys = keys

    def sample(self, url: str, goes_on: Callable[[], bool]) -> None:
        """Sample the stacks of the workers of the daemon at this URL."""
        from penstock_proto import PenstockError
        from penstock_server.profiling.show import progress
        from penstock_server.profiling.watching import profile as sampled

        try:
            with progress() as tell:
                self.profile = sampled(url, self._seconds, tell=tell, may_go_on=goes_on, keys=self._keys)
        except PenstockError as error:
            self.why_not = error.message


def _write_report(path: Path, feed: str, seen: Figures, profiler: _Profiler) -> None:
    from penstock._bench_report import parts, rows
    from penstock._bench_verdict import judged
    from penstock_proto.figures import number
    from penstock_server.profiling.bench_page import Measured, bench_page
    from penstock_server.profiling.show import write

    measured = Measured(
        target=feed,
        when=time.strftime("%Y-%m-%d %H:%M"),
        headline=f"{number(seen.rate)} batches/s",
        verdict=judged(seen).text,
        rows=dict(rows(seen)),
        parts=list(parts(seen)),
        rates=[part.rate for part in seen.slices],
    )
    write(path, bench_page(measured, profiler.profile, profiler.why_not))


@main.command()
@click.argument("feed", metavar="URL|MODULE:ATTR", shell_complete=complete_files)
@_workers_option
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600, min_open=True),
    default=10.0,
    metavar="SECONDS",
    show_default=True,
    help="How long to look.",
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

    Samples the stacks of all workers 100 times a second. No right to trace processes is needed, and workers that nobody
    profiles pay nothing.

    Give the URL of a daemon that you run on this host, to look at its workers while trainers read. Or give MODULE:ATTR
    to start a private daemon, which this command reads as fast as it can. Ctrl-C ends the profile early.

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
        from penstock._reading import Reading, epochs

        with penstock.connect(feed, workers=workers, reconnect=0) as connection:
            url = connection._handle.handoff.url
            with progress() as tell, Reading(connection, epochs(connection)) as reading:
                seen = sampled(url, seconds, tell=tell, may_go_on=reading.goes_on)
            error = reading.error
    show(seen, feed, out, reads=not running, prints_json=as_json)
    if error is not None:
        raise error


@main.command()
@click.argument("url")
@click.option("--once", is_flag=True, help="Look twice, print the screen once, and end.")
@click.option("--json", "as_json", is_flag=True, help="Likewise, but print JSON.")
@client_keys_option
@click.option(
    "--every",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
def top(url: str, once: bool, as_json: bool, keys: str | None, every: float) -> None:
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

    own = client_keys(keys)

    def status() -> dict[str, object]:
        return dict(json.loads(control.status(url, 5.0, own)))

    if once or as_json:
        looks = watch(status, every)
        click.echo(json.dumps(figures(looks), indent=2)) if as_json else show(looks)
    else:
        watch(status, every, live=True)


@main.command()
@click.argument("what", metavar="URL|MODULE:ATTR|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=None,
    metavar="N",
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
@client_keys_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def peek(what: tuple[str, ...], samples: int | None, out: Path | None, keys: str | None, as_json: bool) -> None:
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
        seen = _read_feed(what[0], most, seconds, keys)
    show.show(seen, out, as_json=as_json)


def _read_feed(feed: str, most: int, seconds: float, keys: str | None) -> SeenFeed:
    """Read samples of one feed, with a stream that belongs to nobody else."""
    import penstock
    from penstock._samples import samples
    from penstock_server import control
    from penstock_server.peeking import data_files, show
    from penstock_server.peeking.sampling import limited
    from penstock_server.peeking.summary import Summary

    running = data_files.is_url_of_feed(feed)
    if running:
        control.status(feed, 5.0, client_keys(keys))  # says at once if nobody listens there
    summary, error = Summary(), ""
    with penstock.connect(feed, workers=None if running else 0, reconnect=0, keys=keys) as connection:
        began = time.monotonic()
        try:
            for sample in limited(samples(connection), most, seconds):
                summary.add(sample)
        except penstock.PenstockError as failed:
            if not summary.samples:
                raise
            error = str(failed)
        return show.SeenFeed(feed, connection.info, summary, time.monotonic() - began, error)


def _read_for_check(url: str, seconds: float, keys: str | None) -> Read:
    """Read a feed for some seconds from its first batch on, which may take 10 s, as a trainer does."""
    import penstock
    from penstock._reading import Reading, epochs
    from penstock_server import control
    from penstock_server.checking.connection import Read

    with penstock.connect(url, reconnect=0, timeout=10, keys=keys) as connection:
        with Reading(connection, epochs(connection)) as reading:
            deadline = time.monotonic() + 10
            while not connection.stats()["batches"] and reading.goes_on() and time.monotonic() < deadline:
                time.sleep(0.01)
            began, before = time.monotonic(), connection.stats()
            while reading.goes_on() and time.monotonic() < began + seconds:
                time.sleep(0.05)
            after, took = connection.stats(), time.monotonic() - began
            state = json.loads(control.status(url, 5.0, client_keys(keys)))
        if reading.error is not None:
            raise reading.error
    feed = url.rpartition("/")[2]
    return Read(
        transport=after["transport"],
        seconds=took,
        batches=after["batches"] - before["batches"],
        nbytes=after["bytes"] - before["bytes"],
        waiting=(after["wait_seconds"] - before["wait_seconds"]) / took,
        unsent=any(stream["unsent"] for stream in state["streams"] if stream["feed"] == feed),
    )


main.context_settings["obj"] = _read_for_check  # for `check URL`, which is the server's command

if __name__ == "__main__":
    main(prog_name="penstock")
