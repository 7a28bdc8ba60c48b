"""The command line: `penstock serve`, `check`, `status`, `wait`, `scale`, `stop`. (penstock_command/ has others.)"""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from penstock_proto import PenstockError, distribution
from penstock_proto.security.keys import any_keys, client_keys

try:
    import click
except ImportError:
    sys.exit(f"penstock: the command line needs the server's packages: {distribution.pip_install('server')}")

from ..logs import log_format
from .check_command import check
from .command_group import PenstockGroup, complete_files
from .file_options import file_options, targets_of
from .join_command import join
from .keygen import keygen
from .option_groups import Group, option
from .param_options import param_options, taken, with_given
from .parameters import (
    Advertised,
    HttpAddress,
    Number,
    Workers,
    allow_uid_option,
    answer_timeout_option,
    client_keys_option,
    given_for,
    keys_option,
    log_format_option,
    log_level_option,
    memory_option,
    until_stdin_closes_option,
    worker_options,
)
from .params_command import params
from .ray_command import DEFAULTS_WITH_ENGINE, engine_options
from .ray_command import hosts as engine_hosts
from .scale_command import scale
from .standard_streams import say
from .wait_command import wait

if TYPE_CHECKING:
    from penstock_proto.status.status_shape import Status

    from ..daemon.config import DaemonConfig


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"penstock, version {distribution.version()}")
        context.exit()


