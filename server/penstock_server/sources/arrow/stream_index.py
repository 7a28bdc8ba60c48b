"""Finds the record batches of an Arrow stream, and its end, without reading their data.

A stream is a series of messages: its schema, dictionaries, and record batches. The head of a message is a flatbuffer
that says what kind it is, and how many bytes of data follow. See "Encapsulated message format" in
https://arrow.apache.org/docs/format/Columnar.html, and Message.fbs and Schema.fbs there.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, NamedTuple

from .. import files as fs

_MARK = b"\xff\xff\xff\xff"
"""What comes before the length of each head since Arrow 0.15. A length of 0 ends the stream."""

_LONGEST_HEAD = 64 << 20
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_KIND, _HEADER, _BODY_LENGTH = 1, 2, 3
"""The numbers of a message's fields: its kind, its header, and the length of its data."""

_ENDIANNESS = 0
"""The field of a schema."""


class StreamIndex(NamedTuple):
    """What the heads of a stream's messages say.

    Attributes:
        whole: whether it has all its messages. If not, it is cut off or damaged.
        places: the offset of each record batch. None if the stream must be read in order, because it has dictionaries
            or is big-endian.
    """

    whole: bool
    places: tuple[int, ...] | None


_DAMAGED = StreamIndex(False, None)


def index_of(stream: BinaryIO, size: int) -> StreamIndex:
    """Read the heads of the messages of a stream, which has `size` bytes."""
    mark = fs.read_exactly(stream, len(_MARK))
    mark = mark if mark == _MARK else b""
    places: list[int] = []
    alone, at = True, 0
    while True:
        stream.seek(at)
        start = fs.read_exactly(stream, len(mark) + 4)
        length = int.from_bytes(start[-4:], "little")
        if len(start) < len(mark) + 4 or not start.startswith(mark) or length > _LONGEST_HEAD:
            return _DAMAGED
        if not length:
            return StreamIndex(True, tuple(places) if alone else None) if at else _DAMAGED
        try:
            kind, little, body = _message(fs.read_exactly(stream, length))
        except (struct.error, IndexError):
            return _DAMAGED
        if body < 0 or (kind not in (_DICTIONARY, _RECORD_BATCH) if at else kind != _SCHEMA):
            return _DAMAGED
        alone = alone and little and kind != _DICTIONARY
        if kind == _RECORD_BATCH:
            places.append(at)
        at += len(start) + length + body
        if at > size:
            return _DAMAGED


def _message(head: bytes) -> tuple[int, bool, int]:
    """Return the kind of a message, whether it may be little-endian, and the bytes of its data.

    Raises:
        IndexError, struct.error: it is damaged.
    """
    table = _unpack("<I", head, 0)
    kind_at, body_at = _field(head, table, _KIND), _field(head, table, _BODY_LENGTH)
    kind = head[kind_at] if kind_at else 0
    body = _unpack("<q", head, body_at) if body_at else 0
    if kind != _SCHEMA:
        return kind, True, body
    header_at = _field(head, table, _HEADER)
    endianness_at = _field(head, header_at + _unpack("<I", head, header_at), _ENDIANNESS)
    return kind, not (endianness_at and _unpack("<h", head, endianness_at)), body


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
