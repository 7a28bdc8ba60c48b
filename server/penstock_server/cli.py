"""The command line: `penstock serve`, `status`, `stop`."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from penstock_proto import PenstockError

try:
    import click
except ImportError:
    sys.exit("penstock: the command line needs the server's packages: pip install 'penstock[server]'")


class Group(click.Group):
    """Shows Penstock's own errors as one message and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except PenstockError as error:
            click.echo(f"penstock: {error}", err=True)
            ctx.exit(1)


class Bytes(click.ParamType[int]):
    """A number of bytes: 500000000, 500M, 4G (powers of 1024)."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """`value` as a number of bytes."""
        text = str(value).strip().upper().removesuffix("B").removesuffix("I")
        shift = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:], 0)
        try:
            number = float(text[:-1]) * 2**shift if shift else int(text)
        except ValueError:
            self.fail(f"{value!r} is no number of bytes: write 500000000, 500M or 4G", param, ctx)
        if number <= 0:
            self.fail("must be more than 0", param, ctx)
        return int(number)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "PENSTOCK"})
@click.version_option(package_name="penstock")
def main() -> None:
    """Keep TensorFlow trainers fed: run preprocessing generators in worker processes and serve their batches."""


@main.command()
@click.argument("feeds", metavar="MODULE:ATTR...", nargs=-1, required=True)
@click.option(
    "--workers",
    type=click.IntRange(1, 4096),
    default=lambda: len(os.sched_getaffinity(0)),
    show_default="the CPUs there are",
    help="Worker processes.",
)
@click.option("--bind", default="tcp://127.0.0.1:5555", show_default=True, help="Address to listen on; port 0: any.")
@click.option(
    "--memory",
    type=Bytes(),
    default=None,
    show_default="a quarter of what is free, at most 8G",
    help="Most bytes that batches and shuffle blocks may take, such as 4G.",
)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--until-stdin-closes", is_flag=True, hidden=True, help="Stop at the end of standard input.")
def serve(
    feeds: tuple[str, ...], workers: int, bind: str, memory: int | None, log_level: str, until_stdin_closes: bool
) -> None:
    """Serve feeds until SIGTERM or Ctrl-C.

    MODULE:ATTR names a Feed: MODULE is a module or the path of a .py file. For each feed that can be consumed, one line
    `ready tcp://HOST:PORT/NAME` is printed.

    \b
    Examples:
      penstock serve scenes:feed --workers 8
      penstock serve data/scenes.py:train data/scenes.py:val --bind tcp://0.0.0.0:5555 --memory 4G
    """  # noqa: D301 (click wants a real \b)
    from . import daemon
    from .host.room import default_memory

    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s penstock: %(message)s"
    )
    try:
        daemon.serve(
            list(feeds),
            workers=workers,
            bind=bind,
            memory=default_memory() if memory is None else memory,
            on_ready=lambda url: click.echo(f"ready {url}"),
            until_stdin_closes=until_stdin_closes,
        )
    except PenstockError as error:
        if until_stdin_closes:  # the trainer that started us raises it
            import msgspec

            from penstock_proto.messages import ErrorReport

            click.echo(f"error {msgspec.json.encode(ErrorReport.of(error)).decode()}")
            sys.exit(1)
        raise


@main.command()
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--timeout", default=5.0, show_default=True, help="Seconds to wait for an answer.")
def status(url: str, as_json: bool, timeout: float) -> None:
    """Show what a daemon serves, to whom, and how it is.

    URL is a daemon's or a feed's address, such as tcp://127.0.0.1:5555.
    """
    from . import control
    from .coordinator import size

    text = control.status(url, timeout)
    state = json.loads(text)
    if as_json:
        click.echo(json.dumps(state, indent=2))
        return
    memory = state["memory"]
    click.echo(f"{state['endpoint']}  pid {state['pid']}  up {state['seconds']:.0f} s")
    arena, reserved, allowed = (size(memory[key]) for key in ("arena", "reserved", "allowed"))
    click.echo(f"memory   {arena} in slots, {reserved} reserved, {allowed} allowed")
    for worker in state["workers"]:
        shown = f"pid {worker['pid']}" if worker["pid"] else "not running"
        click.echo(f"worker   {worker['number']}: {shown}, restarted {worker['restarts']} times")
    for feed in state["feeds"]:
        epoch = f", {feed['batches']} batches an epoch" if feed["batches"] is not None else ""
        click.echo(f"feed     {feed['url']}  {feed['spec']}, batch size {feed['batch_size']}{epoch}")
    for stream in state["streams"]:
        epoch = "not begun" if stream["epoch"] is None else f"epoch {stream['epoch']}"
        failed = f", FAILED: {stream['error']}" if stream["error"] else ""
        click.echo(
            f"stream   {stream['feed']} to {stream['client']} ({stream['transport']}): {epoch}, "
            f"{stream['handed']} slabs handed of {stream['sent']} sent, {stream['slots']} slots{failed}"
        )
    if not state["streams"]:
        click.echo("stream   none")


@main.command()
@click.argument("url")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the daemon to end.")
def stop(url: str, timeout: float) -> None:
    """Stop a daemon on this host.

    URL is a daemon's or a feed's address, such as tcp://127.0.0.1:5555.
    """
    from . import control

    state = json.loads(control.status(url, timeout))
    control.stop(url, state["unix"], state["pid"], timeout)
    click.echo("stopped")
