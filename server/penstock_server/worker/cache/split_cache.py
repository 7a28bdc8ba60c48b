"""The cache of a feed's splits: a directory with one complete file for each cached split.

    KEY.split           a complete split
    KEY.BOOT.writing    one that is being written, under an exclusive lock (flock)

A split is written to a file aside, which is renamed when it is complete. BOOT names the running kernel. Within one
kernel the lock decides which process writes a split. The lock ends with its process. So a file without a lock was left
by a process that was killed, and the next writer of that split takes the file over. On a network file system, where
locks may not reach other hosts, two hosts may write the same split at the same time, each to its own file. Both have
the same samples, and the later rename wins. If a file system has no locks at all, each writer has a file of its own.

A failure here costs time and nothing else: the generator runs if a split is not in the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock_proto import FeedError

from ...feed.options.cache_key import NoKey, digest
from ..isolation.randomness import GlobalState, seeds
from .cache_counters import CacheCounters
from .split_file import NotPicklable, SplitFile, SplitFileWriter, Unreadable

PAUSE = 60.0
"""Seconds after a failed write during which no split is written."""

_COUNTING = 0.5
"""Seconds to spend on adding up file sizes. The sizes of the remaining files are estimated."""

_ABANDONED = 86400
"""Seconds without a write after which a file that another host was writing is removed."""

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SplitKey:
    """Identifies a cached split in the directory of its feed."""

    digest: bytes

    @property
    def name(self) -> str:
        """The name of its file, without a suffix."""
        return self.digest.hex()[:32]

    def global_state(self) -> GlobalState:
        """Return the random states with which the generator runs: the same in each epoch, whatever the feed's seed."""
        return GlobalState(seeds("cached split", int.from_bytes(self.digest, "little")))


class SplitCache:
    """The cached splits of a feed, as one process uses them.

    Args:
        directory: the feed's directory, which is made when the first split is written.
        stamp: returns what else must be the same for a split to be the same, such as the time of its file. None if
            there is nothing else.

    Attributes:
        counters: count reads and writes.
    """

    def __init__(self, directory: str, stamp: Callable[[Any], Any] | None = None) -> None:
        self._directory = directory
        self._stamp = stamp
        self._pause_until = 0.0
        self.counters = CacheCounters()

    def key_of(self, split: Any) -> SplitKey:
        """Return the key of a split.

        Raises:
            FeedError: the split cannot be told from others.
        """
        try:
            stamp = None if self._stamp is None else self._stamp(split)
            return SplitKey(digest(os.path.basename(self._directory), split, stamp))
        except NoKey as error:
            raise FeedError(
                f"cache= cannot tell this split from others ({error}): make splits plain data, such as paths or ranges"
            ) from error

    def is_key_of(self, key: SplitKey, split: Any) -> bool:
        """Return whether the split still has this key. It has not if its file has changed or is gone."""
        try:
            return self.key_of(split) == key
        except (FeedError, OSError):
            return False

    def find(self, key: SplitKey) -> SplitFile | None:
        """Open a cached split. Return None if it is not there, or cannot be read."""
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            try:
                return SplitFile(fd, key.digest)
            finally:
                os.close(fd)
        except Unreadable:
            pass  # it will be written again
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self.counters.note_problem(f"not read: {error.strerror or error}")
        return None

    def writer(self, key: SplitKey) -> CacheWriter | None:
        """Begin to write a split. Return None if that is not possible now, or if another process is writing it."""
        if time.monotonic() < self._pause_until:
            return None
        try:
            os.makedirs(self._directory, exist_ok=True)
            opened = _open_aside(os.path.join(self._directory, key.name))
        except OSError as error:
            self.on_write_failed(error)
            return None
        return None if opened is None else CacheWriter(self, *opened, self._path(key), key)

    def on_write_failed(self, error: OSError | MemoryError | NotPicklable) -> None:
        """Note that a split could not be written, and write none for a while."""
        self._pause_until = time.monotonic() + PAUSE
        if isinstance(error, OSError):
            why = error.strerror or str(error)
        elif isinstance(error, MemoryError):
            why = "there is no memory left"
        else:
            why = f"a sample cannot be pickled ({error})"
        self.counters.note_problem(f"not written: {why}")

    def tidy(self) -> None:
        """Remove files that were abandoned while they were written, and count the bytes of the others."""
        counted = files = stored = 0
        deadline = time.monotonic() + _COUNTING
        try:
            for entry in _entries(self._directory):
                if entry.name.endswith(".writing"):
                    _remove_if_abandoned(entry)
                elif entry.name.endswith(".split"):
                    files += 1
                    if time.monotonic() < deadline:
                        counted += 1
                        stored += entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            self.counters.note_problem(f"not read: {error.strerror or error}")
        self.counters.note_nbytes(stored * files // max(1, counted))

    def _path(self, key: SplitKey) -> str:
        return os.path.join(self._directory, f"{key.name}.split")


class CacheWriter:
    """Writes one split. After `finish` or `abandon` nothing more is written.

    Args:
        cache: is told of success and failure.
        fd: the file aside, locked. The writer takes it over.
        aside: its path.
        path: the path of the complete split.
        key: the split's key.
    """

    def __init__(self, cache: SplitCache, fd: int, aside: str, path: str, key: SplitKey) -> None:
        self._cache = cache
        self._fd = fd
        self._aside = aside
        self._path = path
        self._pid = os.getpid()
        self._writer: SplitFileWriter | None = SplitFileWriter(fd, key.digest)

    def add(self, sample: Any) -> bool:
        """Write a sample. Return False if nothing more is written."""
        if not self._is_ours():
            self._writer = None
        with self._failing():
            if self._writer is not None:
                self._writer.add(sample)
        return self._writer is not None

    def finish(self) -> None:
        """Write the end, and put the split into the cache."""
        with self._failing():
            if self._writer is not None and self._is_ours():
                nbytes = self._writer.finish()
                os.rename(self._aside, self._path)
                self._close()
                self._cache.counters.count_written(nbytes)

    def abandon(self) -> None:
        """Remove what was written."""
        if self._writer is None:
            return
        if self._is_ours():
            _remove(self._aside)
        self._close()

    def _is_ours(self) -> bool:
        """Whether this is the process that began to write. A process that user code forks has all of its objects, and
        the same lock."""
        return os.getpid() == self._pid

    def _close(self) -> None:
        self._writer = None
        os.close(self._fd)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, MemoryError, NotPicklable) as error:
            self.abandon()
            self._cache.on_write_failed(error)


