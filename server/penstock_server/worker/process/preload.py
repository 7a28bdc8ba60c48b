"""Imports the libraries that the user's modules import before they do anything else.

It runs none of the user's code: it reads modules that are not installed, and never imports them. It takes the imports
of each file, and follows those of other modules that are not installed. Of a `try`, it takes the parts that Python
runs, which depends on the modules that are there. Definitions and constants (definitions.py) are passed over. The first
statement of another kind ends the search, because it may change what a later import does: `matplotlib.use("Agg")`. Only
`os.environ["..."] = "..."` with plain text is done here as well, since it often stands before `import tensorflow`. So
each library is imported as the worker would have imported it, in the same order.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from ...targets import saved_sources
from ...targets.file_target import is_file_target, library_of, transforms_of
from ...targets.importing import join_path
from ...targets.installed import is_installed
from ...targets.pickled import is_pickled_target
from ...targets.place import place_of
from .definitions import handler_of_missing, only_defines

Steps: TypeAlias = Generator[str, None, bool]
"""Yields the names of imported modules, and returns whether the search goes on."""


class ImportFailed(Exception):
    """Importing the package in its first argument raised an error."""


class _Missing(Exception):
    """There is no such module, or it has no such name."""


def preload(
    targets: Sequence[str], without: Collection[str] = (), ended: Callable[[str], None] = lambda place: None
) -> Iterator[str]:
    """Import the libraries of the feeds' modules one at a time, and yield the name of each after its import.

    Args:
        targets: the MODULE:ATTR arguments. Their directories are added to `sys.path`, as when a worker loads them.
        without: names of packages to leave out.
        ended: called with the place of the statement that ends the search, FILE:LINE.

    Raises:
        ImportFailed: a library cannot be imported.
    """
    search = _Search(frozenset(without), ended)
    try:
        yield from _preload(targets, search)
    finally:
        search.restore_variables()  # the modules set them again


def _preload(targets: Sequence[str], search: _Search) -> Iterator[str]:
    modules: list[str] = []
    for target in targets:
        if is_file_target(target):
            with contextlib.suppress(_Missing):  # the worker reports it
                yield from search.module(library_of(target), [])
            modules += transforms_of(target)
        elif not is_pickled_target(target):
            modules.append(target)
    for target in modules:
        place = place_of(target)
        join_path(place.root, last=place.path is None)
        by_name = place.path is None or place.in_package
        begins = search.module(place.name, []) if by_name else search.file(Path(place.path or ""), "")
        try:
            if not (yield from begins):
                return
        except _Missing:
            return  # the worker reports it


def _variable(statement: ast.stmt) -> tuple[str, str] | None:
    """Return name and value if a statement is `os.environ["NAME"] = "VALUE"`. Variables of Python and Penstock, which
    workers inherit otherwise, do not count."""
    match statement:
        case ast.Assign(
            targets=[
                ast.Subscript(ast.Attribute(ast.Name("os"), "environ"), ast.Constant(str() as name)),
            ],
            value=ast.Constant(str() as value),
        ) if name and not name.startswith(("PYTHON", "PENSTOCK_")) and "\0" not in name + value and "=" not in name:
            return name, value
    return None


class _Search:
    def __init__(self, without: Collection[str], ended: Callable[[str], None]) -> None:
        self._without = without
        self._on_end = ended
        self._read: set[Path] = set()
        self._variables: dict[str, tuple[str | None, str]] = {}
        """The value of each variable before, and now."""

    def restore_variables(self) -> None:
        """Give the variables that were set their earlier values, unless a library has changed them."""
        for name, (before, now) in self._variables.items():
            if os.environ.get(name) != now:
                continue
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before

    def file(self, path: Path, package: str) -> Steps:
        """Import the modules that a file imports at its beginning. The file's own module is in `package`.

        Raises:
            _Missing: one is missing, and the file has no handler for that.
        """
        if path in self._read:
            return True
        self._read.add(path)
        try:
            body = ast.parse(saved_sources.read(str(path))).body
        except (OSError, SyntaxError, ValueError, RecursionError):
            return False  # the worker reports what is wrong with it
        return (yield from self._statements(body, path, package))

    def _statements(self, body: list[ast.stmt], path: Path, package: str) -> Steps:
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    if not (yield from self.module(alias.name, [])):
                        return False
            elif isinstance(statement, ast.ImportFrom):
                name = _absolute(statement, package)
                if not (yield from self.module(name, [alias.name for alias in statement.names])):
                    return False
            elif isinstance(statement, ast.Try):
                if not (yield from self._attempt(statement, path, package)):
                    return False
            elif (variable := _variable(statement)) is not None:
                name, value = variable
                first, _ = self._variables.get(name, (os.environ.get(name), ""))
                self._variables[name] = first, value
                os.environ[name] = value
            elif not only_defines(statement):
                self._on_end(f"{path}:{statement.lineno}")
                return False
        return True

    def _attempt(self, statement: ast.Try, path: Path, package: str) -> Steps:
        """Take the imports of a `try`, or those of its handler if a module is missing."""
        try:
            if not (yield from self._statements(statement.body, path, package)):
                return False
        except _Missing:
            handler = handler_of_missing(statement)
            if handler is None:
                raise
            rest = handler.body
        else:
            rest = statement.orelse
        return (yield from self._statements([*rest, *statement.finalbody], path, package))

    def module(self, name: str, wanted: list[str]) -> Steps:
        """Do `import name`, or `from name import ...` for the names in `wanted`.

        Raises:
            _Missing: there is no such module, or no such name in it.
        """
        place: list[str] | None = None
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            if module in sys.modules or (depth == 1 and module in sys.builtin_module_names):
                return (yield from self._library(name, wanted))
            spec = find_spec(module) if place is None else PathFinder.find_spec(module, place)
            if spec is None:
                raise _Missing
            places = list(spec.submodule_search_locations or ())
            if is_installed(spec.origin or next(iter(places), "")):
                return (yield from self._library(name, wanted))
            if spec.origin is not None:
                inside = module if places else module.rpartition(".")[0]
                if not spec.origin.endswith(".py") or not (yield from self.file(Path(spec.origin), inside)):
                    return False
            place = places
        for one in wanted if place else ():
            there = PathFinder.find_spec(f"{name}.{one}", place) is not None
            if there and not (yield from self.module(f"{name}.{one}", [])):
                return False
        return True

    def _library(self, name: str, wanted: list[str]) -> Steps:
        if name.partition(".")[0] not in self._without:
            names = [one for one in wanted if one != "*"]
            try:
                module = __import__(name, fromlist=names)
            except ModuleNotFoundError as error:
                if not f"{name}.".startswith(f"{error.name}."):
                    raise ImportFailed(name.partition(".")[0]) from None
                module = None
                name = str(error.name).rpartition(".")[0]  # which was imported
            except (Exception, SystemExit):
                raise ImportFailed(name.partition(".")[0]) from None  # the worker reports what is wrong with it
            if name:
                yield name
            if module is None or not all(hasattr(module, one) for one in names):
                raise _Missing
        return True


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    """Return the whole name of the module in `from ... import`.

    Raises:
        _Missing: it is relative, and beyond the package.
    """
    if not statement.level:
        return statement.module or ""
    parts = package.split(".") if package else []
    if statement.level > len(parts):
        raise _Missing
    return ".".join([*parts[: len(parts) - statement.level + 1], *filter(None, [statement.module])])
