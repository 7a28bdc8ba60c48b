"""The user's files that make up the code of feeds: their modules, and what these import from the same directory tree.

Imports are read from the source and nothing is run, so imports inside functions are found, too.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from ..targets.file_target import is_file_target, transforms_of
from ..targets.importing import is_installed
from ..targets.place import place_of

Contents: TypeAlias = dict[Path, bytes]
"""A digest of each file; empty for one that cannot be read."""

_Import: TypeAlias = tuple[int, str]
"""How many dots come first, and the name of a module."""


class Sources:
    """Finds these files, and remembers what was read of them.

    Args:
        targets: MODULE:ATTR of each feed, or the strings of data files.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        modules = [
            module for target in targets for module in (transforms_of(target) if is_file_target(target) else [target])
        ]
        self._places = [place_of(module) for module in modules]
        self._imports: dict[bytes, list[_Import]] = {}
        """By digest of a file, so that each version is parsed once."""

    def contents(self) -> Contents:
        """Return which files these are now, and what is in them."""
        return digests(self.texts())

    def texts(self) -> dict[Path, bytes]:
        """Return which files these are now, with what is in them; nothing for one that cannot be read."""
        found: dict[Path, bytes] = {}
        for place in self._places:
            root = Path(place.root)
            todo = list(_files(root, place.name)) if place.path is None or place.in_package else [Path(place.path)]
            while todo:
                file = todo.pop()
                if file in found:
                    continue
                found[file] = data = _read(file)
                digest = _digest(data)
                if digest not in self._imports:
                    self._imports[digest] = list(_imported(data))
                for dots, module in self._imports[digest]:
                    base = file.parents[dots - 1] if dots else root
                    if base.is_relative_to(root):
                        todo += _files(base, module)
        return found


def digests(texts: Mapping[Path, bytes]) -> Contents:
    """Return the digests of these files."""
    return {file: _digest(data) for file, data in texts.items()}


def changed(before: Contents, now: Contents) -> str:
    """Name the files that differ, in words."""
    names = sorted({path.name for path in before.keys() | now.keys() if before.get(path) != now.get(path)})
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


def _files(base: Path, module: str) -> Iterator[Path]:
    """Yield the files that are run when the module is imported: those of its packages, and its own."""
    place = base
    for part in module.split("."):
        for file in (place / part / "__init__.py", place / f"{part}.py"):
            if file.is_file() and not is_installed(str(file)):
                yield file
        place = place / part
