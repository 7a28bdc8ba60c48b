"""Decides which files of the user's code Ray copies to the hosts, and collects them in one folder.

The folder becomes the working directory of each host. A file below the current directory keeps its place there, so
that `data/scenes.py:train` means the same here and at a host. Only .py files are copied, because a folder of code often
holds data too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock_proto import StartError
from penstock_proto.params import split_params

from ..targets.file_target import files_of, is_file_target, transforms_of
from ..targets.installed import is_installed
from ..targets.place import file_of, place_of

MOST_ENTRIES = 100_000
"""Maximum number of files and folders to look at below one folder of code."""
MOST_BYTES = 64 << 20
"""Maximum bytes of code in total."""


def collect(feeds: Sequence[str], into: Path) -> list[str]:
    """Copy the code of feeds into a folder, and return the feeds as they are named there.

    Args:
        feeds: MODULE:ATTR of each feed, or what `make_target` returned.
        into: an empty folder. It stays empty if all modules are installed packages.

    Raises:
        StartError: there is no such file or module, its folder holds too much, or hosts would not find data files.
    """
    here = Path.cwd()
    places: dict[Path, Path] = {}
    """Where to copy each folder of code, relative to `into`."""

    def named_there(target: str) -> str:
        folder, file = _code_of(target, here)
        if folder is None:
            return target
        below = folder.is_relative_to(here)
        elsewhere = Path(f"code{len(places)}", folder.name if place_of(target).in_package else "")
        place = places.setdefault(folder, folder.relative_to(here) if below else elsewhere)
        return target if file is None or below else f"{place / file}{target[len(_module_of(target)) :]}"

    result = []
    for feed in feeds:
        if not is_file_target(feed):
            result.append(named_there(feed))
            continue
        if relative := [file for file in files_of(feed) if "://" not in file and not os.path.isabs(file)]:
            raise StartError(f"{relative[0]} is not below the hosts' current directory: give an absolute path or a URL")
        for transform in transforms_of(feed):
            if named_there(transform) != transform:
                raise StartError(f"--transform {transform} is not in {here} or below: start Penstock where it is")
        result.append(feed)
    size = sum(_copy(folder, into / place) for folder, place in places.items())
    if size > MOST_BYTES:
        raise StartError(_too_much(next(iter(places)), f"{size >> 20} MiB of code"))
    return result


def _module_of(target: str) -> str:
    return split_params(target)[0].rpartition(":")[0]


def _code_of(target: str, here: Path) -> tuple[Path | None, str | None]:
    """Return the folder whose code a target needs, and the file in it if the target names one. There is no folder if
    the module is installed or elsewhere on the Python path, where the hosts must have it too."""
    place = place_of(target)
    name, path = place.name, place.path
    if path is not None:
        if not os.path.isfile(path):
            raise StartError(f"{path}: no such file")
        folder = Path(place.root, name.partition(".")[0]) if place.in_package else Path(place.root)
        return folder, str(Path(path).relative_to(folder))
    found = file_of(name)
    if found is None:
        raise StartError(f"there is no module {name} in {here} or on the Python path")
    ours = Path(found).is_relative_to(here) and not is_installed(found)
    return (here if ours else None), None


def _copy(folder: Path, into: Path) -> int:
    """Copy the .py files of a folder and those below, and return their size in bytes."""
    size = 0
    for file in _python_files(folder):
        copy = into / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        size += copy.stat().st_size
    return size


def _python_files(folder: Path) -> Iterator[Path]:
    seen = 0
    for place, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > MOST_ENTRIES:
            raise StartError(_too_much(folder, f"more than {MOST_ENTRIES} files"))
        folders[:] = sorted(name for name in folders if not _is_no_code(os.path.join(place, name)))
        yield from (Path(place, name) for name in sorted(files) if name.endswith(".py"))


def _is_no_code(folder: str) -> bool:
    """Return whether a folder is hidden, a cache, or a virtual environment."""
    name = os.path.basename(folder)
    return name.startswith(".") or name == "__pycache__" or os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _too_much(folder: Path, what: str) -> str:
    return f"Ray takes the code of {folder} to the hosts, and it holds {what}: put the feed into a folder of its own"
