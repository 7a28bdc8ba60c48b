"""Finds the record batches of an Arrow stream without reading their data.

A stream is a series of messages: its schema, dictionaries, and record batches. The head of a message is a flatbuffer
that says what kind it is, and how many bytes of data follow. See "Encapsulated message format" in
https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs and Schema.fbs there.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

from .. import files as fs

_MARK = b"\xff\xff\xff\xff"
"""What each message begins with, since Arrow 0.15."""

_LONGEST_HEAD = 16 << 20
_SCHEMA, _RECORD_BATCH = 1, 3
_KIND, _HEADER, _BODY_LENGTH = 1, 2, 3
"""Fields of a message: its kind, what is described, and the bytes of its data."""

_ENDIANNESS = 0
"""The field of a schema."""


def record_batches(stream: BinaryIO, size: int) -> list[int] | None:
    """Return where the record batches of a stream begin.

    Args:
        stream: the file.
        size: its bytes.

    Returns:
        Their offsets. None if one cannot be read without what comes before it, as there are dictionaries or the numbers
        are big-endian; or if the stream is old or damaged, of which pyarrow knows more.
    """
    found: list[int] = []
    at = 0
    while True:
        stream.seek(at)
        start = fs.read_exactly(stream, 8)
        length = int.from_bytes(start[4:], "little")
        if len(start) < 8 or start[:4] != _MARK or length > _LONGEST_HEAD:
            return None
        if not length:
            return found
        try:
            kind, body = _message(fs.read_exactly(stream, length))
        except (struct.error, IndexError):
            return None
        if kind != (_RECORD_BATCH if at else _SCHEMA) or body < 0:
            return None
        if kind == _RECORD_BATCH:
            found.append(at)
        at += 8 + length + body
        if at > size:
            return None


def _message(head: bytes) -> tuple[int, int]:
    """Return the kind of a message, and the bytes of its data. The kind of a big-endian schema is 0.

    Raises:
        IndexError, struct.error: it is damaged.
    """
    table = _unpack("<I", head, 0)
    kind_at, body_at = _field(head, table, _KIND), _field(head, table, _BODY_LENGTH)
    kind = head[kind_at] if kind_at else 0
    body = _unpack("<q", head, body_at) if body_at else 0
    if kind == _SCHEMA:
        header_at = _field(head, table, _HEADER)
        endianness_at = _field(head, header_at + _unpack("<I", head, header_at), _ENDIANNESS)
        if endianness_at and _unpack("<h", head, endianness_at):
            kind = 0
    return kind, body


def _field(head: bytes, table: int, number: int) -> int:
    """Return where a field of a table is, or 0 if the table leaves it out."""
    fields = table - _unpack("<i", head, table)
    at = 4 + 2 * number
    if at + 2 > _unpack("<H", head, fields):
        return 0
    place = _unpack("<H", head, fields + at)
    return table + place if place else 0


def _unpack(form: str, head: bytes, at: int) -> int:
    if at < 0:  # struct would count from the end
        raise IndexError(at)
    value: int = struct.unpack_from(form, head, at)[0]
    return value
