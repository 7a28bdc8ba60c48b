"""The file cache: a folder with blocks of remote files, which the workers of a host share.

    KEY.BOOT.blocks     one file: its blocks, each at its own place, and a byte for each that says whether it is there
    usage               the bytes of all blocks, kept under a lock (flock)

KEY stands for a URL, its size and its stamp, so a file that changes has another entry. BOOT names the running kernel:
after a crash of the host the bytes that say so may be on the disk, and the blocks not. So entries of an earlier kernel
are not read; they are removed first.

Locks belong to an open file, and end with it, so a process that is killed leaves none:

- who has an entry open holds a shared flock on it, and an entry with such a lock is not removed;
- who fetches blocks holds a lock on their bytes (fcntl, of the open file), and others wait for these blocks.

The oldest entries are removed when a block would exceed the bound. If all that are left are open, or if the disk is
full, blocks are not kept: their readers hold them in memory, for as long as they need them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock_proto.status.figures import size as size_text

from ...machine.size_text import parsed_size

BLOCK = 1 << 20
"""Bytes of a block."""

DIRECTORY_VARIABLE, SIZE_VARIABLE = "PENSTOCK_FILE_CACHE", "PENSTOCK_FILE_CACHE_SIZE"
"""Environment variables that say where the cache is and how large it may be, for all processes without an option."""

MOST = 16 << 30
_SHARE = 5
"""The cache takes at most a fifth of what the disk has left when it is first used, and at most `MOST`."""

_SPARE = 0.9
"""The part of the bound that is left after entries were removed."""

_PAUSE = 1.0
"""Seconds after a failed attempt to make room during which no block is kept."""

_PAGE = 4096
"""Bytes for what a file system needs besides, and for the bytes that say which blocks are there."""

_ENDING = ".blocks"
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_USAGE = struct.Struct("<q")
_NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class _Chosen:
    directory: str = ""
    size: int | None = None


_chosen = _Chosen()


def choose(directory: str | None, size: int | None) -> None:
    """Say where this process has its cache, and how large it may be; None: by the environment, or the default."""
    global _chosen
    _chosen = _Chosen(directory or "", size)
    the_cache.cache_clear()


@cache
def the_cache() -> FileCache:
    """Return the cache of this process.

    Raises:
        OSError: there is no folder for it, or the variable holds no size; the message says what to do.
    """
    given = _chosen.directory or os.environ.get(DIRECTORY_VARIABLE, "")
    home = os.environ.get("XDG_CACHE_HOME") or (os.path.expanduser("~/.cache"))
    private = os.path.join(tempfile.gettempdir(), f"penstock-{os.getuid()}")
    tried = [given] if given else [os.path.join(home, "penstock", "files"), os.path.join(private, "files")]
    why = ""
    for directory in tried:
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            if not given and not _is_private(os.path.dirname(directory)):
                raise PermissionError(errno.EPERM, "another user can write to it")
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            why = error.strerror or str(error)
            continue
        size = _chosen.size
        if size is None and (text := os.environ.get(SIZE_VARIABLE, "")):
            try:
                size = parsed_size(text)
            except ValueError as error:
                raise OSError(f"the environment variable {SIZE_VARIABLE} {error}") from None
        if size is None:
            size = min(MOST, shutil.disk_usage(directory).free // _SHARE)
        return FileCache(directory, size)
    raise OSError(
        f"files of URLs are kept in {' or '.join(tried)}, which cannot be written ({why}): choose a folder on a local "
        f"disk with --file-cache, or with {DIRECTORY_VARIABLE}"
    )


def _is_private(directory: str) -> bool:
    """Return whether nobody else could have put files into a folder."""
    about = os.lstat(directory)
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022


class FileCache:
    """The entries of one folder, as one process uses them.

    Args:
        directory: the folder; it exists.
        size: the bound, in bytes. With 0 nothing is kept.
    """

    def __init__(self, directory: str, size: int) -> None:
        self.directory = directory
        self.size = size
        self._paused_until = 0.0
        self._usage = os.open(os.path.join(directory, "usage"), _FLAGS, 0o600)
        with self._locked():
            self._remove_oldest(0)  # count what is there, and begin below the bound

    def entry(self, url: str, stamp: str, size: int) -> Entry:
        """Open the entry of a file, which is made if there is none.

        Raises:
            OSError: it cannot be opened.
        """
        key = hashlib.sha256(f"{url}\n{stamp}\n{size}".encode()).hexdigest()[:32]
        path = os.path.join(self.directory, f"{key}.{_boot()}{_ENDING}")
        while True:
            fd = os.open(path, _FLAGS, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
                if _is_at(fd, path):  # else it was removed before it was locked
                    os.ftruncate(fd, size + blocks_of(size))
                    os.utime(fd)
                    return Entry(self, fd, size)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def make_room(self, nbytes: int) -> bool:
        """Reserve room for a block. Return False if there is none."""
        if nbytes > self.size or time.monotonic() < self._paused_until:
            return False
        with self._locked():
            used = self._used()
            if used + nbytes > self.size:
                used = self._remove_oldest(nbytes)
            fits = used + nbytes <= self.size
            if fits:
                self._note_used(used + nbytes)
            else:
                self._paused_until = time.monotonic() + _PAUSE
        return fits

    def _remove_oldest(self, wanted: int) -> int:
        """Remove entries, if they and `wanted` bytes exceed the bound. Return the bytes of those that are left."""
        found: list[tuple[bool, float, int, str]] = []
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):
                if entry.name.endswith(_ENDING):
                    about = entry.stat()
                    is_ours = entry.name.endswith(f".{_boot()}{_ENDING}")
                    found.append((is_ours, about.st_mtime, about.st_blocks * 512, entry.path))
        used = sum(nbytes for _, _, nbytes, _ in found)
        bound = self.size * _SPARE - wanted if used + wanted > self.size else used
        for is_ours, _, nbytes, path in sorted(found):
            if (not is_ours or used > bound) and _removed(path):
                used -= nbytes
        self._note_used(used)
        return used

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._usage, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._usage, fcntl.LOCK_UN)

    def _used(self) -> int:
        data = os.pread(self._usage, _USAGE.size, 0)
        return int(_USAGE.unpack(data)[0]) if len(data) == _USAGE.size else 0

    def _note_used(self, nbytes: int) -> None:
        os.pwrite(self._usage, _USAGE.pack(nbytes), 0)

    def __str__(self) -> str:
        return f"the file cache {self.directory} of {size_text(self.size)}"


class Entry:
    """The blocks of one file. `close` it.

    Args:
        cache: that it belongs to.
        fd: the open file, with a shared lock. The entry takes it over.
        size: of the remote file.
    """

    def __init__(self, cache: FileCache, fd: int, size: int) -> None:
        self.cache = cache
        self._fd = fd
        self._size = size

    def again(self) -> Entry:
        """Return the same entry for another thread, with the same locks."""
        return Entry(self.cache, os.dup(self._fd), self._size)

    def has(self, block: int) -> bool:
        """Return whether a block is there."""
        return os.pread(self._fd, 1, self._size + block) == b"\1"

    def missing(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first run of blocks that are not there."""
        there = os.pread(self._fd, stop - start, self._size + start)
        first = there.find(b"\0")
        if first < 0:
            return stop, stop
        after = there.find(b"\1", first)
        return start + first, stop if after < 0 else start + after

    def read_into(self, buffer: memoryview, at: int) -> int:
        """Read bytes of blocks that are there."""
        return os.preadv(self._fd, [buffer], at)

    def put(self, block: int, data: bytes | bytearray) -> bool:
        """Keep a block. Return False if there is no room."""
        if self.has(block):
            return True
        if not self.cache.make_room(len(data) + _PAGE):
            return False
        try:
            at, view = block * BLOCK, memoryview(data)
            while view:
                written = os.pwrite(self._fd, view, at)
                at, view = at + written, view[written:]
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return False
        os.pwrite(self._fd, b"\1", self._size + block)
        return True

    def lock(self, start: int, stop: int) -> bool:
        """Lock the fetching of blocks. Return False if another process, or another reader in this one, fetches some of
        them."""
        return self._lock(fcntl.F_WRLCK, start, stop)

    def unlock(self, start: int, stop: int) -> None:
        """Give the lock back."""
        self._lock(fcntl.F_UNLCK, start, stop)

    def _lock(self, kind: int, start: int, stop: int) -> bool:
        wanted = struct.pack("hhqqi", kind, os.SEEK_SET, self._size + start, stop - start, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, wanted)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in _NO_LOCKS:
                raise  # without locks, two may fetch the same block
        return True

    def close(self) -> None:
        """Close it, as one that was used just now."""
        with suppress(OSError):
            os.utime(self._fd)
        os.close(self._fd)


def blocks_of(size: int) -> int:
    """Return how many blocks a file has."""
    return -(-size // BLOCK)


def _removed(path: str) -> bool:
    """Remove an entry, unless a process has it open."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(fd, path):
            os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_at(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


@cache
def _boot() -> str:
    """Return a text that is the same in all processes of the running kernel, and in no others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return os.urandom(4).hex()
