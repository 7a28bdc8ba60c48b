"""Files by path or URL: patterns, sizes, and opening them in the worker that reads them.

A local path needs no package. A URL needs obstore, whose threads do not survive a fork, so nothing may be opened before
a worker runs. `remote` reads URLs, and says how.
"""

from __future__ import annotations

import difflib
import glob
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from penstock_proto.value_text import shown

from . import globbing
from .remote import urls

Files: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"
"""One path, pattern or URL, or a list of them."""

_BUFFER = 1 << 18


def checked(files: Files) -> tuple[str, ...]:
    """Return `files` as a tuple of strings, with patterns as they are.

    Raises:
        TypeError: it holds something other than paths.
        ValueError: it is empty.
    """
    many = [files] if isinstance(files, str | os.PathLike) else files
    if not isinstance(many, Sequence) or isinstance(many, bytes):
        raise TypeError(f"files must be a path, a pattern, a URL or a list of these, got {shown(files)}")
    for file in many:
        if not isinstance(file, str | os.PathLike) or not isinstance(os.fspath(file), str):
            raise TypeError(f"files must be paths, patterns or URLs, got {shown(file)}")
    if not many:
        raise ValueError("files is an empty list: give at least one path, pattern or URL")
    return tuple(urls.shown(os.fspath(file)) for file in many)


def expand(files: Sequence[str]) -> list[str]:
    """Replace each pattern by the files that match it, sorted by name; `**` matches folders of any depth, each once,
    even if there are links to it. For a URL file://PATH, return only the path.

    Raises:
        FileNotFoundError: a pattern matches nothing.
        OSError: a folder cannot be listed.
    """
    found: list[str] = []
    named: list[str] = []  # the URLs that are no patterns
    for file in files:
        file = str(file).removeprefix("file://")
        if is_url(file):
            matches = _matching(file) if urls.has_pattern(file) else [file]
            named += [] if urls.has_pattern(file) or not urls.is_remote(file) else [file]
        elif not glob.has_magic(file) or os.path.exists(file):
            matches = [file]
        else:
            matches = [name for name in globbing.matching(file) if not os.path.isdir(name)]
        if not matches:
            if is_url(file):
                raise FileNotFoundError(f"no file matches {file}: correct the pattern, or the name of the bucket")
            where = "" if os.path.isabs(file) else f" in {os.getcwd()}"
            raise FileNotFoundError(f"no file matches {file}{where}: correct the path, or start in another directory")
        found += matches
        for one in matches:
            check_kind(one)
    if named:
        from .remote import stores

        stores.look_at(named)
    return found


def check_kind(file: str) -> None:
    """Check that a local file is no pipe, socket or device, whose reader might wait for ever. A missing file is
    reported when it is opened.

    Raises:
        OSError: it is one.
    """
    if urls.is_remote(file):
        return
    try:
        mode = os.stat(_path(file)).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(f"{file} is {kind}, and data files are read in several parts: copy the data to a file")


def expand_folders(files: Sequence[str]) -> list[str]:
    """Replace each pattern by the files and folders that match it, sorted by name.

    Raises:
        FileNotFoundError: a pattern matches nothing.
        OSError: a folder cannot be listed.
    """
    found: list[str] = []
    for file in files:
        if is_url(file) or not glob.has_magic(file) or os.path.exists(file):
            found.append(file)
            continue
        matches = globbing.matching(file)
        if not matches:
            raise FileNotFoundError(f"no folder matches {file} in {os.getcwd()}: correct the pattern")
        found += matches
    return found


def _path(file: str) -> str:
    return file.removeprefix(urls.BY_NAME)


def _matching(pattern: str) -> list[str]:
    from .remote import stores

    return stores.matching(pattern)


def is_url(file: str) -> bool:
    """Whether a file is not a local one, such as "s3://bucket/a.h5"."""
    return urls.is_url(file)