@click.group(cls=PenstockGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Keep TensorFlow trainers fed: run preprocessing generators in worker processes and serve their batches.

    Each option of each command can also be set by an environment variable: PENSTOCK_SERVE_WORKERS=8 is --workers 8 of
    `serve`.

    \b
    Examples:
      penstock serve scenes.py:feed --workers 8
      penstock status tcp://127.0.0.1:5555
      penstock serve --help
    """  # noqa: D301 (click wants a real \b)


@main.command()
@click.argument("feeds", metavar="MODULE:ATTR...|FILE...", nargs=-1, required=True, shell_complete=complete_files)
@option(
    "--workers",
    group=Group.WORKERS,
    type=Workers(),
    default=None,
    metavar="N|auto",
    show_default="one for each CPU that it may use; with --on 0",
    help="Number of worker processes; auto: as many as trainers need, measured while they read; 0 if only hosts that "
    "join (penstock join) are to make batches.",
)
@option(
    "--bind",
    group=Group.LISTENING,
    default=None,
    metavar="tcp://HOST:PORT",
    show_default="tcp://127.0.0.1:5555; with --on tcp://0.0.0.0:5555",
    help="Address to listen on; port 0 picks one.",
)
@keys_option("Admit only clients and hosts with keys, and encrypt; DIR is the one that `penstock keygen` made.", "none")
@option(
    "--insecure",
    group=Group.SAFETY,
    is_flag=True,
    help="Let other hosts connect without keys, when --bind is more than this host.",
)
@allow_uid_option
@option(
    "--advertise",
    group=Group.LISTENING,
    type=Advertised(),
    default=None,
    metavar="HOST[:PORT]",
    show_default="the address of --bind, or this host's name if that is 0.0.0.0",
    help="Host name by which trainers reach the daemon; it appears in the URLs that the daemon shows.",
)
@memory_option("Most memory for batches and shuffle blocks, such as 4G.")
@worker_options
@option(
    "--state",
    group=Group.OPERATION,
    type=click.Path(dir_okay=False),
    default=None,
    metavar="FILE",
    show_default="none",
    help="Keep the positions of groups in this file (SQLite); the next daemon with the same file continues them.",
)
@option(
    "--http",
    group=Group.LISTENING,
    type=HttpAddress(),
    default=None,
    metavar="[HOST:]PORT",
    show_default="none",
    help="Serve a live web page, metrics for Prometheus, health checks and the status here; port 0 picks one.",
)
@log_level_option
@option(
    "--reload",
    group=Group.DEVELOPMENT,
    is_flag=True,
    help="For development: when the code of the feeds changes, read the next epoch from the new code.",
)
@log_format_option
@engine_options
@file_options
@param_options
@until_stdin_closes_option
def serve(feeds: tuple[str, ...], log_level: str, form: str, **options: Any) -> None:
    """Serve feeds until SIGTERM or Ctrl-C.

    MODULE:ATTR names a Feed, or a function that returns one and whose parameters --param sets; MODULE is the name of a
    module or the path of a .py file. When a feed is ready, the daemon
    prints a line `ready tcp://HOST:PORT/NAME`.

    FILE is a data file (.h5, .hdf5, .h5ad, .npy, .npz, .parquet, .arrow, .feather, .tar, .tar.gz, .tar.bz2,
    .tar.xz, .tgz, .zarr, .zarr.zip, .csv, .tsv, .csv.gz, .tsv.gz, .jsonl, .ndjson, .jsonl.gz, .ndjson.gz, .mat,
    .lmdb, .mdb), a file of a format that an installed package has, a folder of images or of MDS shards, a quoted
    pattern or a URL. All files together are one feed, described by --leaf and --batch-size.

    \b
    Signals:
      SIGTERM, Ctrl-C   let the epochs that are being read finish, then stop; a second one stops at once
      SIGTTIN, SIGTTOU  add a worker, remove a worker
      SIGHUP            with --keys: read again which clients and hosts may connect

    \b
    Examples:
      penstock serve scenes:feed --workers 8
      penstock serve data/scenes.py:train data/scenes.py:val --bind tcp://0.0.0.0:5555 --keys keys
      penstock serve scenes:feed --workers auto --hang-timeout 60
      penstock serve scenes.py:make --param root=/data --param size=128
      penstock serve scenes:feed --state groups.sqlite
      penstock serve scenes.py:feed --on ray --hosts 4 --workers-per-host 16 --keys keys
      penstock serve scenes.py:feed --on ray --hosts 1:8 --workers-per-host 16 --keys keys
      penstock serve scenes.py:feed --reload
      penstock serve digits.h5 --leaf image=images --leaf label=labels --batch-size 32 --shuffle 1000
    """  # noqa: D301 (click wants a real \b)
    from ..machine.numpy_threads import no_threads

    with no_threads():
        from ..daemon import serving
        from ..daemon.config import DaemonConfig
        from ..targets import world
        from .progress import Progress
        from .service_manager import ServiceManager
        from .terminal import Line

    private = options["until_stdin_closes"]
    line = Line(private=private)
    handler = log_format.configure(log_level, form)
    if private:
        # The trainer says what the start waits for. An interactive session also shows what it raises.
        told = {"starting", "split_failed"} if log_level == "warning" else {"starting"}
        handler.addFilter(lambda record: record.__dict__.get("event") not in told)
    line.log_to(handler)
    given = given_for(DaemonConfig, options)
    of_factory = taken(options)
    targets = with_given(targets_of(feeds, options), of_factory)
    progress = Progress(line, ServiceManager(private=private))
    world.enter_path()

    def on_ready(url: str) -> None:
        line.show("")  # nothing is waited for any longer
        say(f"ready {url}")

    try:
        config = _config(targets, given)
        with engine_hosts(config) as placed:

            def each_second(daemon: Any) -> None:
                progress.look(daemon)
                if private and not daemon.ready:  # the trainer that started this daemon says so
                    say(f"starting {json.dumps(daemon.status().phase)}")
                if placed is not None:
                    placed.look(daemon)

            serving.serve(config, on_ready=on_ready, each_second=each_second, engine=placed)
    except PenstockError as error:
        if private:  # the trainer that started this daemon raises the error
            import msgspec

            from penstock_proto.messages import ErrorReport

            say(f"error {msgspec.json.encode(ErrorReport.of(error)).decode()}")
            sys.exit(1)
        if form == "json":
            logging.getLogger(__name__).critical("%s", error, extra={"event": "failed", "error": error})
            sys.exit(1)
        raise
    finally:
        line.show("")


def _config(targets: list[str], given: dict[str, Any]) -> DaemonConfig:
    """Return the config of a daemon that serves `targets`, with the options that were given.

    Raises:
        click.UsageError: options contradict each other.
        StartError: the daemon may not listen there.
    """
    from ..daemon.config import DaemonConfig

    defaults = DEFAULTS_WITH_ENGINE if "engine" in given else {}
    try:
        return DaemonConfig(feeds=tuple(targets), **defaults | given)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


main.add_command(check)
main.add_command(keygen)
main.add_command(join)
main.add_command(params)
main.add_command(scale)
main.add_command(wait)


@main.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@client_keys_option
@answer_timeout_option
def status(url: str, as_json: bool, keys: str | None, timeout: float) -> None:
    """Show a daemon's feeds, workers, memory and consumers.

    URL is a daemon's or a feed's address.

    \b
    Examples:
      penstock status tcp://127.0.0.1:5555
      penstock status tcp://loader:5555/train --json
    """  # noqa: D301
    import msgspec

    from ..to_daemon import control
    from .status_lines import status_lines

    state = control.status(url, timeout, any_keys(keys))
    click.echo(json.dumps(msgspec.to_builtins(state), indent=2) if as_json else "\n".join(status_lines(state)))


@main.command()
@click.argument("url")
@click.option(
    "--now",
    is_flag=True,
    help="Do not wait for epochs to finish. Their trainers wait up to 60 s for another daemon, and then get an error.",
)
@client_keys_option
@click.option(
    "--timeout",
    type=Number(0, min_open=True),
    default=None,
    metavar="SECONDS",
    show_default="no limit; 10 with --now",
    help="Time to wait for the daemon to stop.",
)
def stop(url: str, now: bool, keys: str | None, timeout: float | None) -> None:
    """Stop a daemon on this host.

    URL is a daemon's or a feed's address. The daemon lets the epochs that are being read finish, begins no new ones,
    and stops; this command waits for that. SIGTERM and Ctrl-C do the same, and a second one acts like --now.

    \b
    Examples:
      penstock stop tcp://127.0.0.1:5555
      penstock stop tcp://127.0.0.1:5555 --now
    """  # noqa: D301
    from penstock_proto.status.figures import count

    from ..to_daemon import control
    from .progress import needs_hosts, words
    from .terminal import Line

    line = Line()

    def still_waiting(state: Status) -> None:
        if line.drawn:
            line.show(f"{words(state)}; Ctrl-C stops waiting")
        else:
            streams = len(state.streams) + state.more_streams
            why = f" ({hosts})" if (hosts := needs_hosts(state)) else ""
            waits = f"still waiting for {count(streams, 'stream')}{why}"
            click.echo(f"{waits}; `penstock stop {url} --now` does not wait", err=True)

    if now and timeout is None:
        timeout = 10.0
    try:
        control.stop(
            url,
            now=now,
            timeout=timeout,
            still_waiting=still_waiting,
            every=1.0 if line.drawn else 10.0,
            keys=client_keys(keys),
        )
    finally:
        line.show("")
    click.echo("stopped")
