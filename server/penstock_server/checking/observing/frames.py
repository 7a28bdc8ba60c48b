"""Finds the lines of user code among the frames of a thread."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from ...logs.own_code import OURS
from ...targets.installed import is_installed

_STDLIB = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = ("site-packages", "dist-packages")


def walk(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_ours(frame: FrameType) -> bool:
    """Return whether the frame runs Penstock's code."""
    return frame.f_code.co_filename.startswith(OURS)


def is_import(frame: FrameType) -> bool:
    """Return whether the frame runs Python's import system."""
    return frame.f_code.co_filename.startswith("<frozen importlib")


def is_standard(frame: FrameType) -> bool:
    """Return whether the frame runs Python's standard library."""
    file = frame.f_code.co_filename
    if file.startswith("<frozen"):
        return True
    return file.startswith(_STDLIB) and not any(part in _PACKAGES for part in Path(file).parts)


def package_of(frame: FrameType) -> str:
    """Return the name of the installed package whose code the frame runs, or an empty text."""
    parts = Path(frame.f_code.co_filename).parts
    for place in _PACKAGES:
        if place in parts:
            below = parts[parts.index(place) + 1 :]
            return below[0].removesuffix(".py") if below else ""
    return ""


def is_users(frame: FrameType) -> bool:
    """Return whether the frame runs the user's own code."""
    file = frame.f_code.co_filename
    return not file.startswith("<") and not is_ours(frame) and not is_installed(file)


def site(frame: FrameType) -> str:
    """Return where a frame is: "scenes.py:12 in rows", or "scenes.py:12, at import"."""
    code = frame.f_code
    where = ", at import" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{where}"
