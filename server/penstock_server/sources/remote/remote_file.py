"""A remote file that is open for reading: it is read ahead as long as it is read in order.

Blocks are fetched by threads, since fetching waits for the network. A reader waits for its block only. A run of blocks
is one request; in sequential reading runs grow, and two are under way.
"""

from __future__ import annotations

import io
import os
import threading
import time
from typing import Any

from . import stores, urls
from .file_cache import BLOCK, Entry, blocks_of, the_cache
from .stores import Facts, NoRanges

RUN = 8
"""Blocks of a run, at most, of what is read ahead."""

MOST_WANTED = 32
"""Blocks of a run, at most, whatever a reader wants at once."""

AHEAD = 2
"""Runs that are under way while a file is read in order."""

PATIENCE = 90.0
"""Seconds for which a block is awaited that another process is fetching. That process may have been stopped."""

_POLL = 0.01
_BUFFER = 1 << 18

_RUN = os.urandom(8).hex()
"""Marks entries of the cache that only this process, and those that it forks, may trust: of files without a stamp."""

_whole_only: set[str] = set()
"""URLs of which a server does not send parts."""


def opened(url: str) -> io.BufferedReader:
    """Open a file by its URL.

    Raises:
        ImportError: obstore is not installed.
        OSError: it cannot be opened, or reached; the message names it.
        ValueError: it is no URL that can be served.
    """
    facts = stores.facts_of(url)
    stamp = facts.stamp if facts.is_stamped else _RUN
    entry = the_cache().entry(url if facts.is_etag else urls.whole(url), stamp, facts.size)
    return io.BufferedReader(RemoteFile(url, facts, entry), _BUFFER)


class RemoteFile(io.RawIOBase):
    """A remote file.

    Args:
        url: its URL, without secrets.
        facts: about the file, with which each answer of the server is compared.
        entry: of the file cache, for its blocks. The file takes it over.
    """

    def __init__(self, url: str, facts: Facts, entry: Entry) -> None:
        self.name = url
        self._facts = facts
        self._entry = entry
        self._memory: dict[int, bytes | bytearray] = {}
        self._changed = threading.Condition()
        self._fetches: list[_Fetch] = []
        self._at = 0
        self._block = -2
        self._run = 1

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def seekable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def tell(self) -> int:
        """See `io.RawIOBase`."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.RawIOBase`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._facts.size}[whence]
        if base + offset < 0:
            raise ValueError(f"{self.name}: cannot seek before its beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of a block."""
        wanted = memoryview(buffer).cast("B")
        block, offset = divmod(self._at, BLOCK)
        count = min(len(wanted), self._facts.size - self._at)
        if count <= 0:
            return 0
        self._enter(block, blocks_of(offset + count))
        count = min(count, BLOCK - offset)
        data = self._memory.get(block)
        if data is None:
            count = self._entry.read_into(wanted[:count], self._at)
        else:
            wanted[:count] = data[offset : offset + count]
        self._at += count
        return count

    def close(self) -> None:
        """Close it. Fetches end soon."""
        if not self.closed:
            for fetch in self._fetches:
                fetch.cancel()
            self._entry.close()
            self._memory.clear()
        super().close()

    def _enter(self, block: int, count: int) -> None:
        """Wait until a block is there. The reader wants `count` blocks at once."""
        if block != self._block:
            in_order = block == self._block + 1
            self._run = min(RUN, 2 * self._run) if in_order else 1
            self._block = block
            self._forget(block)
            if in_order:
                self._read_ahead(block)
        elif self._has(block):
            return
        if not self._has(block) and not self._is_awaited(block):
            self._fetch(block, max(min(count, MOST_WANTED), self._run))
        self._wait(block)

    def _read_ahead(self, block: int) -> None:
        """Fetch what will be read next, if it is not there."""
        at, end = block, min(blocks_of(self._facts.size), block + AHEAD * self._run)
        while at < end and len(self._fetches) < AHEAD:
            at = next((one for one in range(at, end) if not self._has(one) and not self._is_awaited(one)), end)
            if at < end:
                self._fetch(at, self._run)
            at += self._run

    def _has(self, block: int) -> bool:
        return block in self._memory or self._entry.has(block)

    def _is_awaited(self, block: int) -> bool:
        self._fetches = [one for one in self._fetches if not one.is_done]
        return any(one.start <= block < one.stop for one in self._fetches)

    def _fetch(self, block: int, count: int) -> None:
        stop = min(blocks_of(self._facts.size), block + count)
        self._fetches.append(_Fetch(self, self._entry.again(), block, stop))

    def _wait(self, block: int) -> None:
        with self._changed:
            while not self._has(block):
                mine = next((one for one in self._fetches if one.start <= block < one.stop), None)
                if mine is None or (mine.is_done and not self._has(block)):
                    if mine is not None and mine.error is not None:
                        raise mine.error
                    self._fetches = [one for one in self._fetches if one is not mine]
                    self._fetch(block, 1)
                self._changed.wait(_POLL)

    def _forget(self, block: int) -> None:
        """Drop the blocks in memory that were read, and those far ahead."""
        with self._changed:
            for one in [one for one in self._memory if not block <= one < block + 2 * AHEAD * RUN]:
                del self._memory[one]

    def keep(self, block: int, data: bytearray) -> None:
        """Take a block that has no place in the cache. A fetch calls it, in its thread."""
        with self._changed:
            self._memory[block] = data

    def notify(self) -> None:
        """Wake the reader. A fetch calls it."""
        with self._changed:
            self._changed.notify_all()

    @property
    def facts(self) -> Facts:
        """The facts about the file."""
        return self._facts