def size_of(file: str) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: there is no such file, or it cannot be reached; the message names it.
    """
    with errors_that_name(file):
        if not urls.is_remote(file):
            return os.stat(_path(file)).st_size
        from .remote import stores

        return stores.facts_of(file).size


def size_in_splits(file: str) -> int | None:
    """Return the size of a file, for splits that did not have that of a URL at first: None for local://PATH, so that
    they stay the same.

    Raises:
        OSError: as `size_of`.
    """
    return None if file.startswith(urls.BY_NAME) else size_of(file)


def stamp_of(*files: str) -> list[tuple[str, int | str | None]]:
    """Return what tells each file from its earlier contents, for the keys of cached splits: its absolute path and the
    time of its last change (in ns), or its URL and its ETag. The second is None for a missing file."""
    found: list[tuple[str, int | str | None]] = []
    for file in files:
        changed: int | str | None = None
        with suppress(OSError):
            if urls.is_remote(file):
                changed = _facts_stamp(file)
            elif not is_url(file):
                changed = os.stat(file).st_mtime_ns
        found.append((file if is_url(file) else os.path.abspath(file), changed))
    return found


def _facts_stamp(url: str) -> str:
    from .remote import stores

    facts = stores.facts_of(url)
    return f"{facts.size} {facts.stamp}"


Version: TypeAlias = "tuple[int, int | str]"
"""What tells a file from its earlier contents: its size, and the time of its last change in ns, or its ETag."""


def version_of(file: str) -> Version | None:
    """Return the version of a file; None if it is missing, or cannot be reached."""
    with suppress(OSError, ImportError, ValueError):
        if urls.is_remote(file):
            from .remote import stores

            facts = stores.facts_of(file)
            return facts.size, facts.stamp
        status = os.stat(_path(file))
        return status.st_size, status.st_mtime_ns
    return None


def check_version(file: str, listed: Version) -> None:
    """Check that a file is the one whose splits were listed. The reader reports a file that is missing.

    Raises:
        OSError: it has changed.
    """
    now = version_of(file)
    if now is not None and now != listed and urls.is_remote(file):
        from .remote import stores

        stores.look_at([file])  # this process may remember how it was before it was listed
        now = version_of(file)
    if now is None or now == listed:
        return
    if now[0] != listed[0]:
        raise _changed(file, listed[0], now[0])
    raise OSError(f"{file} has changed: it was written again after its splits were listed. {_STAY_THE_SAME}")


@cache
def paths_here() -> str:
    """Return a text that is the same in all processes for which a path names the same file: those of one kernel with
    the same mounts. Elsewhere the same path may be a copy, with another time."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text()}{os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return os.urandom(8).hex()


def open_binary(file: str, size: int | None = None) -> BinaryIO:
    """Open a file for reading. With `size`, check that it still has that many bytes.

    Raises:
        OSError: it cannot be opened, or its size has changed; the message names the file.
    """
    check_kind(file)
    with errors_that_name(file):
        if urls.is_remote(file):
            from .remote.remote_file import opened as opened_remote

            opened = cast(BinaryIO, opened_remote(file))
        else:
            opened = open(_path(file), "rb", buffering=_BUFFER)  # noqa: SIM115 (the caller closes it)
    try:
        if size is not None:
            check_size(file, size)
    except BaseException:
        opened.close()
        raise
    return opened


def check_size(file: str, size: int | None) -> None:
    """Check that a file has as many bytes as when its splits were listed.

    Raises:
        OSError: its size has changed.
    """
    if size is None:
        return
    now = size_of(file)
    if now != size:
        raise _changed(file, size, now)


_STAY_THE_SAME = (
    "A file must stay the same while it is served: write new data to a new file, and start the daemon again"
)


def _changed(file: str, size: int, now: int) -> OSError:
    return OSError(
        f"{file} has changed: it had {size} bytes when its splits were listed, and now has {now}. {_STAY_THE_SAME}"
    )


class SizeCheck:
    """Compares the sizes of local files with those that they had. HDF5 reads zeros beyond the end of a file.

    Args:
        sizes: the size that each file must have; None if it is not known.
    """

    def __init__(self, sizes: Mapping[str, int | None]) -> None:
        self._sizes = {file: size for file, size in sizes.items() if not urls.is_remote(file)}

    def __call__(self) -> None:
        """Look at each file.

        Raises:
            OSError: one is gone, or its size has changed.
        """
        for file, size in self._sizes.items():
            check_size(file, size)


def read_exactly(opened: BinaryIO, count: int) -> bytes:
    """Read `count` bytes, or fewer at the end of the file."""
    data = opened.read(count)
    while len(data) < count:
        more = opened.read(count - len(data))
        if not more:
            break
        data += more
    return data


@contextmanager
def errors_that_name(file: str) -> Iterator[None]:
    """Raise an OSError that names `file` instead of an error that does not.

    Raises:
        OSError: the body raised an OSError.
    """
    try:
        yield
    except FileNotFoundError:
        if is_url(file):
            raise
        where = "" if os.path.isabs(file) else f" in {os.getcwd()}"
        raise FileNotFoundError(f"{file}: no such file{where}{_similar(file)}") from None
    except OSError as error:
        if file in str(error):
            raise
        kind = "" if type(error) is OSError and error.errno is None else f"{type(error).__name__}: "
        raise OSError(f"{file}: {kind}{error}") from None


def _similar(file: str) -> str:
    """Return a question about the file whose name is most similar to that of a missing one; "" if there is none."""
    folder, name = os.path.split(file)
    with suppress(OSError):
        if near := difflib.get_close_matches(name, os.listdir(folder or "."), 1, 0.8):
            return f". Did you mean {os.path.join(folder, near[0])}?"
    return ""
