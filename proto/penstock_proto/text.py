"""Text of others, made safe to print: error messages, names of files and feeds, tracebacks, values of user code.

Such text may hold characters that a terminal obeys, that change the order in which other text is shown, or that cannot
be encoded. It is cleaned where it enters: in every `PenstockError`, in a daemon's status (status_parsing.py), in the
names of peers, and in each line of the daemon's log.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls except newline and tab; separators and overrides of Unicode's two directions; lone surrogates,
which undecodable file names contain."""

_NAMED = ("segment ", "share ", "shard ", "part ", "item ", "items ", "batch ")
"""How the texts of splits begin that say what they are."""


def printable(text: str) -> str:
    r"""Return `text` with each unsafe character as its escape, such as `\x1b`. Newlines and tabs stay."""
    return _UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """Return `text` as `printable` does, with newlines and tabs as spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def named_split(split: str) -> str:
    """Return the text of a split for the middle of a sentence. Those that say what they are, such as "segment 3" or
    "share 3 of 16", stay as they are; to all others it adds "split"."""
    return split if split.startswith(_NAMED) else f"split {split}"


def both_ends(text: str, most: int) -> str:
    """Return `text` with at most `most` characters. A longer one keeps its beginning and its end, and says between them
    how much is left out."""
    if len(text) <= most:
        return text
    end = (most - 60) // 2  # the mark is shorter than 60
    return f"{text[:end]} [... {len(text) - 2 * end:,} characters left out ...] {text[-end:]}"


def is_unicode(text: str) -> bool:
    """Return whether `text` can be encoded: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
