"""The user's files that make up the code of feeds: their modules, and those that these import, of their own directory
tree and of the Python path. Installed packages do not count.

Imports are read from the source and nothing is run, so imports inside functions are found, too.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from . import pickled, saved_sources
from .file_target import is_file_target, transforms_of
from .installed import is_installed
from .place import place_of

Contents: TypeAlias = dict[Path, bytes]
"""A digest of each file; empty for one that cannot be read."""

_Import: TypeAlias = tuple[int, str]
"""How many dots come first, and the name of a module."""

_MOST_PARSED = 1 << 20
"""Bytes of a source up to which its imports are looked for: parsing takes a hundred times as much memory."""

_OURS = ("penstock", "penstock_server", "penstock_proto")


class Sources:
    """Finds these files, and remembers what was read of them.

    Args:
        targets: MODULE:ATTR of each feed, or the strings of data files.
        loaded: the files of the modules that a pickled feed may use.
    """

    def __init__(self, targets: Sequence[str], loaded: Sequence[bytes] = ()) -> None:
        modules = [
            module
            for target in targets
            if not pickled.is_pickled_target(target)
            for module in (transforms_of(target) if is_file_target(target) else [target])
        ]
        self._places = [place_of(module) for module in modules]
        self._loaded = [Path(os.fsdecode(file)) for file in loaded]
        path = map(saved_sources.absolute, sys.path)
        self._path = [Path(place) for place in path if not is_installed(os.path.join(place, ""))]
        self._imports: dict[bytes, list[_Import]] = {}
        """By digest of a file, so that each version is parsed once."""

    def contents(self) -> Contents:
        """Return which files these are now, and what is in them."""
        return digests(self.texts())

    def texts(self) -> dict[Path, bytes]:
        """Return which files these are now, with what is in them; nothing for one that cannot be read."""
        found: dict[Path, bytes] = {}
        for place in self._places:
            roots = [Path(place.root), *self._path]
            if place.path is None or place.in_package:
                self._follow(_first(roots, place.name), roots, found)
            else:
                self._follow([Path(place.path)], roots, found)
        self._follow([file for file in self._loaded if os.path.isfile(file)], self._path, found)
        return found

    def _follow(self, todo: list[Path], roots: Sequence[Path], found: dict[Path, bytes]) -> None:
        while todo:
            file = todo.pop()
            if file in found:
                continue
            found[file] = data = _read(file)
            digest = _digest(data)
            if digest not in self._imports:
                self._imports[digest] = list(_imported(data))
            for dots, module in self._imports[digest]:
                if not dots:
                    todo += _first(roots, module)
                elif dots <= len(file.parents):
                    todo += _files(file.parents[dots - 1], module)


def loaded_files() -> tuple[bytes, ...]:
    """Return the files of the user's modules that this process has imported."""
    files = (getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _is_users(name))
    found = (os.path.abspath(file) for file in files if isinstance(file, str) and file.endswith(".py"))
    return tuple(sorted({os.fsencode(file) for file in found if not is_installed(file)}))


def digests(texts: Mapping[Path, bytes]) -> Contents:
    """Return the digests of these files."""
    return {file: _digest(data) for file, data in texts.items()}


def changed(before: Contents, now: Contents) -> str:
    """Name the files that were edited, removed or added, in words.

    A file that nothing imports any longer is named only if it has changed on the disk. (While a module has a syntax
    error, its imports are unknown.)
    """
    there = {path: _digest(_read(path)) for path in before.keys() - now.keys() if path.exists()} | now
    names = sorted({path.name for path in before.keys() | there.keys() if before.get(path) != there.get(path)})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest() if data else b""


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _imported(data: bytes) -> Iterator[_Import]:
    """Yield what this source imports; with `from x import y` that may be the module x.y, too."""
    if len(data) > _MOST_PARSED:
        return  # a table of data, most likely
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError):
        return  # a worker says what is wrong
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            for alias in node.names:
                yield node.level, f"{module}{alias.name}"


def _is_users(module: str) -> bool:
    return module.partition(".")[0] not in _OURS


def _first(roots: Sequence[Path], module: str) -> list[Path]:
    """Return these files in the first directory that has some."""
    found = (list(_files(root, module)) for root in roots if _is_users(module))
    return next(filter(None, found), [])


def _files(base: Path, module: str) -> Iterator[Path]:
    """Yield the files that are run when the module is imported: those of its packages, and its own."""
    place = base
    for part in module.split("."):
        for file in (place / part / "__init__.py", place / f"{part}.py"):
            if os.path.isfile(file) and not is_installed(str(file)):  # False also if it may not be looked at
                yield file
        place = place / part
