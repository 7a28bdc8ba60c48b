"""Declares figures: fields of the structs in a daemon's status. The name of a figure, its type, what it means, and the
metric that shows it stand in one place. The documentation and the metrics read these declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct


def figure(means: str, metric: str = "") -> Meta:
    """Return the annotation of a figure: `lanes: Annotated[int, figure("Lanes that ...", "penstock_host_lanes")]`.

    Args:
        means: the meaning and the unit, in one line for a table. It is also the help text of the metric.
        metric: name of a metric that has this value, or "". With `_total` at its end it is a counter.
    """
    return Meta(description=means, extra={"metric": metric})


@dataclass(frozen=True, slots=True)
class Figure:
    """A declared figure.

    Attributes:
        name: the name of the field.
        means, metric: as for `figure`.
        kind: the struct that it is or has, or None for a number or text.
        many: whether it has any number of these structs, in a list.
    """

    name: str
    means: str
    metric: str
    kind: type[Struct] | None
    many: bool


@functools.cache
def figures(kind: type[Struct]) -> tuple[Figure, ...]:
    """Return the figures of a struct, in the order of its fields.

    Raises:
        TypeError: a field does not say what it means.
    """
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_declared(kind, name, hints[name]) for name in kind.__struct_fields__)


def _declared(kind: type[Struct], name: str, hint: Any) -> Figure:
    metas = [meta for meta in getattr(hint, "__metadata__", ()) if isinstance(meta, Meta) and meta.description]
    if not metas:
        raise TypeError(f"{kind.__name__}.{name} does not say what it means: annotate it with figure()")
    structs = [part for part in _parts(hint) if isinstance(part, type) and issubclass(part, Struct)]
    metric = str((metas[-1].extra or {}).get("metric", ""))
    many = get_origin(get_args(hint)[0]) is list
    return Figure(name, str(metas[-1].description), metric, structs[0] if structs else None, many)


def _parts(hint: Any) -> Iterator[Any]:
    """Yield a type and the types in it."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)
