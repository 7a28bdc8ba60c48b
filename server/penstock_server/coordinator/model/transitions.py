"""State machines as tables: which state may follow which, and why."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeAlias, TypeVar


class States(Enum):
    """Base of the enums of states. Their members are keys of tables that are read for each batch, so hashing them must
    not call Python code, as Enum's own hash does."""

    __hash__ = object.__hash__


State = TypeVar("State", bound=States)

Table: TypeAlias = Mapping[State, Mapping[State, str]]
"""For each state: the states that may follow it, each with the event or the reason in words."""


class ImpossibleTransition(AssertionError):
    """A bug: the table has no such transition."""


def impossible(before: Enum, after: Enum) -> ImpossibleTransition:
    """Return the error for a transition that is not in the table."""
    return ImpossibleTransition(f"{type(before).__name__}: no way from {before.name} to {after.name}")
