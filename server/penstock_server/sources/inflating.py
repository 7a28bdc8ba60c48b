"""Decompresses gzip and zlib streams, and compares their checksums, as tarfile's own stream does not."""

from __future__ import annotations

import io
import zlib
from typing import Any, BinaryIO

_WBITS = {"GZIP": 31, "ZLIB": 15}


def inflated(opened: Any, compression: str) -> BinaryIO:
    """Return the decompressed data of a "GZIP" or "ZLIB" stream. Whatever follows its end is ignored, but for further
    gzip members.

    Reading raises EOFError where the stream ends early, and zlib.error where it is damaged.
    """
    return io.BufferedReader(_Inflated(opened, compression), 1 << 18)


class Rejoined:
    """A stream, preceded by the bytes that were already read from its beginning."""

    def __init__(self, head: bytes, opened: BinaryIO) -> None:
        self._head = head
        self._opened = opened

    def read(self, count: int = -1) -> bytes:
        """Read `count` bytes, or fewer; all by default."""
        if not self._head:
            return self._opened.read(count)
        head, self._head = (self._head, b"") if count < 0 else (self._head[:count], self._head[count:])
        return head + self._opened.read(count if count < 0 else count - len(head))


class _Inflated(io.RawIOBase):
    def __init__(self, opened: Any, compression: str) -> None:
        self._opened = opened
        self._wbits = _WBITS[compression]
        self._inflate = zlib.decompressobj(self._wbits)
        self._compressed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._inflate.eof or self._begins_again():
            self._compressed = self._compressed or self._opened.read(1 << 16)
            if not self._compressed:
                raise EOFError("the compressed stream ended early")
            data = self._inflate.decompress(self._compressed, len(buffer))
            self._compressed = self._inflate.unconsumed_tail
            if data:
                buffer[: len(data)] = data
                return len(data)
        return 0

    def _begins_again(self) -> bool:
        """Return whether another gzip member follows, and begin it."""
        rest = self._inflate.unused_data
        if self._wbits != _WBITS["GZIP"]:
            return False
        if len(rest) < 2:
            rest += self._opened.read(1 << 16)
        if rest[:2] != b"\x1f\x8b":
            return False
        self._inflate = zlib.decompressobj(self._wbits)
        self._compressed = rest
        return True
