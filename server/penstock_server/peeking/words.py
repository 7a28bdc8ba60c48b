"""Text for a terminal: wrapped, counted, and without control characters."""

from __future__ import annotations

import textwrap

WIDTH = 80
"""Columns."""


def counted(number: int, word: str) -> str:
    """Return a number with its word, in the plural if need be."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Return text of a file without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def wrapped(text: str, indent: str) -> list[str]:
    """Return text as lines that begin with `indent`, further ones with two spaces more."""
    return textwrap.wrap(
        plain(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
