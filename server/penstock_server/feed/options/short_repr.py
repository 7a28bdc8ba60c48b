"""Shows a feed, or a value of one of its options, as the call that makes it. Defaults are left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from penstock_proto.value_text import shown


def is_set(value: Any, default: Any) -> bool:
    """Return whether the value of an option differs from its default."""
    return type(value) is not type(default) or value != default


def arguments(value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the call that makes a dataclass object: the positional ones, and the keyword arguments
    that are not the defaults."""
    each = [(field, getattr(value, field.name)) for field in fields(value)]
    keywords = {field.name: it for field, it in each if field.kw_only and is_set(it, field.default)}
    return [it for field, it in each if not field.kw_only], keywords


def call(name: str, positional: Iterable[Any], keywords: Mapping[str, Any]) -> str:
    """Return the text of a call, such as `Shuffle(10000, interleave=16)`."""
    return f"{name}({', '.join([*map(_shown, positional), *(keyword(key, it) for key, it in keywords.items())])})"


def keyword(name: str, value: Any) -> str:
    """Return the text of a keyword argument."""
    return f"{name}={_shown(value)}"


def short_repr(value: Any) -> str:
    """Return the text of the call that makes a dataclass object."""
    return call(type(value).__name__, *arguments(value))


def _shown(value: Any) -> str:
    """Show an argument: functions, classes and combined feeds by their names, others as in messages."""
    if isinstance(value, list | tuple) and value and all(map(callable, value)):
        return f"[{', '.join(map(_shown, value))}]"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else shown(value)
