"""The screen of `penstock top`, drawn with Rich. The daemon has the figures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, to_builtins
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock_proto import PenstockError
from penstock_proto.status.feed_status import Feed
from penstock_proto.status.figures import count, number, percent, size
from penstock_proto.status.sharing import what_is_shared
from penstock_proto.status.status_shape import Status
from penstock_proto.status.worker_status import Shares, Worker

from .top_history import Looks

_STATES = (("generating", "green"), ("collating", "yellow"), ("cpu_wait", "red"), ("idle", "bright_black"))
_BAR = 16
_FILLED = {"generating": "█", "collating": "▓", "cpu_wait": "▒", "idle": "░"}
"""The character of each state in a bar, so that a bar can be read without colours."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 32
_MOST_HOST = 16
_OF_FEED = "name rates consumers dropped skipped_count".split()
_OF_HOST = "name state workers lanes rates awaited".split()
_OF_WORKER = "number name host restarts shares".split()
_OF_CONSUMER = "feed client transport rank epoch reading waiting limit headline verdict".split()
ONCE = 1
"""How many looks follow the first before the screen is printed once."""


def show(looks: Looks) -> None:
    """Print the screen once."""
    console = Console()
    console.print(screen(looks, _draws_blocks(console)))


def watch(status: Callable[[], Status], every: float, *, live: bool = False) -> Looks:
    """Ask for the status every `every` seconds.

    Args:
        status: returns the daemon's status.
        every: seconds between two looks.
        live: show the screen all the time, until Ctrl-C. Otherwise end after `ONCE` more looks.

    Raises:
        PenstockError: the daemon has not answered; with `live`, only before the first answer.
    """
    looks = Looks()
    looks.add(status())
    if not live:
        for _ in range(ONCE):
            time.sleep(every)
            looks.add(status())
        return looks
    console = Console()
    lost = ""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as shown:
        while True:
            drawn = screen(looks, _draws_blocks(console))
            shown.update(Group(Text(lost, "red"), "", drawn) if lost else drawn, refresh=True)
            time.sleep(every)
            try:
                looks.add(status())
                lost = ""
            except PenstockError as error:
                lost = f"{error.message} (asking again)"
    return looks


def _draws_blocks(console: Console) -> bool:
    return console.encoding.startswith("utf")


def screen(looks: Looks, unicode: bool = True) -> RenderableType:
    """Return the whole screen. `unicode`: whether the terminal can show block characters."""
    status = looks.latest
    parts: list[RenderableType] = [_head(status), ""]
    parts += [_feeds(looks, unicode), *_left_out(status.feeds), ""]
    if status.hosts:
        parts += [_hosts(status), ""]
    parts += [_workers(status, unicode), "", _consumers(status)]
    for feed in status.feeds:
        if shared := what_is_shared(status, feed):
            parts += ["", Text.assemble((f"{feed.name}: ", "bold"), shared)]
    for stream in status.streams:
        if stream.apart_because:
            parts += [
                "",
                Text.assemble((f"{stream.client}: ", "bold"), f"shares with no other: {stream.apart_because}"),
            ]
        if stream.verdict:
            parts += ["", Text.assemble((f"{stream.client}: ", "bold"), stream.verdict)]
    return Group(*parts)


def as_json(looks: Looks) -> dict[str, Any]:
    """Return the figures of the screen as JSON types."""
    status = looks.latest
    return {
        "endpoint": status.endpoint,
        "seconds": status.window_seconds,
        "feeds": [_chosen(feed, _OF_FEED) for feed in status.feeds],
        "hosts": [_chosen(host, _OF_HOST) for host in status.hosts],
        "workers": [_chosen(one, _OF_WORKER) for one in status.workers],
        "consumers": [
            {**_chosen(stream, _OF_CONSUMER), "queued": stream.sent - stream.handed} for stream in status.streams
        ],
    }


def _chosen(thing: Struct, names: list[str]) -> dict[str, Any]:
    """Return figures of a struct as JSON types."""
    return {name: to_builtins(getattr(thing, name)) for name in names}


def _head(status: Status) -> Text:
    memory = status.memory
    state = "draining" if status.draining else "ready" if status.ready else "starting"
    text = Text.assemble(
        (status.endpoint, "bold"),
        f"  pid {status.pid}, up {_ago(status.seconds)}, ",
        (state, "green" if state == "ready" else "yellow"),
        f", {count(status.cpus, 'CPU')}. Memory: {size(memory.arena)} in slots, "
        f"{size(memory.reserved)} reserved of {size(memory.allowed)}",
    )
    if engine := status.engine:
        joined = sum(host.name.startswith(f"{engine.name}-") for host in status.hosts)
        text.append(f"\n{joined} of {count(engine.hosts, 'host')} on {engine.name.capitalize()} joined")
    if state == "starting":
        text.append(f"\n{status.phase}", "red" if status.failing else "yellow")
    return text


