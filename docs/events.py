"""Makes the table of the coordinator's events for architecture.md, from the code. conf.py calls it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from penstock_server.coordinator import Coordinator
from penstock_server.coordinator.model import events

FOLDER = Path(inspect.getfile(Coordinator)).parent
THEN = {
    "Open": "admission",
    "Begin": "stream, rendezvous",
    "Acknowledge": "stream, consumer",
    "Leave": "stream",
    "Close": "stream, groups",
    "Cut": "stream, shared_delivery, rank_job, group_delivery",
    "Lost": "stream, shared_delivery, rank_job, group_delivery",
    "Made": "production",
    "RowsMeasured": "merging",
    "RowsWritten": "merging, pooling",
    "NeedRoom": "budget",
    "BytesLost": "remaking",
    "SlotFound": "production, merging, pooling",
    "SplitsListed": "starting, open_epochs",
    "RunFailed": "production, merging, split_lists",
    "SplitSkipped": "production",
    "Imported": "staffing, starting",
    "WorkerDied": "production",
    "RetireWorkers": "lane_production",
    "WorkerStands": "production, pooling, split_lists",
    "WorkersLost": "production",
    "SlotsAllowed": "budget",
    "Stop": "stream",
    "NotSaved": "groups",
    "StreamFailed": "affected",
    "CheckBegan": "stream, offering",
    "CheckEnded": "stream, offering",
    "Tick": "timers, periodic_checks",
}
"""The files that decide about an event, after the method that takes it."""


def page() -> str:
    """Return the table, as Markdown.

    Raises:
        ValueError: `THEN` names an event or a file that does not exist.
    """
    handlers = Coordinator(workers=1, memory=1)._handlers
    names = {event.__name__ for event in handlers}
    if unknown := set(THEN) - names:
        raise ValueError(f"docs/events.py: no events: {', '.join(sorted(unknown))}")
    rows = []
    for event, handler in handlers.items():
        own = event.__module__ == events.__name__  # otherwise it is a worker's message
        files = [_existing(name) for name in THEN.get(event.__name__, "").split(", ") if name]
        where = ", ".join([f"`{handler.__qualname__}`", *files])
        rows.append(f"| `{event.__name__}` | {where} | {_said(event if own else handler)} |\n")
    return "| event | method and files | what happens |\n|---|---|---|\n" + "".join(rows)


def _existing(name: str) -> str:
    if not any(FOLDER.rglob(f"{name}.py")):
        raise ValueError(f"docs/events.py: the coordinator has no {name}.py")
    return name


def _said(thing: object) -> str:
    """Return the docstring as one line, without the paragraphs about single fields."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    text = " ".join(" ".join(part.split()) for part in paragraphs if not re.match(r"`\w+`: |Args:", part))
    if not text:
        raise ValueError(f"{thing!r} does not say what happens")
    return text.replace("|", "\\|")
