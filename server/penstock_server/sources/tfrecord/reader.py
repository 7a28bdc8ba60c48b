"""TFRecord files of Examples, read without TensorFlow: plain, GZIP or ZLIB.

A record is a length (uint64), a CRC of it, the data and a CRC of them. A file does not say where its records begin, so
dividing it means hopping from length to length.
"""

from __future__ import annotations

import gzip
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from penstock_proto.status.figures import size
from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import AT_ONCE
from ..features import Feature
from ..inflating import Rejoined, inflated
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..splits.byte_range import ByteRange
from .crc32c import crc32c, masked
from .example import BadExample, ExampleParser

_HEAD = struct.Struct("<QI")
_CRC = struct.Struct("<I")
_ANY_HEADER = zlib.MAX_WBITS | 32  # of gzip or zlib

_PIECES = 256
"""About how many splits all files together are divided into."""

_LEAST, _MOST = 1 << 20, 64 << 20
"""The least and the greatest size of a split in bytes. A file of up to twice a split's size is not divided."""

_PIECE = 16 << 20
"""Bytes that are read at once."""

_SHOWN = 8


class CorruptRecord(ValueError):
    """A record of a file is corrupt, or is not as declared."""


class TFRecordSplits:
    """Lists files, and ranges of large local files that are not compressed."""

    def __init__(self, files: fs.Files, split_bytes: int | None) -> None:
        self.__name__ = "Feed.from_tfrecord"
        self._files = fs.checked(files)
        if split_bytes is not None and (type(split_bytes) is not int or split_bytes < 1):
            raise ValueError(f"split_bytes must be a whole number of at least 1, or None, got {shown(split_bytes)}")
        self._split_bytes = split_bytes
        self._known: dict[tuple[Any, ...], list[ByteRange]] = {}

    def __call__(self) -> list[ByteRange]:
        """Find the files, and scan the record lengths of the large ones.

        Raises:
            OSError: a file is missing or cannot be read.
        """
        found = fs.expand(self._files)
        sizes = {file: fs.size_in_splits(file) for file in found}
        about = self._split_bytes or min(_MOST, max(_LEAST, sum(size or 0 for size in sizes.values()) // _PIECES))
        splits: list[ByteRange] = []
        for file in found:
            size = sizes[file]
            if (
                size is None or size <= 2 * about or fs.is_url(file)
            ):  # which would be fetched as a whole, to find where records begin
                splits.append(ByteRange(file, 0, None, size))
            else:
                splits += self._divided(file, size, about)
        return splits

    def _divided(self, file: str, size: int, about: int) -> list[ByteRange]:
        key = (file, size, os.stat(file).st_mtime_ns, about)
        if key not in self._known:
            with fs.open_binary(file) as opened:
                starts = [0] if compression_of(opened.read(_HEAD.size)) else _starts(opened, about)
            stops = [*starts[1:], None]
            self._known[key] = [ByteRange(file, low, high, size) for low, high in zip(starts, stops, strict=True)]
        return self._known[key]


@on_disk_as("penstock_server.sources.tfrecord.TFRecordSamples")
class TFRecordSamples(Reader):
    """Yields the Examples of a range as samples.

    Args:
        features: their declarations, by name.
        skip: leave out corrupt records, and report them at the end of the range.
    """

    def __init__(self, features: Mapping[str, Feature], *, skip: bool) -> None:
        self.__name__ = "Feed.from_tfrecord"
        if not isinstance(features, Mapping) or not features:
            raise TypeError(
                'features must be a dict such as {"label": FixedLen((), "int64")} with at least one feature, got '
                f"{shown(features)}"
            )
        for name, feature in features.items():
            if not isinstance(name, str) or not isinstance(feature, Feature):
                raise TypeError(
                    f"features[{name!r}] must be FixedLen(...), VarLen(...) or FixedLenSequence(...), got "
                    f"{shown(feature)}"
                )
        self._features = dict(features)
        self._skip = skip

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._features, self._skip

    def __call__(self, split: ByteRange) -> Iterator[dict[str, Any]]:
        """Yield the samples of a split.

        Raises:
            CorruptRecord: a record is corrupt, or does not have the declared features. With `skip` this comes at the
                end of the split and names all records that were left out. A corrupt length raises it at once, because
                the rest of the split is lost.
            OSError: the file cannot be read, or has changed since its splits were listed.
        """
        parse = ExampleParser(self._features)
        left_out: list[str] = []
        with fs.open_binary(split.file, split.size) as opened:
            for offset, data, why in records(split, opened):
                try:
                    if why:
                        raise BadExample(why)
                    sample = parse(data)
                except BadExample as error:
                    if not self._skip:
                        raise CorruptRecord(f"{split.file}: record at byte {offset}: {error}") from None
                    left_out.append(f"byte {offset} ({error})")
                else:
                    yield sample
        if left_out:
            more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
            raise CorruptRecord(
                f"{split.file}: {len(left_out)} of its records are corrupt and were left out, all others were served: "
                f"{', '.join(left_out[:_SHOWN])}{more}"
            )


def records(split: ByteRange, opened: BinaryIO) -> Iterator[tuple[int, bytes, str]]:
    """Yield each record's offset, data, and defect ("" if it has none).

    Offsets in a compressed file are those of the uncompressed data.

    Raises:
        CorruptRecord: the place of the next record is not known, or a record is larger than any that is read.
    """
    crc_of = crc32c()
    stream, offset, where = opened, split.start, ""
    if split.start:
        opened.seek(split.start)
    else:
        head = fs.read_exactly(opened, _HEAD.size)
        compression = compression_of(head)
        stream = _decompressed(Rejoined(head, opened), compression)
        where = f" of the {compression} data" if compression else ""
    while split.stop is None or offset < split.stop:
        try:
            head = fs.read_exactly(stream, _HEAD.size)
            if not head:
                return
            length = _length(head)
            if split.size is not None and not where and offset + length > split.size:
                raise _Lost(_TRUNCATED)
            data, check = _read(stream, length), fs.read_exactly(stream, _CRC.size)
            if len(check) < _CRC.size:
                raise _Lost(_TRUNCATED)
        except _Lost as lost:
            raise CorruptRecord(f"{split.file}: record at byte {offset}{where}: {lost}") from None
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise CorruptRecord(
                f"{split.file}: record at byte {offset}{where}: the compressed data are damaged ({error})"
            ) from None
        yield offset, data, "" if masked(crc_of(data)) == _CRC.unpack(check)[0] else "its data are corrupt (wrong CRC)"
        offset += _HEAD.size + length + _CRC.size


class _Lost(Exception):
    """The next record cannot be found."""


_TRUNCATED = "the file is truncated here: copy it again"


def _length(head: bytes) -> int:
    if len(head) < _HEAD.size:
        raise _Lost(_TRUNCATED)
    length, check = _HEAD.unpack(head)
    if masked(crc32c()(head[:8])) != check:
        raise _Lost("its length is corrupt (wrong CRC), so this record and all after it are lost")
    return int(length)


def _read(stream: BinaryIO, length: int) -> bytes:
    """Read the data of a record, or less at the end of the file. Allocate little for data that are not there."""
    if length > AT_ONCE:
        raise _Lost(
            f"it has {size(length)}, and more than {size(AT_ONCE)} are not read at once, as no tf.train.Example can be "
            "that large: write smaller records, or leave the file out"
        )
    if length <= _PIECE:
        return fs.read_exactly(stream, length)
    pieces = []
    while length:
        pieces.append(fs.read_exactly(stream, min(length, _PIECE)))
        if not pieces[-1]:
            break
        length -= len(pieces[-1])
    return b"".join(pieces)


def _starts(opened: BinaryIO, about: int) -> list[int]:
    """Return the offsets of records that begin a split of `about` bytes.

    The search ends where a length is corrupt; the reader of the last split reports that.
    """
    starts = [0]
    with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
        for offset in offsets(data):
            if offset - starts[-1] >= about:
                starts.append(offset)
    return starts


def offsets(data: mmap.mmap) -> Iterator[int]:
    """Yield where each record of a file that is not compressed begins, until the file ends or a length is corrupt."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        try:
            length = _length(data[offset : offset + _HEAD.size])
        except _Lost:
            return
        yield offset
        offset += _HEAD.size + length + _CRC.size


def compression_of(head: bytes) -> str:
    """Return "GZIP", "ZLIB" or "", by the first bytes of a file."""
    if is_head(head):
        return ""
    if head[:2] == b"\x1f\x8b":
        return "GZIP"
    return "ZLIB" if len(head) > 1 and head[0] & 15 == 8 and (head[0] << 8 | head[1]) % 31 == 0 else ""


def is_head(head: bytes) -> bool:
    """Return whether bytes are a record's length and its CRC."""
    return len(head) == _HEAD.size and masked(crc32c()(head[:8])) == _HEAD.unpack(head)[1]


def begins_with_record(head: bytes) -> bool:
    """Return whether the first bytes of a file, at least 64, are the beginning of a record, perhaps compressed."""
    if compression_of(head[: _HEAD.size]):
        try:
            head = zlib.decompressobj(_ANY_HEADER).decompress(head, _HEAD.size)
        except zlib.error:
            return False
    return is_head(head[: _HEAD.size])


def _decompressed(opened: Any, compression: str) -> Any:
    if compression == "GZIP":
        return gzip.GzipFile(fileobj=opened, mode="rb")
    return inflated(opened, compression) if compression else opened