def _feeds(looks: Looks, unicode: bool) -> Table:
    table = _table("feed", "batches/s", "samples/s", "MB/s", "consumers", "")
    for feed in looks.latest.feeds:
        rates = feed.rates
        figures = (number(rates.batches), number(rates.samples), number(rates.bytes / 1e6))
        drawn = Text(_sparkline(looks.rates(feed.name), unicode), "cyan")
        table.add_row(feed.name, *figures, str(feed.consumers), drawn)
    return table


def _left_out(feeds: list[Feed]) -> Iterator[Text]:
    """Yield how many samples were dropped, and how many splits skipped, for each feed with any."""
    for feed in feeds:
        said = []
        if feed.dropped:
            said.append(f"{count(feed.dropped, 'sample')} dropped")
        if feed.skipped_count:
            said.append(f"{count(feed.skipped_count, 'split')} skipped")
        if said:
            yield Text(f"{feed.name}: {', '.join(said)}", "yellow" if feed.skipped_count else "")


def _hosts(status: Status) -> Table:
    table = _table("host", "workers", "lanes", "MB/s", "waited for", "")
    hosts = status.hosts
    for host in hosts[:_MOST_ROWS]:
        awaited = "" if host.awaited is None else percent(host.awaited)
        state = "" if host.state == "working" else host.state
        figures = (str(host.workers), str(host.lanes), number(host.rates.bytes / 1e6), awaited)
        table.add_row(_shortened(host.name), *figures, Text(state, "yellow"))
    if (more := len(hosts) - _MOST_ROWS + status.more_hosts) > 0:
        table.add_row(f"and {more} more")
    return table


def _workers(status: Status, unicode: bool) -> Table:
    table = _table("worker", "", "generating", "collating", "no CPU", "idle", "doing")
    workers = status.workers
    for worker in workers[:_MOST_ROWS]:
        shares, doing = worker.shares, worker.doing
        figures = [Text("")] + [Text("")] * 4
        if shares is not None:
            figures = [_bar(shares, unicode), *(Text(percent(getattr(shares, name))) for name, _ in _STATES)]
        what = _state_of(worker) or (Text(doing.what) if doing else Text("idle", "bright_black"))
        if worker.restarts:
            what = Text.assemble(what, (f" (restarted {count(worker.restarts, 'time')})", "yellow"))
        table.add_row(_name_of(worker), *figures, what)
    if (more := len(workers) - _MOST_ROWS + status.more_workers) > 0:
        table.add_row("", f"and {more} more")
    return table


def _name_of(worker: Worker) -> str:
    """Return a worker's name, in which a long host name is shortened."""
    host, slash, number = worker.name.rpartition("/")
    return _shortened(host) + slash + number


def _shortened(host: str) -> str:
    return host if len(host) <= _MOST_HOST else host[: _MOST_HOST - 1] + "…"


def _state_of(worker: Worker) -> Text | None:
    """Return the state of a worker, or None if it is simply working."""
    for name, said in (("given_up", "given up: see the log"), ("stopped", "stopped by a signal")):
        if getattr(worker, name):
            return Text(said, "red")
    if not worker.ready:
        return Text("starting" if worker.doing is None else worker.doing.what, "yellow")
    return Text("leaving", "yellow") if worker.leaving else None


def _consumers(status: Status) -> Table:
    table = _table("consumer", "feed", "over", "epoch", "queued", "waits", "")
    streams = status.streams
    for one in streams[:_MOST_ROWS]:
        waits = "" if one.waiting is None else percent(one.waiting)
        epoch = "" if one.epoch is None else str(one.epoch)
        style = "red" if one.waiting is not None and one.waiting >= 0.5 else ""
        reading = "" if one.reading else Text("between epochs", "bright_black")
        queued = str(one.sent - one.handed)
        table.add_row(one.client, one.feed, one.transport, epoch, queued, Text(waits, style), reading)
    more = len(streams) - _MOST_ROWS + status.more_streams
    if more > 0:
        table.add_row(f"and {more} more")
    if not streams:
        table.add_row(Text("none", "bright_black"))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        left = place == 0 or column in ("", "doing", "feed", "over")
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _bar(shares: Shares, unicode: bool) -> Text:
    """Return a bar of all states, in their order and colours. Each state has its own character."""
    text, drawn, total = Text(), 0, 0.0
    for name, style in _STATES:
        total += getattr(shares, name)
        until = round(_BAR * min(1.0, total))
        text.append((_FILLED[name] if unicode else name[0]) * (until - drawn), style)
        drawn = until
    return text


def _sparkline(values: tuple[float, ...], unicode: bool) -> str:
    most = max(values, default=0.0)
    if not most or not unicode:
        return ""
    return "".join(_BLOCKS[min(7, int(8 * value / most))] for value in values)


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
