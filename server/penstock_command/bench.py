"""`penstock bench`: measures the speed of a feed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock_proto.security.keys import client_keys
from penstock_server.cli.command_group import complete_files
from penstock_server.cli.option_groups import Group, GroupedCommand, option
from penstock_server.cli.param_options import given, param_options
from penstock_server.cli.parameters import Number, WholeNumber, client_keys_option

from .options import workers_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_proto.security.keys import ClientKeys
    from penstock_proto.status.figures import Figures
    from penstock_server.profiling.profile import Profile


@click.command(cls=GroupedCommand)
@click.argument("feed", metavar="URL|MODULE:ATTR", shell_complete=complete_files)
@workers_option
@option(
    "--seconds",
    group=Group.MEASUREMENT,
    type=Number(0, min_open=True),
    default=10.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to measure.",
)
@option(
    "--batches",
    group=Group.MEASUREMENT,
    type=WholeNumber(1),
    default=None,
    metavar="N",
    help="Stop after N batches, if that is sooner.",
)
@option(
    "--warmup",
    group=Group.MEASUREMENT,
    type=Number(0),
    default=2.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to read after the first batch before measuring.",
)
@option(
    "--step",
    group=Group.MEASUREMENT,
    type=Number(0),
    default=0.0,
    metavar="SECONDS",
    show_default=True,
    help="Time that your training step takes.",
)
@option(
    "--cached",
    group=Group.MEASUREMENT,
    type=WholeNumber(1),
    default=None,
    metavar="N",
    help="Then read N batches from memory again and again, as from an infinitely fast loader.",
)
@option("--tensorflow", group=Group.MEASUREMENT, is_flag=True, help="Read with a tf.data.Dataset, not with NumPy.")
@option(
    "--transport",
    group=Group.MEASUREMENT,
    type=click.Choice(["auto", "local", "tcp"]),
    default="auto",
    show_default=True,
    help="How to read batches: local (shared memory), tcp (the network), or auto (local if that works).",
)
@client_keys_option
@param_options
@option(
    "--report",
    group=Group.MEASUREMENT,
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="PAGE.html",
    help="Write a page with all of this and a flame graph of the workers, sampled afterwards for up to 10 s.",
)
@option("--json", "as_json", group=Group.MEASUREMENT, is_flag=True, help="Print JSON.")
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
    param: tuple[tuple[str, str], ...],
    params_file: str | None,
) -> None:
    """Read a feed for a while, then report its speed, where the time went, and what to do about it.

    Give the URL of a running daemon's feed, to read it as one more consumer. Or give MODULE:ATTR, to start a private
    daemon that ends with this command.

    \b
    Examples:
      penstock bench scenes.py:feed --workers 8
      penstock bench tcp://loader:5555/train --step 0.120
      penstock bench scenes.py:feed --tensorflow --cached 50
      penstock bench scenes.py:feed --report bench.html
    """  # noqa: D301 (click wants a real \b)
    from penstock.commands.bench import measure
    from penstock.commands.bench_report import lines
    from penstock.commands.bench_verdict import judged
    from penstock_server.cli.terminal import bar
    from penstock_server.targets.world import as_served
    from penstock_server.to_daemon import control

    if tensorflow and importlib.util.find_spec("tensorflow") is None:
        raise click.UsageError("--tensorflow needs TensorFlow, which is not installed")
    if report is not None and report.suffix.lower() != ".html":
        raise click.UsageError(f"--report writes a page: its name must end in .html, got {str(report)!r}")
    own = client_keys(keys) if "://" in feed else None  # a private daemon uses no keys
    profiler = _Profiler(min(seconds, 10.0), own)
    if "://" not in feed:
        as_served(feed)
    with bar() as tell:
        seen = measure(
            feed,
            status=lambda url: control.status(url, 5.0, own),
            workers=workers,
            keys=keys,
            params=given(param, params_file),
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
        profile: the sampled profile, or None.
        why_not: why there is no profile, or an empty text.
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
    from penstock.commands.bench_report import parts, rows
    from penstock.commands.bench_verdict import judged
    from penstock_proto.status.figures import number
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
