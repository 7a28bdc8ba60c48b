"""Tells installed packages from the user's own modules."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from functools import lru_cache
from pathlib import Path

_PYTHONS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FOLDERS = ("site-packages", "dist-packages")
_SHARED = ("", "..", "__pycache__", "bin")
"""What a folder may have for several packages, or for the user's own modules."""


def is_installed(path: str) -> bool:
    """Return whether the file at `path` belongs to an installed package or to Python, and not to the user's own code.

    `pip install --target` puts packages into any folder, perhaps beside the user's modules, and their files are listed
    there (https://packaging.python.org/en/latest/specifications/recording-installed-packages/).
    """
    if path.startswith(_PYTHONS) or any(part in _FOLDERS for part in Path(path).parts):
        return True
    for folder, names in _other_folders(tuple(sys.path)):
        if path.startswith(folder) and path.removeprefix(folder).partition(os.sep)[0] in names:
            return True
    return False


@lru_cache(maxsize=16)
def _other_folders(search: tuple[object, ...]) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return the folders among these, each with a separator at its end, into which pip has put packages, and the names
    of the files and folders there that belong to these."""
    found = []
    for place in dict.fromkeys(os.path.abspath(one) for one in search if isinstance(one, str)):  # as Python does
        if not place.startswith(_PYTHONS) and not any(part in _FOLDERS for part in Path(place).parts):
            names = _recorded(place)
            if names:
                found.append((os.path.join(place, ""), names))
    return tuple(found)


@lru_cache(maxsize=256)
def _recorded(folder: str) -> frozenset[str]:
    names: set[str] = set()
    try:
        there = os.listdir(folder)
    except OSError:  # it is no folder, or nobody may look there
        return frozenset()
    for info in there:
        if info.endswith(".dist-info"):
            with contextlib.suppress(OSError, UnicodeDecodeError):
                record = Path(folder, info, "RECORD").read_text("utf-8")
                names |= {line.partition(",")[0].partition("/")[0] for line in record.splitlines()}
    return frozenset(names.difference(_SHARED))
