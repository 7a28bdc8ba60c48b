"""The sources of the user's modules as they were when the daemon, or a host, started its workers.

It keeps them in a memfd, and workers import the modules from there. So a worker that starts after somebody edited a
module makes the same samples as the others, also if the new code is broken or a file is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import linecache
import os
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

VARIABLE = "PENSTOCK_SOURCES"
"""The environment variable with the path of the memfd, in a process that keeps sources and in its children."""

_saved: dict[str, bytes] = {}
_fd: int | None = None


def keep(sources: Mapping[Path, bytes]) -> None:
    """Keep these sources, by path, for the processes that this one starts from now on, instead of earlier ones."""
    global _fd
    now = time.time_ns()
    new = os.memfd_create("penstock-sources", os.MFD_CLOEXEC)
    _saved.clear()
    _saved.update({str(path): data for path, data in sources.items() if data or os.access(path, os.R_OK)})
    with open(new, "wb", closefd=False) as file:
        file.write(msgspec.msgpack.encode((now, [(os.fsencode(path), data) for path, data in _saved.items()])))
    if _fd is None:
        _fd = new
    else:
        os.dup2(new, _fd, inheritable=False)  # a process that is starting reads either
        os.close(new)
    path = f"/proc/{os.getpid()}/fd/{_fd}"
    if os.access(path, os.R_OK):  # without /proc this does not work, and the daemon says so
        os.environ[VARIABLE] = path


def use() -> None:
    """Import modules from the saved sources from now on, if there are some. Child processes do not."""
    file = os.environ.pop(VARIABLE, None)
    if file is not None and not _saved:
        since, saved = msgspec.msgpack.decode(Path(file).read_bytes(), type=tuple[int, list[tuple[bytes, bytes]]])
        _saved.update({os.fsdecode(path): data for path, data in saved})
        sys.meta_path.insert(0, _Finder(since))


def exists(path: str) -> bool:
    """Return whether a source file exists, saved or on the disk."""
    return _key(path) in _saved or os.path.isfile(path)


def read(path: str) -> bytes:
    """Return what is in a source file: as it was saved, or as it is.

    Raises:
        OSError: it was not saved, and cannot be read.
    """
    found = _saved.get(_key(path))
    return Path(path).read_bytes() if found is None else found


def spec_of(name: str, path: str) -> ModuleSpec | None:
    """Return the spec of the module `name` in this file, for `importlib`."""
    loader = SavedSourceLoader(name, path) if _key(path) in _saved else None
    return importlib.util.spec_from_file_location(name, path, loader=loader)


class SavedSourceLoader(SourceFileLoader):
    """Runs a saved source. It ignores compiled code, which may be that of a newer source."""

    def get_data(self, path: str) -> bytes:
        return read(path)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        data = read(path)
        code: CodeType = self.source_to_code(data, path)
        lines = importlib.util.decode_source(data).splitlines(keepends=True)
        linecache.cache[path] = len(data), None, lines, path  # for tracebacks, instead of the lines of the file
        return code


class _Finder(MetaPathFinder):
    """Finds the modules whose sources were saved, also if their files are gone, and the namespace packages that hold
    them. All other modules are left to the next finders.

    A file that was made later does not come before a module that was saved.

    Args:
        since: when the sources were saved, in ns since the epoch.
    """

    def __init__(self, since: int) -> None:
        self._since = since
        self._folders = {str(folder) for file in _saved for folder in Path(file).parents}
        self._names = {*map(_last_name, _saved), *map(os.path.basename, self._folders)}
        """The last parts of the names of these modules and packages."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module for `importlib`."""
        last = name.rpartition(".")[2]
        if last not in self._names:
            return None
        portions: list[str] = []
        newer = False
        for place in sys.path if path is None else path:
            base = os.path.join(absolute(place), last)
            saved = next((file for file in (f"{base}/__init__.py", f"{base}.py") if _key(file) in _saved), None)
            on_disk = PathFinder.find_spec(name, [place])
            loader = None if on_disk is None else on_disk.loader
            if saved is not None and not isinstance(loader, ExtensionFileLoader):  # that comes before a source
                return spec_of(name, saved)
            if on_disk is not None and loader is not None:
                if not self._is_newer(on_disk):
                    return None
                newer = True
            if _key(base) in self._folders or (on_disk is not None and loader is None):
                portions.append(base)
        if not portions or not (newer or any(not os.path.isdir(portion) for portion in portions)):
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = portions
        return spec

    def _is_newer(self, found: ModuleSpec) -> bool:
        """Return whether a module's file was made or changed after the sources were saved."""
        with contextlib.suppress(OSError):  # it may lie in an archive
            return found.origin is not None and os.stat(found.origin).st_ctime_ns > self._since
        return False


def absolute(place: str) -> str:
    """Return an entry of the Python path as the finder of files makes it absolute. One that is relative to a deleted
    working directory stays relative."""
    if os.path.isabs(place):
        return place
    with contextlib.suppress(FileNotFoundError):
        return os.path.join(os.getcwd(), place)
    return place


def _key(path: str) -> str:
    """Return the path as in `_saved`, without `.` and doubled slashes."""
    return str(Path(path))


def _last_name(path: str) -> str:
    """Return the last part of the name of the module in this file."""
    folder, file = os.path.split(path)
    return os.path.basename(folder) if file == "__init__.py" else os.path.splitext(file)[0]
