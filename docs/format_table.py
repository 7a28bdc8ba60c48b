"""Draws the tables of data file formats for bring-your-own-data.md, from the registry. conf.py calls it."""

from __future__ import annotations

from penstock_server.sources.registry import BUILT_IN


def page() -> str:
    """Return two tables: the endings of each format, its constructor, and whether `penstock serve` takes its files; and
    how files are divided, read and checked."""
    lines = ["| format | endings | constructor | `penstock serve FILE` |", "|---|---|---|---|"]
    for one in BUILT_IN:
        endings = ", ".join(f"`{ending}`" for ending in one.endings or one.folder_of)
        words = ["needs a module"] if one.needs_module else ["yes, with `--leaf`"] if one.needs_leaves() else ["yes"]
        words += [f"takes `--{option}`" for option in ("rows", "size") if one.takes(option)]
        lines.append(f"| {one.name} | {endings} | `Feed.{one.constructor}` | {'; '.join(words)} |")
    lines += [
        "",
        "| format | splits | random access | checksums that are compared | URLs | bounds |",
        "|---|---|---|---|---|---|",
    ]
    for one in BUILT_IN:
        assert one.facts is not None, one.name
        lines.append(f"| {' | '.join((one.name, *one.facts))} |")
    return "\n".join(lines) + "\n"
