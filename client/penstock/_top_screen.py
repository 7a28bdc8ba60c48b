"""The screen of `penstock top`, drawn with Rich. `_top.py` has the figures."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock_proto import PenstockError
from penstock_proto.figures import WorkerShares, count, number, percent
from penstock_proto.status_history import FEWEST_LOOKS, ConsumerState, History

_STATES = (("generating", "green"), ("collating", "yellow"), ("cpu_wait", "red"), ("idle", "bright_black"))
_BAR = 16
_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_ROWS = 32


def show(history: History) -> None:
    """Print the screen once."""
    console = Console()
    console.print(screen(history, _draws_blocks(console)))


def watch(status: Callable[[], dict[str, Any]], every: float, *, live: bool = False) -> History:
    """Ask for the status every `every` seconds.

    Args:
        status: returns the daemon's status.
        every: seconds.
        live: show the screen all the time, until Ctrl-C. Otherwise end after `FEWEST_LOOKS` looks.

    Raises:
        PenstockError: the daemon has not answered; with `live`, only before the first answer.
    """
    history = History()
    history.add(status())
    if not live:
        for _ in range(FEWEST_LOOKS):
            time.sleep(every)
            history.add(status())
        return history
    console = Console()
    lost = ""
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True, auto_refresh=False) as shown:
        while True:
            drawn = screen(history, _draws_blocks(console))
            shown.update(Group(Text(lost, "red"), "", drawn) if lost else drawn, refresh=True)
            time.sleep(every)
            try:
                history.add(status())
                lost = ""
            except PenstockError as error:
                lost = f"{error.message} (asking again)"
    return history


def _draws_blocks(console: Console) -> bool:
    return console.encoding.startswith("utf")


def screen(history: History, unicode: bool = True) -> RenderableType:
    """Return the whole screen. `unicode`: whether the terminal can show block characters."""
    status = history.latest
    parts: list[RenderableType] = [_head(status), ""]
    parts += [_feeds(history, unicode), "", _workers(history, unicode), "", _consumers(history)]
    for consumer in history.consumers():
        if consumer.verdict:
            parts += ["", Text.assemble((f"{_name(consumer)}: ", "bold"), consumer.verdict)]
    return Group(*parts)


def as_json(history: History) -> dict[str, Any]:
    """Return the figures of the screen as JSON types."""
    status = history.latest
    return {
        "endpoint": status["endpoint"],
        "seconds": round(history.seconds, 3),
        "feeds": [dataclasses.asdict(feed) for feed in history.feeds()],
        "workers": [
            {"number": worker["number"], "restarts": worker["restarts"], "shares": _shares(history, worker["number"])}
            for worker in status["workers"]
        ],
        "consumers": [dataclasses.asdict(consumer) for consumer in history.consumers()],
    }


def _shares(history: History, number: int) -> dict[str, float] | None:
    shares = history.workers().get(number)
    return None if shares is None else {name: round(getattr(shares, name), 4) for name, _ in _STATES}


def _head(status: dict[str, Any]) -> Text:
    memory = status["memory"]
    state = "draining" if status["draining"] else "ready" if status["ready"] else "starting"
    text = Text.assemble(
        (status["endpoint"], "bold"),
        f"  pid {status['pid']}, up {_ago(status['seconds'])}, ",
        (state, "green" if state == "ready" else "yellow"),
        f", {count(status['cpus'], 'CPU')}. Memory: {_size(memory['arena'])} in slots, "
        f"{_size(memory['reserved'])} reserved of {_size(memory['allowed'])}",
    )
    for failing in status["failing"]:
        text.append(f"\nfeed {failing['feed']} cannot start, trying again: {failing['error']}", "red")
    return text


def _feeds(history: History, unicode: bool) -> Table:
    table = _table("feed", "batches/s", "samples/s", "MB/s", "consumers", "")
    for feed in history.feeds():
        figures = (number(feed.batches), number(feed.samples), number(feed.megabytes), str(feed.consumers))
        table.add_row(feed.name, *figures, Text(_sparkline(feed.history, unicode), "cyan"))
    return table


def _workers(history: History, unicode: bool) -> Table:
    found = history.workers()
    table = _table("worker", "", "generating", "collating", "no CPU", "idle", "doing")
    workers = history.latest["workers"]
    for worker in workers[:_MOST_ROWS]:
        shares, doing = found.get(worker["number"]), worker["doing"]
        figures = [Text("")] + [Text("")] * 4
        if shares is not None:
            figures = [_bar(shares, unicode), *(Text(percent(getattr(shares, name))) for name, _ in _STATES)]
        what = _state_of(worker) or (Text(doing["what"]) if doing else Text("idle", "bright_black"))
        if worker["restarts"]:
            what = Text.assemble(what, (f" (restarted {count(worker['restarts'], 'time')})", "yellow"))
        table.add_row(str(worker["number"]), *figures, what)
    if len(workers) > _MOST_ROWS:
        table.add_row("", f"and {len(workers) - _MOST_ROWS} more")
    return table


def _state_of(worker: dict[str, Any]) -> Text | None:
    """What is special about a worker that does not simply work."""
    for name, said in (("given_up", "given up: see the log"), ("stopped", "stopped by a signal")):
        if worker[name]:
            return Text(said, "red")
    if not worker["ready"]:
        return Text("importing" if worker["pid"] else "starting", "yellow")
    return Text("leaving", "yellow") if worker["leaving"] else None


def _consumers(history: History) -> Table:
    table = _table("consumer", "feed", "over", "epoch", "queued", "waits", "")
    consumers = history.consumers()
    for one in consumers[:_MOST_ROWS]:
        waits = "" if one.waiting is None else percent(one.waiting)
        epoch = "" if one.epoch < 0 else str(one.epoch)
        style = "red" if one.waiting is not None and one.waiting >= 0.5 else ""
        reading = "" if one.reading else Text("between epochs", "bright_black")
        row = (one.feed, one.transport, epoch, str(one.queued), Text(waits, style), reading)
        table.add_row(_name(one), *row)
    more = len(consumers) - _MOST_ROWS + history.latest["more_streams"]
    if more > 0:
        table.add_row(f"and {more} more")
    if not consumers:
        table.add_row(Text("none", "bright_black"))
    return table


def _name(consumer: ConsumerState) -> str:
    return consumer.client if consumer.rank is None else f"{consumer.client}, rank {consumer.rank}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        left = place == 0 or column in ("", "doing", "feed", "over")
        table.add_column(column, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
    return table


def _bar(shares: WorkerShares, unicode: bool) -> Text:
    """A bar of all states, in their order and colours."""
    text, drawn, total = Text(), 0, 0.0
    for name, style in _STATES:
        total += getattr(shares, name)
        until = round(_BAR * min(1.0, total))
        text.append(("█" if unicode else name[0]) * (until - drawn), style)
        drawn = until
    return text


def _sparkline(values: tuple[float, ...], unicode: bool) -> str:
    most = max(values, default=0.0)
    if not most or not unicode:
        return ""
    return "".join(_BLOCKS[min(7, int(8 * value / most))] for value in values[-30:])


def _size(nbytes: float) -> str:
    power = max(power for power in range(5) if nbytes >= 1024**power or not power)
    return f"{number(nbytes / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def _ago(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
