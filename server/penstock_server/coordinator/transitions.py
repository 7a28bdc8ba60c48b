"""State machines as tables: which state may follow which, and by what event."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias, TypeVar

State = TypeVar("State", bound=Enum)

Table: TypeAlias = Mapping[State, Mapping[State, str]]
"""For each state the states that may follow it, each with the event or the reason in words."""


class ImpossibleTransition(AssertionError):
    """A bug: the table has no such transition."""


def check(table: Table[State], before: State, after: State) -> None:
    """Refuse a transition that is not in the table.

    Raises:
        ImpossibleTransition: names both states.
    """
    if after not in table[before]:
        raise ImpossibleTransition(f"{type(before).__name__}: no way from {before.name} to {after.name}")
