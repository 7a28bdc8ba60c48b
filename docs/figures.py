"""Makes the table of the figures in a daemon's status for monitoring.md, from their declarations. conf.py calls it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from penstock_proto.declarations import figures
from penstock_proto.status.status_shape import Status


def page() -> str:
    """Return the table, as Markdown."""
    rows = [("top level", figure.name, figure.means) for figure in figures(Status) if figure.kind is None]
    for figure in figures(Status):
        if figure.kind is not None:
            rows.append((f"`{figure.name}`", "", figure.means))
            rows += [("", name, means) for name, means in _rows(figure.kind, "", set())]
    lines = [f"| {place} | {name and f'`{name}`'} | {means} |" for place, name, means in _once(rows)]
    return "\n".join(["| in | figure | meaning |", "|---|---|---|", *lines]) + "\n"


def _rows(kind: type[Struct], prefix: str, seen: set[type[Struct]]) -> Iterator[tuple[str, str]]:
    """Yield the figures of a struct and of those in it, each struct once: where it is first."""
    for figure in figures(kind):
        yield f"{prefix}{figure.name}", figure.means
        if figure.kind is not None and figure.kind not in seen:
            seen.add(figure.kind)
            yield from _rows(figure.kind, f"{prefix}{figure.name}.", seen)


def _once(rows: list[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Leave out a place that is the same as in the row before."""
    before = ""
    for place, name, means in rows:
        yield "" if place == before else place, name, means
        before = place
