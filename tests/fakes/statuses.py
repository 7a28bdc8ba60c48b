"""Statuses of daemons, with only those figures that a test is about."""

from __future__ import annotations

from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import fields

AnyStruct = TypeVar("AnyStruct", bound=Struct)


def of(kind: type[AnyStruct], **figures: Any) -> AnyStruct:
    """Return a struct of a status with these figures. The others are None, or else 0, empty or False."""
    hints = get_type_hints(kind)
    needed = {one.name: hints[one.name] for one in fields(kind) if one.required}
    return kind(**{name: _nothing(hint) for name, hint in needed.items() if name not in figures}, **figures)


def _nothing(hint: Any) -> Any:
    if NoneType in get_args(hint):
        return None
    kind = get_origin(hint) or hint
    return of(kind) if issubclass(kind, Struct) else kind()
