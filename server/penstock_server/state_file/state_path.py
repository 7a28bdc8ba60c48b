"""Checks the path of a state file before SQLite opens it. SQLite would wait at a pipe, and believe every file beside
it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock_proto import StartError

MOST_NBYTES = 256 << 20
"""Maximum size of a state file in bytes, and of its -wal file together with it."""


def check_option(path: str) -> None:
    """Check the value of `--state`.

    Raises:
        StartError: it is empty, or has a meaning of its own in SQLite.
    """
    if not path or path == ":memory:" or path.startswith("file:"):
        raise StartError(
            f"--state {path!r}: give the path of a file, such as groups.sqlite. It keeps the positions of groups when "
            "the daemon ends"
        )


def check_files(path: str | Path) -> None:
    """Check what lies at the path of a state file, and beside it where SQLite keeps changes. It need not exist.

    Raises:
        StartError: one of the files is not a regular file, belongs to another user, every user can change it, or it is
            too large.
    """
    nbytes = sum(_check(path, f"{path}{suffix}") for suffix in ("", "-wal", "-shm", "-journal"))
    if nbytes > MOST_NBYTES:
        raise StartError(
            f"--state {path}: the file and those beside it have {nbytes} bytes, and a state file has at most "
            f"{MOST_NBYTES}: give another path"
        )
    _check_pages(path)


def damaged(path: str | Path, where: str, why: str) -> StartError:
    """Return the error for a state file with impossible content."""
    return StartError(
        f"--state {path}: the content of the file{where} is damaged ({why}). Restore a copy of it, or delete it with "
        "its -wal file: its groups then begin from the start"
    )


def _check(path: str | Path, file: str) -> int:
    """Check one file, and the symbolic link if it is one. Return its size."""
    try:
        link, status = os.lstat(file), os.stat(file)
    except FileNotFoundError:  # also a link to a file that does not exist yet
        return 0
    except (OSError, ValueError) as error:
        raise StartError(f"--state {path}: cannot open {file}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        raise StartError(f"--state {path}: {file} is {what}: give the path of a file")
    for owner in (link.st_uid, status.st_uid):
        if owner not in (0, os.geteuid()):
            raise StartError(
                f"--state {path}: {file} belongs to the user {owner}, who could change it: run as that user, or give "
                "another path"
            )
    if status.st_mode & stat.S_IWOTH:
        raise StartError(f"--state {path}: every user of this host can change {file}: chmod o-w {file}")
    return status.st_size


def _check_pages(path: str | Path) -> None:
    """Check that a file, unless it is empty, is a database of whole pages. SQLite would write a new database over a
    short piece of one."""
    try:
        with open(path, "rb") as file:
            head, nbytes = file.read(18), os.fstat(file.fileno()).st_size
    except OSError:  # there is no file yet; otherwise SQLite says why it cannot read it
        return
    if not nbytes:
        return
    if head[:16] != b"SQLite format 3\0":
        raise StartError(f"--state {path}: this is not a state file: give another path")
    page_nbytes = int.from_bytes(head[16:], "big") & ~1 or 1 << 16  # 1 stands for 65,536
    unfinished = os.path.exists(f"{path}-wal")  # if the daemon was killed while it wrote
    if nbytes < 512 or (nbytes % page_nbytes and not unfinished):
        raise damaged(path, "", "it is cut off")
