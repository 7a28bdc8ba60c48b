"""Finds the module that a target, MODULE:ATTR, names: its name, its file, and the directory to import it from."""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from typing import NamedTuple

from penstock_proto.params import split_params

from . import saved_sources
from .file_target import is_file_target, shown_target, transforms_of


class Place(NamedTuple):
    """Where a module is.

    Attributes:
        name: the module's name.
        path: the absolute path of its file, or None if the target gives only the name.
        root: the directory that must be on `sys.path`.
    """

    name: str
    path: str | None
    root: str

    @property
    def in_package(self) -> bool:
        """Whether the target names a file that belongs to a package."""
        return self.path is not None and self.root != os.path.dirname(self.path)


def place_of(target: str) -> Place:
    """Return where the module in `target` is.

    A file that uses relative imports, and whose folder is a package, is a module of that package. Any other file is a
    module of its own.
    """
    module = split_params(target)[0].rpartition(":")[0]
    if not module.endswith(".py") and os.sep not in module:
        return Place(module, None, os.getcwd())
    path = _absolute(module)
    folder, file = os.path.split(path)
    name = os.path.splitext(file)[0]
    if saved_sources.exists(os.path.join(folder, "__init__.py")) and _imports_relatively(path):
        parts, root = [] if name == "__init__" else [name], folder
        while saved_sources.exists(os.path.join(root, "__init__.py")) and os.path.basename(root).isidentifier():
            root, package = os.path.split(root)
            parts.insert(0, package)
        if root != folder:
            return Place(".".join(parts), path, root)
    if name == "__main__":  # the process that imports it has another one
        name = "__mp_main__"  # as in multiprocessing
    return Place(name, path, folder)


def is_same_file(one: str | None, other: str) -> bool:
    """Return whether both paths lead to one file, perhaps through symbolic links."""
    if one is None or one == other:
        return one == other
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def file_of(name: str) -> str | None:
    """Return the file of a module, without importing it or the packages that it is in."""
    places: list[str] | None = [os.getcwd(), *sys.path]
    found = None
    for part in name.split("."):
        found = importlib.machinery.PathFinder.find_spec(part, places)
        if found is None:
            return None
        places = found.submodule_search_locations
    return found.origin if found is not None else None


def argv_of(target: str) -> list[str]:
    """Return `sys.argv` of the target's module under `penstock serve`: the path of its file."""
    if is_file_target(target):
        return [next((file for one in transforms_of(target) for file in argv_of(one)), shown_target(target))]
    place = place_of(target)
    return [place.path or file_of(place.name) or place.name]


def _absolute(path: str) -> str:
    """Return the absolute path of a file. It has no `..`, unless one comes after a symbolic link."""
    joined = os.path.join(os.getcwd(), path)
    normal = os.path.normpath(joined)
    return normal if not os.path.exists(joined) or is_same_file(joined, normal) else os.path.realpath(joined)


def _imports_relatively(path: str) -> bool:
    try:
        tree = ast.parse(saved_sources.read(path))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False  # a worker says what is wrong
    return any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree))
