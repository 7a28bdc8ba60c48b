"""Draws the coordinator's states for architecture.md, from the tables that the code checks. conf.py calls it."""

from __future__ import annotations

from typing import Any

from penstock_server.coordinator.model.consumer import CONSUMER_STATES
from penstock_server.coordinator.model.transitions import Table
from penstock_server.coordinator.model.turn import TURN_STATES
from penstock_server.coordinator.order.lane import LANE_STATES

TABLES: dict[str, Table[Any]] = {"A turn": TURN_STATES, "A lane": LANE_STATES, "A consumer": CONSUMER_STATES}


def drawn(name: str, table: Table[Any]) -> str:
    """Return one state machine: each state with its meaning, and the states that may follow it, with the reasons."""
    lines = [f"{name}"]
    width = max(len(state.name) for state in table)
    for state, ways in table.items():
        lines += ["", f"  {state.name}: {state.value}"]
        lines += [f"    --> {after.name.ljust(width)}  {why}" for after, why in ways.items()]
    return "\n".join(lines)


def page() -> str:
    """Return the drawings, as Markdown."""
    return "\n\n".join(f"```\n{drawn(name, table)}\n```" for name, table in TABLES.items())