class _Fetch:
    """Fetches a run of blocks in a thread.

    Args:
        file: takes them, if the cache has no room.
        entry: of the cache; it is closed at the end.
        start, stop: the blocks.

    Attributes:
        start, stop: as given; of all blocks, if the server sends no part of a file.
        is_done: whether it has ended.
        error: why it failed, or None.
    """

    def __init__(self, file: RemoteFile, entry: Entry, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.is_done = False
        self.error: Exception | None = None
        self._file = file
        self._entry = entry
        self._is_cancelled = False
        if file.name in _whole_only:
            self._take_all()
        threading.Thread(target=self._work, name="penstock-fetch", daemon=True).start()

    def cancel(self) -> None:
        """Let it end soon."""
        self._is_cancelled = True

    def _work(self) -> None:
        try:
            try:
                if self._file.name not in _whole_only:
                    self._fetch_run()
            except NoRanges:
                self._take_all()
                _whole_only.add(self._file.name)
            if self._file.name in _whole_only:
                self._fetch_whole()
        except Exception as error:
            self.error = error
        except BaseException as error:  # a panic of obstore
            self.error = OSError(f"{self._file.name}: {type(error).__name__}: {urls.without_secrets(str(error))}")
        finally:
            self._entry.close()
            self.is_done = True
            self._file.notify()

    def _take_all(self) -> None:
        self.start, self.stop = 0, blocks_of(self._file.facts.size)

    def _fetch_run(self) -> None:
        start, stop = self.start, self.stop
        while start < stop and not self._is_cancelled:
            first, after = self._entry.missing(start, stop)
            if first == after:
                return
            after = self._locked(first, after)
            start = first  # if another process has fetched it meanwhile
            if after == first:
                continue
            try:
                if not self._entry.has(first):
                    self._stream(first, after)
                    start = after
            finally:
                self._entry.unlock(first, after)

    def _locked(self, first: int, after: int) -> int:
        """Wait until nobody else fetches the first of some blocks. Return the end of those that are locked, which is
        `first` if it is there now."""
        until = time.monotonic() + PATIENCE
        while not self._is_cancelled:
            for stop in (after, first + 1):
                if self._entry.lock(first, stop):
                    return stop
            time.sleep(_POLL)
            if self._entry.has(first):
                return first
            if time.monotonic() > until:
                return after
        return first

    def _fetch_whole(self) -> None:
        """Fetch the whole file, in order, since the server sends no parts.

        Raises:
            OSError: the cache has no room for it.
        """
        facts, url = self._file.facts, self._file.name
        if facts.size > self._entry.cache.size:
            raise OSError(
                f"{url}: its server sends whole files only, so it needs {facts.size:,} bytes in {self._entry.cache}: "
                "raise --file-cache-size, or use a server with ranges (HTTP Range requests)"
            )
        if not self._entry.lock(0, self.stop):  # others fetch the same
            self._await_others()
            return
        try:
            if self._entry.missing(0, self.stop)[0] < self.stop:
                self._stream(0, self.stop, must_keep=True)
        finally:
            self._entry.unlock(0, self.stop)

    def _await_others(self) -> None:
        """Wait until another process has fetched a whole file, or gives up.

        Raises:
            OSError: it makes no progress.
        """
        until, there = time.monotonic() + PATIENCE, -1
        while not self._is_cancelled and not self._entry.lock(0, self.stop):
            time.sleep(_POLL)
            first = self._entry.missing(0, self.stop)[0]
            if first > there:
                until, there = time.monotonic() + PATIENCE, first
            elif time.monotonic() > until:
                raise OSError(f"{self._file.name}: a process that fetches it has stopped: end that process")
        self._entry.unlock(0, self.stop)

    def _stream(self, first: int, after: int, must_keep: bool = False) -> None:
        facts = self._file.facts
        block, data = first, bytearray()
        stop = min(after * BLOCK, facts.size)
        for piece in stores.read(self._file.name, facts, first * BLOCK, stop):
            if self._is_cancelled and not must_keep:
                return
            data += piece
            while len(data) >= BLOCK or (data and block * BLOCK + len(data) == stop):
                self._put(block, data[:BLOCK], must_keep)
                del data[:BLOCK]
                block += 1

    def _put(self, block: int, data: bytearray, must_keep: bool) -> None:
        if not self._entry.put(block, data):
            if must_keep:
                raise OSError(
                    f"{self._file.name}: its server sends whole files only, and {self._entry.cache} has no room for "
                    "it: raise --file-cache-size, or use a server with ranges (HTTP Range requests)"
                )
            self._file.keep(block, data)
        self._file.notify()
