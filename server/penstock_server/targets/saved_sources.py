"""The sources of the user's modules as they were when the daemon started (`serve --reload`).

The daemon writes them to a file, and workers import the modules from there. So a worker that starts after somebody
edited a module has the code of the epochs that are being read, also if the new code is broken or a file is gone.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

VARIABLE = "PENSTOCK_SOURCES"
"""The environment variable with the path of the file, in workers of a daemon that has saved its sources."""

_saved: dict[str, bytes] = {}


def write(file: Path, sources: Mapping[Path, bytes]) -> None:
    """Write the sources, by path, to a file for workers."""
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.msgpack.encode({str(path): data for path, data in sources.items()}))
    os.replace(new, file)


def use() -> None:
    """Import modules from the saved sources from now on, if the daemon has saved them."""
    file = os.environ.get(VARIABLE)
    if file and not _saved:
        _saved.update(msgspec.msgpack.decode(Path(file).read_bytes(), type=dict[str, bytes]))
        sys.meta_path.insert(0, _Finder())


def exists(path: str) -> bool:
    """Return whether a source file exists, saved or on the disk."""
    return path in _saved or os.path.isfile(path)


def read(path: str) -> bytes:
    """Return what is in a source file: as it was saved, or as it is.

    Raises:
        OSError: it was not saved, and cannot be read.
    """
    found = _saved.get(path)
    return Path(path).read_bytes() if found is None else found


def spec_of(name: str, path: str) -> ModuleSpec | None:
    """Return the spec of the module `name` in this file, for `importlib`."""
    loader = _Loader(name, path) if path in _saved else None
    return importlib.util.spec_from_file_location(name, path, loader=loader)


class _Loader(SourceFileLoader):
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
    """Finds the modules whose sources were saved; all others are left to the next finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find a module for `importlib`."""
        last = name.rpartition(".")[2]
        for place in sys.path if path is None else path:
            for inside in (f"{last}/__init__.py", f"{last}.py"):
                file = os.path.join(place or os.getcwd(), inside)
                if file in _saved:
                    return spec_of(name, file)
                if os.path.isfile(file):
                    return None  # it comes before those that were saved
        return None
