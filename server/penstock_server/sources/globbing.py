"""Which files and folders match a pattern. glob.glob would leave out those in folders that cannot be listed, and follow
links in circles."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections import deque
from collections.abc import Iterator

_NOT_LISTED = "lost+found"
"""The folder of a file system itself, which only root may list."""


def matching(pattern: str) -> list[str]:
    """Return the names of all that matches a pattern, as glob.glob with `recursive` does, sorted by name. Each folder
    below a `**` comes once, even if there are links to it.

    Raises:
        OSError: a folder cannot be listed; the message names it.
    """
    return sorted({name for name in _found(pattern) if name})


def _found(pattern: str) -> Iterator[str]:
    folder, last = os.path.split(pattern)
    folders = _found(folder) if folder != pattern and glob.has_magic(folder) else [folder]
    for one in folders:
        if last == "**":
            yield from _below(one)
        elif glob.has_magic(last):
            names = [entry.name for entry in _entries(one) if last.startswith(".") or not entry.name.startswith(".")]
            yield from (os.path.join(one, name) for name in fnmatch.filter(names, last))
        elif os.path.isdir(one) if not last else _exists(one, last):
            yield os.path.join(one, last)


def _below(folder: str) -> Iterator[str]:
    """Yield a folder, and all that is in it at any depth. Links to folders are followed, after all others, if they lead
    to folders that have not been seen."""
    seen = set()
    left = deque([os.path.join(folder, "")])
    while left:
        here = left.popleft()
        if not os.path.isdir(here or "."):
            continue
        status = os.stat(here or ".")
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        yield here
        for entry in sorted(_entries(here), key=lambda entry: entry.name):
            path = os.path.join(here, entry.name)
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                left.appendleft(path)
            elif entry.is_symlink() and os.path.isdir(path):
                left.append(path)
            else:
                yield path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    if os.path.basename(folder) == _NOT_LISTED:
        return []
    try:
        with os.scandir(folder or ".") as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unlisted(folder, error) from None


def _exists(folder: str, name: str) -> bool:
    try:
        os.lstat(os.path.join(folder, name))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        if os.path.basename(folder) == _NOT_LISTED:
            return False
        raise _unlisted(folder, error) from None
    return True


def _unlisted(folder: str, error: OSError) -> OSError:
    return type(error)(
        f"{folder or '.'} cannot be listed ({error.strerror}), so files may be missing: let the user of the workers "
        "read it, or write a pattern that leaves it out"
    )
