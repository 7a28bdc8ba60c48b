"""The command `penstock check`: of a feed, of this machine, or of a connection to a daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from penstock_proto.transport import urls

from ..machine import cpus
from .command_group import complete_files
from .file_options import file_options, targets_of
from .option_groups import Group, GroupedCommand, option
from .param_options import param_options, taken, with_given
from .parameters import Number, Variable, WholeNumber, client_keys_option, memory_option
from .terminal import bar

if TYPE_CHECKING:
    from ..checking.findings.connection import ReadFeed
    from ..checking.findings.findings import Finding


@click.command(cls=GroupedCommand)
@click.argument("feed", metavar="[MODULE:ATTR|FILE...|URL]", nargs=-1, shell_complete=complete_files)
@option(
    "--seconds",
    group=Group.CHECK,
    type=Number(0, min_open=True),
    default=5.0,
    metavar="SECONDS",
    show_default=True,
    help="Time to read the feed; a second run reads the same samples.",
)
@option(
    "--workers",
    group=Group.WORKERS,
    type=WholeNumber(1, 4096),
    default=cpus.usable,
    metavar="N",
    show_default="one for each CPU that it may use",
    help="Number of workers to estimate memory and speed for. None are started.",
)
@memory_option("Memory that the daemon will have, such as 4G: too little is an error.", "allowed")
@option(
    "--hang-timeout",
    group=Group.WORKERS,
    type=Number(0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="End the check if an import or a sample takes longer, and report the line.",
)
@option(
    "--env",
    "environment",
    group=Group.WORKERS,
    type=Variable(),
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set an environment variable, as --env of penstock serve does.",
)
@option(
    "--pdb", "debugs", group=Group.CHECK, is_flag=True, help="Start pdb in your code where a sample or an import fails."
)
@option("--strict", group=Group.CHECK, is_flag=True, help="Exit with code 1 for warnings too.")
@client_keys_option
@option("--json", "prints_json", group=Group.CHECK, is_flag=True, help="Print JSON.")
@file_options
@param_options
@click.pass_context
def check(
    context: click.Context,
    /,
    feed: tuple[str, ...],
    seconds: float,
    workers: int,
    allowed: int | None,
    hang_timeout: float,
    environment: tuple[tuple[str, str | None], ...],
    debugs: bool,
    strict: bool,
    keys: str | None,
    prints_json: bool,
    **of_files: Any,
) -> None:
    """Look for mistakes: in a feed, in this machine, or in a connection.

    With MODULE:ATTR or data files: reads the feed for some seconds as a worker does, then reads the same samples again
    in another process, in another order. Reports the spec, memory, useful numbers of workers, speed, imports and open
    files, and each mistake with its fix. If the two runs differ, experiments show what the samples depend on. This
    needs no daemon.

    Without an argument: looks at this machine: CPUs, memory, limits, the kernel, versions, TensorFlow.

    With the URL of a daemon or a feed: looks at the connection: whether the daemon can be reached, which transport is
    used and why, the round trip, and the batches that come within a second (or --seconds).

    The exit code is 0 if there is no error, otherwise 1.

    \b
    Examples:
      penstock check scenes.py:feed
      penstock check scenes.py:feed --seconds 30 --strict
      penstock check scenes.py:feed --pdb
      penstock check digits.h5 --leaf image=images --leaf label=labels --batch-size 32
      penstock check
      penstock check tcp://loader:5555/train
    """  # noqa: D301 (click wants a real \b)
    if not feed:
        _refuse_options(context, "without a feed", "strict", "prints_json")
        _check_machine(strict=strict, prints_json=prints_json)
    if urls.is_address_alone(feed[0]):
        address = urls.shown(feed[0])
        raise click.UsageError(f"{address!r} looks like an address: write tcp://{address}")
    if feed[0].startswith("tcp://"):
        if len(feed) > 1:
            raise click.UsageError("check one connection at a time")
        _refuse_options(context, "with a URL", "strict", "prints_json", "seconds", "keys")
        given = context.get_parameter_source("seconds") is not ParameterSource.DEFAULT
        _check_connection(feed[0], seconds if given else 1.0, context.obj, keys, strict=strict, prints_json=prints_json)
    if keys is not None and context.get_parameter_source("keys") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--keys means nothing without the URL of a daemon")

    from ..checking.findings.findings import failed
    from ..checking.judging.collecting import Options, collect
    from ..checking.judging.judging import judged
    from ..checking.judging.report import Report, as_json, lines
    from ..checking.judging.sizes import memory
    from ..machine.memory_limits import default_memory

    of_factory = taken(of_files)
    targets = with_given(targets_of(feed, of_files), of_factory)
    if len(targets) > 1:
        raise click.UsageError("check one feed at a time")
    options = Options(targets[0], seconds, dict(environment), hang_timeout, debugs)
    with _sigterm_like_ctrl_c(), bar(shown=not debugs) as tell:
        facts = collect(options, tell)
    needed = None
    if facts.first.imported is not None and facts.first.looked is not None:
        plan, looked = facts.first.imported.plan, facts.first.looked
        needed = memory(plan, looked.spec, looked.sample_nbytes, looked.splits, workers, allowed or default_memory())
    findings = judged(facts, needed, workers)
    report = Report(targets[0], facts, needed, findings, workers, cpus.usable())
    click.echo(json.dumps(as_json(report), indent=2) if prints_json else "\n".join(lines(report)))
    sys.exit(1 if failed(findings, strict=strict) else 0)


@contextlib.contextmanager
def _sigterm_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, so that the check ends its processes and removes its folder."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refuse_options(context: click.Context, where: str, *allowed: str) -> None:
    """Raise UsageError for an option on the command line that is not in `allowed`. `where` names the kind of check."""
    for given in context.command.params:
        source = context.get_parameter_source(given.name or "")
        if isinstance(given, click.Option) and given.name not in allowed and source is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{given.opts[0]} means nothing {where}")


def _check_machine(*, strict: bool, prints_json: bool) -> NoReturn:
    from ..checking.findings import machine_findings
    from ..checking.findings.machine import look
    from ..checking.judging.report import shown

    with bar() as tell:
        tell("looking at this machine", 0.1)
        seen = look()
    findings = machine_findings.judged(seen)
    if prints_json:
        _finish(json.dumps(_with(dataclasses.asdict(seen), findings), indent=2), findings, strict=strict)
    _finish("\n".join(shown(machine_findings.rows(seen), findings)), findings, strict=strict)


def _check_connection(
    url: str, seconds: float, read: ReadFeed | None, keys: str | None, *, strict: bool, prints_json: bool
) -> NoReturn:
    from ..checking.findings import connection_findings
    from ..checking.findings.connection import attempt
    from ..checking.judging.report import shown

    with bar() as tell:
        seen = attempt(url, seconds, read, tell, keys)
    findings = connection_findings.judged(seen)
    if prints_json:
        _finish(json.dumps(_with(connection_findings.as_json(seen), findings), indent=2), findings, strict=strict)
    _finish("\n".join(shown(connection_findings.rows(seen), findings)), findings, strict=strict)


def _with(facts: dict[str, Any], findings: list[Finding]) -> dict[str, Any]:
    return {**facts, "findings": [dataclasses.asdict(finding) for finding in findings]}


def _finish(text: str, findings: list[Finding], *, strict: bool) -> NoReturn:
    """Print the report, and exit with the code that the findings call for."""
    from ..checking.findings.findings import failed

    click.echo(text)
    sys.exit(1 if failed(findings, strict=strict) else 0)
