"""Which files of several patterns belong together: those in whose names the wildcards stand for the same text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WILDCARD = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^]]*\])")
_NOT = re.compile(r"^\[[!^]")
_NOTS = {"[!": "[^", "[^": r"[\^"}
_MEANS = {"**/": "((?:.*/)?)", "**": "(.*)", "*": "([^/]*)", "?": "([^/])"}


def pairs(matches: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, ...]]:
    """Return groups with one file of each pattern, in the order of the first pattern's files.

    Args:
        matches: patterns, each with the files that match it.

    Two files belong together if the wildcards of their patterns stand for the same text: `x-3.npy` and `y-3.npy` for
    `x-*.npy` and `y-*.npy`. If the patterns do not have the same number of wildcards, files belong together by their
    places in the order of names.

    Raises:
        ValueError: a file of one pattern has none of another, or what the wildcards stand for cannot be told.
    """
    (first, files), *others = matches
    groups: list[tuple[str, ...]] = [(file,) for file in files]
    keys = [_matched(first, file) for file in files]
    for pattern, matching in others:
        found = list(matching)
        theirs = [_matched(pattern, file) for file in found]
        if {len(key) for key in keys} == {len(key) for key in theirs}:
            found = _in_order(
                first, dict(zip(keys, files, strict=True)), pattern, dict(zip(theirs, found, strict=True))
            )
        elif len(found) != len(files):
            raise ValueError(
                f"{first} matches {len(files)} files and {pattern} matches {len(found)}: each file of one leaf needs a "
                "file of the other"
            )
        groups = [(*group, file) for group, file in zip(groups, found, strict=True)]
    return groups


def _matched(pattern: str, file: str) -> tuple[str, ...]:
    """Return what the wildcards of the pattern stand for in the name of this file; () if the pattern is a path.

    Raises:
        ValueError: the file does not match.
    """
    text = pattern.removeprefix("file://")
    if text == file:
        return ()
    expression = ""
    for at, part in enumerate(_WILDCARD.split(_plain(text))):
        if at % 2 == 0:
            expression += re.escape(part)
        else:
            expression += _MEANS.get(part) or f"({_NOT.sub(lambda found: _NOTS[found[0]], part)})"
    match = re.fullmatch(expression, _plain(file), re.DOTALL)
    if match is None:
        raise ValueError(
            f"{file} matches {pattern}, but what its wildcards stand for cannot be told: write a simpler pattern, "
            "with * and ? only"
        )
    return match.groups()


def _plain(path: str) -> str:
    """Return a path with single slashes, as some of those of a pattern are in the names that match it."""
    return path if "://" in path else re.sub("/+", "/", path)


def _in_order(
    first: str, files: dict[tuple[str, ...], str], pattern: str, found: dict[tuple[str, ...], str]
) -> list[str]:
    """Return the files of the other pattern in the order of the first one's."""
    for ours, theirs, other in ((files, found, pattern), (found, files, first)):
        for key, file in ours.items():
            if key not in theirs:
                text = " and ".join(map(repr, key))
                raise ValueError(
                    f"{file} belongs to no file of another leaf: none matches {other} with {text} in place of the "
                    "wildcard. Name files that belong together alike, or leave this one out"
                )
    return [found[key] for key in files]
