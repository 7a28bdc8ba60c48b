"""The file of a cached split: its samples one after another, and where each begins.

    0    8 bytes magic, uint32 version, uint32 CRC-32 of the rest of the header and of the index, uint64 samples,
         uint64 offset of the index, uint64 bytes of the file, 32 bytes key of the split
    128  each sample, from a multiple of 8 on: uint32 number of buffers, uint32 0, uint64 bytes of the pickle,
         uint64 bytes of each buffer, the pickle (protocol 5), and each buffer from a multiple of 64 on
         the index, from a multiple of 8 on: uint64 offset of each sample

All numbers are little-endian. The header is written last, so a file that was not written to its end has none. A file is
served only if its header, its length and its index fit. Samples have no checksums: reading them would cost as much as
copying them several times.

This module knows nothing of directories or locks.
"""

from __future__ import annotations

import array
import mmap
import os
import pickle
import struct
import sys
import zlib
from typing import Any, Final

from ...targets.importing import summary
from ..failures import pass_on

KEY_NBYTES = 32

_MAGIC = b"PENSTOCK"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQQ32s")
_CHECKED = 16  # where the checked part of the header begins
_FIRST = 128
_SAMPLE = struct.Struct("<IIQ")

_SMALL = 1024
"""Buffers with fewer bytes are part of the pickle, as aligning them would cost more than copying them."""

_PENDING = 1 << 18
"""Bytes that are collected before they are written. A worker may have many splits open."""

_MAP_NORESERVE: Final = 0x4000
"""So that a file may be larger than memory. Python has this constant since 3.13."""


class NotPicklable(Exception):
    """A sample cannot be pickled. The text says why."""


class Unreadable(Exception):
    """A file does not hold this split, or holds only a part of it."""


class SplitFileWriter:
    """Writes the file of a split to `fd`, which is empty and stays the caller's.

    Bytes are written at explicit positions, never through a buffered file: a process that user code forks could write
    the contents of that buffer when it ends.
    """

    def __init__(self, fd: int, key: bytes) -> None:
        self._fd = fd
        self._key = key
        self._offsets = array.array("Q")
        self._pending = bytearray(_FIRST)
        self._written = 0

    def add(self, sample: Any) -> None:
        """Write a sample.

        Raises:
            NotPicklable: it cannot be pickled.
            OSError: it cannot be written.
        """
        buffers: list[memoryview] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            raw = buffer.raw()
            if raw.nbytes < _SMALL:
                return True
            buffers.append(raw)
            return False

        try:
            data = pickle.dumps(sample, protocol=5, buffer_callback=is_small)
        except BaseException as error:
            pass_on(error)
            raise NotPicklable(summary(error)) from error
        self._align(8)
        self._offsets.append(self._written + len(self._pending))
        self._pending += _SAMPLE.pack(len(buffers), 0, len(data))
        self._pending += struct.pack(f"<{len(buffers)}Q", *(buffer.nbytes for buffer in buffers))
        self._put(data)
        for buffer in buffers:
            self._align(64)
            self._put(buffer)
        if len(self._pending) >= _PENDING:
            self._flush()

    def finish(self) -> int:
        """Write the index and the header, and return the bytes of the file.

        Raises:
            OSError: they cannot be written, or something else has written to the file.
        """
        self._align(8)
        at = self._written + len(self._pending)
        if sys.byteorder == "big":
            self._offsets.byteswap()
        index = self._offsets.tobytes()
        self._put(index)
        self._flush()
        header = _HEADER.pack(_MAGIC, _VERSION, 0, len(self._offsets), at, self._written, self._key)
        header = _HEADER.pack(_MAGIC, _VERSION, _checksum(header, index), *_HEADER.unpack(header)[3:])
        _write_all(self._fd, header, 0)
        if os.fstat(self._fd).st_size != self._written:
            raise OSError(f"it has {os.fstat(self._fd).st_size} bytes instead of {self._written}")
        os.close(os.dup(self._fd))  # a network file system reports a full disk only on close
        return self._written

    def _align(self, to: int) -> None:
        self._pending += bytes(-(self._written + len(self._pending)) % to)

    def _put(self, data: bytes | memoryview) -> None:
        if len(data) < _PENDING:
            self._pending += data
        else:
            self._flush()
            _write_all(self._fd, data, self._written)
            self._written += len(data)

    def _flush(self) -> None:
        _write_all(self._fd, self._pending, self._written)
        self._written += len(self._pending)
        self._pending = bytearray()


class SplitFile:
    """The samples of a split, mapped into memory.

    The mapping is private and can be written to: user code that changes an array in place changes a copy of its pages,
    as if the array were its own. Arrays keep the mapping alive, and the mapping keeps the data if the file is removed.

    Args:
        fd: the file, which stays the caller's.
        key: the split's key.

    Raises:
        Unreadable: the file does not hold this split, or holds only a part of it.
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, key: bytes) -> None:
        self.nbytes = os.fstat(fd).st_size
        if self.nbytes < _FIRST:
            raise Unreadable
        flags, prot = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        try:
            mapped = mmap.mmap(fd, self.nbytes, flags=flags, prot=prot)
        except ValueError:  # the file became shorter
            raise Unreadable from None
        self._data = memoryview(mapped)
        header = bytes(self._data[: _HEADER.size])
        magic, version, checksum, self._count, at, nbytes, found = _HEADER.unpack(header)
        if (magic, version, nbytes, found) != (_MAGIC, _VERSION, self.nbytes, key):
            raise Unreadable
        if at + 8 * self._count != nbytes or checksum != _checksum(header, self._data[at:]):
            raise Unreadable
        self._index = self._data[at:]
        mapped.madvise(mmap.MADV_SEQUENTIAL)

    def __len__(self) -> int:
        """Return the number of samples."""
        return int(self._count)

    def __getitem__(self, number: int) -> Any:
        """Return a sample. Its arrays lie in the mapping.

        Raises:
            Exception: whatever unpickling it raises.
        """
        data = self._data
        (at,) = struct.unpack_from("<Q", self._index, 8 * number)
        count, _, length = _SAMPLE.unpack_from(data, at)
        at += _SAMPLE.size
        sizes = struct.unpack_from(f"<{count}Q", data, at)
        at += 8 * count
        pickled = data[at : at + length]
        at += length
        buffers = []
        for size in sizes:
            at += -at % 64
            buffers.append(data[at : at + size])
            at += size
        return pickle.loads(pickled, buffers=buffers)


def _checksum(header: bytes, index: bytes | memoryview) -> int:
    return zlib.crc32(index, zlib.crc32(header[_CHECKED:]))


def _write_all(fd: int, data: bytes | bytearray | memoryview, at: int) -> None:
    rest = memoryview(data)
    while rest:
        count = os.pwrite(fd, rest, at)
        rest, at = rest[count:], at + count
