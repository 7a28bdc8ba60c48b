"""Draw the coordinator's states into architecture.md from the tables that the code checks: `python docs/states.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock_server.coordinator.order.lane import LANE_STATES
from penstock_server.coordinator.vocabulary.consumer import CONSUMER_STATES
from penstock_server.coordinator.vocabulary.transitions import Table
from penstock_server.coordinator.vocabulary.turn import TURN_STATES

PAGE = Path(__file__).parent / "architecture.md"
BEGIN, END = "<!-- states.py begins -->\n", "<!-- states.py ends -->\n"
TABLES: dict[str, Table[Any]] = {"A turn": TURN_STATES, "A lane": LANE_STATES, "A consumer": CONSUMER_STATES}


def drawn(name: str, table: Table[Any]) -> str:
    """Return one state machine: each state with its meaning, and the states that may follow it, with the reasons."""
    lines = [f"{name}"]
    width = max(len(state.name) for state in table)
    for state, ways in table.items():
        lines += ["", f"  {state.name}: {state.value}"]
        lines += [f"    --> {after.name.ljust(width)}  {why}" for after, why in ways.items()]
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the states drawn again."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    blocks = "\n\n".join(f"```\n{drawn(name, table)}\n```" for name, table in TABLES.items())
    return f"{before}{BEGIN}\n{blocks}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
