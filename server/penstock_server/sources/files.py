"""Files by path or URL: patterns, sizes, and opening them in the worker that reads them.

A local path needs no package. A URL needs fsspec, which is imported here and nowhere else. Its file systems do not
survive a fork, so nothing may be opened before a worker runs.
"""

from __future__ import annotations

import difflib
import glob
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, TypeAlias, cast

from penstock_proto import distribution
from penstock_proto.value_text import shown

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
    return tuple(os.fspath(file) for file in many)


def expand(files: Sequence[str]) -> list[str]:
    """Replace each pattern by the files that match it, sorted by name; `**` matches folders of any depth. For a URL
    file://PATH, return only the path.

    Raises:
        FileNotFoundError: a pattern matches nothing.
    """
    found: list[str] = []
    for file in files:
        file = file.removeprefix("file://")
        if is_url(file):
            matches = _expand_url(file) if "*" in file else [file]
        elif not glob.has_magic(file) or os.path.exists(file):
            matches = [file]
        else:
            matches = [name for name in sorted(glob.glob(file, recursive=True)) if not os.path.isdir(name)]
        if not matches:
            where = "" if is_url(file) or os.path.isabs(file) else f" in {os.getcwd()}"
            raise FileNotFoundError(f"no file matches {file}{where}: correct the path, or start in another directory")
        found += matches
    return found


def expand_folders(files: Sequence[str]) -> list[str]:
    """Replace each pattern by the files and folders that match it, sorted by name.

    Raises:
        FileNotFoundError: a pattern matches nothing.
    """
    found: list[str] = []
    for file in files:
        if is_url(file) or not glob.has_magic(file) or os.path.exists(file):
            found.append(file)
            continue
        matches = sorted(glob.glob(file, recursive=True))
        if not matches:
            raise FileNotFoundError(f"no folder matches {file} in {os.getcwd()}: correct the pattern")
        found += matches
    return found


def is_url(file: str) -> bool:
    """Whether `file` needs fsspec, such as "s3://bucket/a.h5" or "simplecache::https://host/a.h5"."""
    return "://" in file or "::" in file


def size_of(file: str) -> int | None:
    """Return the size of a file in bytes, or None if its server does not say.

    Raises:
        OSError: there is no such file, or it cannot be reached; the message names it.
    """
    with errors_that_name(file):
        if not is_url(file):
            return os.stat(file).st_size
        system, path = _system(file)
        size = system.info(path).get("size")
        return None if size is None else int(size)


def stamp_of(*files: str) -> list[tuple[str, int | None]]:
    """Return the absolute path and the time of the last change (in ns) of each file, for the keys of cached splits. The
    time is None for URLs and for missing files."""
    found: list[tuple[str, int | None]] = []
    for file in files:
        changed = None
        if not is_url(file):
            with suppress(OSError):
                changed = os.stat(file).st_mtime_ns
        found.append((file if is_url(file) else os.path.abspath(file), changed))
    return found


def open_binary(file: str, size: int | None = None) -> BinaryIO:
    """Open a file for reading. With `size`, check that it still has that many bytes.

    Raises:
        OSError: it cannot be opened, or its size has changed; the message names the file.
    """
    with errors_that_name(file):
        if is_url(file):
            system, path = _system(file)
            opened = cast(BinaryIO, system.open(path, "rb"))
        else:
            opened = open(file, "rb", buffering=_BUFFER)  # noqa: SIM115 (the caller closes it)
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
    if now is not None and now != size:
        raise OSError(
            f"{file} has changed: it had {size} bytes when its splits were listed, and now has {now}. A file must stay "
            "the same while it is served: write new data to a new file, and start the daemon again"
        )


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
        OSError: the body raised an OSError, or any error of a remote file system.
    """
    try:
        yield
    except FileNotFoundError as error:
        if is_url(file):  # fsspec raises this for any first failure
            cause = f" ({error.__cause__})" if error.__cause__ else ""
            raise FileNotFoundError(f"{file}: no such file, or it cannot be reached{cause}") from None
        where = "" if os.path.isabs(file) else f" in {os.getcwd()}"
        raise FileNotFoundError(f"{file}: no such file{where}{_similar(file)}") from None
    except ImportError:
        raise
    except OSError as error:
        if file in str(error):
            raise
        raise OSError(f"{file}: {type(error).__name__}: {error}") from None
    except io.UnsupportedOperation:
        raise
    except Exception as error:  # of the URL's library, such as botocore or aiohttp
        if not is_url(file):
            raise
        raise OSError(f"{file}: {type(error).__name__}: {error}") from error


def _similar(file: str) -> str:
    """Return a question about the file whose name is most similar to that of a missing one; "" if there is none."""
    folder, name = os.path.split(file)
    with suppress(OSError):
        if near := difflib.get_close_matches(name, os.listdir(folder or "."), 1, 0.8):
            return f". Did you mean {os.path.join(folder, near[0])}?"
    return ""


def _system(file: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    try:
        import fsspec.core
    except ImportError:
        raise ImportError(f"{file} is a URL, which needs fsspec: {distribution.pip_install('urls')}") from None
    system, path = fsspec.core.url_to_fs(file)
    return system, str(path)


def _expand_url(pattern: str) -> list[str]:
    chain, colons, last = pattern.rpartition("::")
    with errors_that_name(pattern):
        system, path = _system(last)
        return [chain + colons + system.unstrip_protocol(name) for name in sorted(system.glob(path))]
