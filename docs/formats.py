"""Draws the table of data file formats for bring-your-own-data.md, from the registry. conf.py calls it."""

from __future__ import annotations

from penstock_server.sources.registry import BUILT_IN


def page() -> str:
    """Return the table: each format with its endings, its constructor, and whether `penstock serve` takes its files."""
    lines = ["| format | endings | constructor | `penstock serve FILE` |", "|---|---|---|---|"]
    for one in BUILT_IN:
        endings = ", ".join(f"`{ending}`" for ending in one.endings or one.folder_of)
        words = ["needs a module"] if one.needs_module else ["yes, with `--leaf`"] if one.needs_leaves() else ["yes"]
        words += [f"takes `--{option}`" for option in ("rows", "size") if one.takes(option)]
        lines.append(f"| {one.name} | {endings} | `Feed.{one.constructor}` | {'; '.join(words)} |")
    return "\n".join(lines) + "\n"
