"""Patterns of columns: `*` stands for any text, and all else for itself, brackets and question marks too."""

from __future__ import annotations

import re


def matches(name: str, pattern: str) -> bool:
    """Return whether a column has a name that the pattern stands for."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None
