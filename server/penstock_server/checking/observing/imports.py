"""Watches the imports of user code: the installed packages, their time and memory, the chain of lines that imports
each, and the files that stay open afterwards."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...logs.own_code import OURS
from ...sources.hdf5.format import Hdf5
from ...targets.installed import is_installed
from . import frames
from .messages import Library, OpenFile

_MOST_LIBRARIES = 64


class ImportWatch(MetaPathFinder):
    """Measures the import of each installed top-level package, from its construction on."""

    def __init__(self) -> None:
        self._chains: dict[str, tuple[str, ...]] = {}
        self._found: dict[str, Library] = {}
        self._searching = False
        sys.meta_path.insert(0, self)

    def libraries(self) -> tuple[Library, ...]:
        """Return the imported packages, the slowest first."""
        found = sorted(self._found.values(), key=lambda library: -library.seconds)
        return tuple(found[:_MOST_LIBRARIES])

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Measure the module if it is an installed package. `importlib` calls this; None passes to the next finder."""
        if self._searching or "." in name:
            return None
        self._searching = True
        try:
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                find = getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = None if find is None else find(name, path, target)
                if spec is not None:
                    place = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
                    if spec.loader is not None and is_installed(place) and not _is_standard(place):
                        self._measure(name, spec.loader, _chain(sys._getframe(1)))
                    return spec
        finally:
            self._searching = False
        return None

    def _measure(self, name: str, loader: object, chain: tuple[str, ...]) -> None:
        run = getattr(loader, "exec_module", None)
        if run is None:
            return

        def exec_module(module: ModuleType) -> None:
            began, before = time.monotonic(), resident()
            try:
                run(module)
            finally:
                with contextlib.suppress(AttributeError):
                    del loader.exec_module  # type: ignore[attr-defined]
                self._found[name] = Library(name, time.monotonic() - began, max(0, resident() - before), chain)

        with contextlib.suppress(AttributeError, TypeError):  # a loader that takes no attributes
            loader.exec_module = exec_module  # type: ignore[attr-defined]


def resident() -> int:
    """Return the resident memory of this process in bytes; without /proc, the most that it ever had."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_paths() -> dict[int, str]:
    """Return the path of each regular file and device that this process has open; none without /proc."""
    found: dict[int, str] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError):  # the fd of the listing itself
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith("/") and (os.path.isfile(path) or path.startswith("/dev/")):
                found[int(name)] = path
    return found


def files_opened(before: dict[int, str]) -> tuple[OpenFile, ...]:
    """Return the open data files that were not open at `before`, an earlier result of `open_paths`."""
    new = [path for fd, path in open_paths().items() if before.get(fd) != path]
    ours = sorted({path for path in new if not path.startswith(("/dev/", "/proc/", "/memfd:")) and not _is_code(path)})
    return tuple(OpenFile(path, tuple(_holders(path))[:4], _is_hdf5(path)) for path in ours[:16])


def user_modules() -> Iterator[ModuleType]:
    """Yield the modules that are the user's own."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not is_installed(file) and not file.startswith(OURS):
            yield module


def _holders(path: str) -> Iterator[str]:
    """Yield the names in user modules whose objects have this file open, if their attributes name the file."""
    for module in user_modules():
        for name, value in list(vars(module).items()):
            for attribute in ("filename", "name", "_filename"):
                if _names(value, attribute, path):
                    yield f"{name} in {os.path.basename(module.__file__ or '')}"
                    break


def _names(value: Any, attribute: str, path: str) -> bool:
    if isinstance(value, ModuleType | type) or callable(value):
        return False
    try:
        named = getattr(value, attribute, None)
        return isinstance(named, str | os.PathLike) and os.path.realpath(os.fspath(named)) == path
    except BaseException:  # the attributes of `value` are user code
        return False


def _is_code(path: str) -> bool:
    return path.endswith((".so", ".py", ".pyc")) or ".so." in os.path.basename(path) or is_installed(path)


def _is_hdf5(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return Hdf5().recognizes(file.read(8))
    except OSError:
        return False


def _is_standard(path: str) -> bool:
    return "site-packages" not in path and "dist-packages" not in path


def _chain(frame: Any) -> tuple[str, ...]:
    """Return the chain of importing lines, from the user's module to this import."""
    lines = []
    for caller in frames.walk(frame):
        if caller.f_code.co_name == "<module>" and not frames.is_ours(caller) and not frames.is_standard(caller):
            package = frames.package_of(caller)
            name = str(caller.f_globals.get("__name__", "")) if package else ""
            lines.append(name or f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}")
        elif frames.is_users(caller):
            lines.append(frames.site(caller))
    lines.reverse()
    shortened = [line for at, line in enumerate(lines) if not at or line.split(".")[0] != lines[at - 1].split(".")[0]]
    return tuple(shortened if len(shortened) <= 8 else [*shortened[:6], "...", shortened[-1]])