def _open_aside(stem: str) -> tuple[int, str] | None:
    """Open an empty file for the split whose file is `stem` and a suffix. Return its fd and its path, or None if
    another process of this kernel writes the split.

    Raises:
        OSError: it cannot be opened.
    """
    path = f"{stem}.{_boot()}.writing"
    fd = os.open(path, _FLAGS, 0o666)
    try:
        if _locked(fd, path):
            os.ftruncate(fd, 0)
            return fd, path
    except OSError as error:
        os.close(fd)
        if error.errno not in _NO_LOCKS:
            raise
        _remove(path)
        path = f"{stem}.{secrets.token_hex(8)}.writing"
        return os.open(path, _FLAGS | os.O_EXCL, 0o666), path
    os.close(fd)
    return None


def _locked(fd: int, path: str) -> bool:
    """Lock a file. Return False if another process has locked it, or if it is no longer at `path`: its last writer may
    have renamed it before it was locked.

    Raises:
        OSError: it cannot be locked.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return _is_at(fd, path)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _remove_if_abandoned(entry: os.DirEntry[str]) -> None:
    """Remove a file if no process is still writing it."""
    with contextlib.suppress(OSError):
        if not entry.name.endswith(f".{_boot()}.writing"):
            if time.time() - entry.stat().st_mtime > _ABANDONED:
                os.unlink(entry.path)
            return
        fd = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _locked(fd, entry.path):
                os.unlink(entry.path)
        finally:
            os.close(fd)


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _entries(directory: str) -> Iterator[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        yield from entries


@cache
def _boot() -> str:
    """Return a text that is the same in all processes of the running kernel, containers included, and in no others. If
    the kernel does not say, it is one of this process alone, and two processes may write the same split."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return os.urandom(4).hex()
