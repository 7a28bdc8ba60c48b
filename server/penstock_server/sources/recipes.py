"""Names recipes of the documentation in messages. A test compares the names with the headings of docs/recipes.md."""

from __future__ import annotations


def recipe(title: str) -> str:
    """Return the words that name a recipe."""
    return f"the recipe {title!r} of Penstock's documentation"
