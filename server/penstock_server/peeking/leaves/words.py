"""Formats text for a terminal: wraps it, counts things, and escapes control characters."""

from __future__ import annotations

import textwrap

WIDTH = 80
"""Columns of a line."""


def counted(number: int, word: str) -> str:
    """Return a number with its word, in the plural unless the number is 1."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Return text of a file with control characters escaped, since a terminal would obey them."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def wrapped(text: str, indent: str) -> list[str]:
    """Return text as lines that begin with `indent`, and with two more spaces after the first line."""
    return textwrap.wrap(
        plain(text),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
