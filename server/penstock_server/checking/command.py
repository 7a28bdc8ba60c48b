"""The command `penstock check`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from ..command_group import complete_files
from ..file_options import file_options, targets_of
from ..parameters import Bytes, Variable
from ..terminal import bar


@click.command()
@click.argument("feed", metavar="MODULE:ATTR|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to read the feed; a second run reads the same samples.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    default=lambda: len(os.sched_getaffinity(0)),
    metavar="N",
    show_default="the number of CPUs",
    help="Worker processes for which memory and speed are estimated. None is started.",
)
@click.option(
    "--memory",
    "allowed",
    type=Bytes(),
    default=None,
    metavar="SIZE",
    show_default="a quarter of what is free, at most 8G",
    help="Memory that the daemon will have, such as 4G: too little is an error.",
)
@click.option(
    "--hang-timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="End the check if an import or a sample takes longer, and report the line.",
)
@click.option(
    "--env",
    "environment",
    type=Variable(),
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set an environment variable, as --env of penstock serve does.",
)
@click.option("--pdb", "debugs", is_flag=True, help="Start pdb in your code where a sample or an import fails.")
@click.option("--strict", is_flag=True, help="Exit with code 1 for warnings too.")
@click.option("--json", "prints_json", is_flag=True, help="Print JSON.")
@file_options
def check(
    feed: tuple[str, ...],
    seconds: float,
    workers: int,
    allowed: int | None,
    hang_timeout: float,
    environment: tuple[tuple[str, str | None], ...],
    debugs: bool,
    strict: bool,
    prints_json: bool,
    **of_files: Any,
) -> None:
    """Look for mistakes in a feed, without a daemon.

    Reads the feed for some seconds as a worker does, then reads the same samples again in another process, in another
    order. Reports the spec, memory, useful numbers of workers, speed, imports and open files, and what is wrong, with
    the fix. If the two runs differ, experiments show what the samples depend on.

    The exit code is 0 if there is no error, otherwise 1.

    \b
    Examples:
      penstock check scenes.py:feed
      penstock check scenes.py:feed --seconds 30 --strict
      penstock check scenes.py:feed --pdb
      penstock check digits.h5 --leaf image=images --leaf label=labels --batch-size 32
    """  # noqa: D301 (click wants a real \b)
    from ..host.memory_limits import default_memory
    from .collecting import Options, collect
    from .findings import failed
    from .judging import judged
    from .report import Report, as_json, lines
    from .sizes import memory

    targets = targets_of(feed, of_files)
    if len(targets) > 1:
        raise click.UsageError("check one feed at a time")
    options = Options(targets[0], seconds, dict(environment), hang_timeout, debugs)
    with bar(shown=not debugs) as tell:
        facts = collect(options, tell)
    needed = None
    if facts.first.imported is not None and facts.first.looked is not None:
        plan, looked = facts.first.imported.plan, facts.first.looked
        needed = memory(plan, looked.spec, looked.sample_nbytes, looked.splits, workers, allowed or default_memory())
    findings = judged(facts, needed, workers)
    report = Report(targets[0], facts, needed, findings, workers, len(os.sched_getaffinity(0)))
    click.echo(json.dumps(as_json(report), indent=2) if prints_json else "\n".join(lines(report)))
    sys.exit(1 if failed(findings, strict=strict) else 0)
