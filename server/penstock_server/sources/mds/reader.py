"""Reads the samples of MDS shards.

A shard has the number of its samples, the offset of each, the names and encodings of its columns, and then the samples.
So any samples of a shard that is not compressed can be read. A compressed one is read and kept as a whole.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_proto import distribution
from penstock_proto.status.figures import size
from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import AT_ONCE, check_at_once
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..splits.row_ranges import Table, checked_rows, checked_split_rows, divide
from ..structure import Columns
from .index import Stored, shards_of
from .values import decoder

_HEADER = 16 << 20
"""Bytes of the description of a shard's columns, at most."""

_SAMPLES = 1 << 26
"""Samples of a shard, at most: offsets have 32 bits."""


@on_disk_as("penstock_server.sources.mds.ShardRange")
@dataclass(frozen=True, slots=True, repr=False)
class ShardRange:
    """Samples `start` to `stop` (not included) of a shard. The other attributes are those of `Stored`."""

    file: str
    start: int
    stop: int
    nbytes: int
    size: int
    compression: str
    hashes: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        return f"{self.file} samples {self.start} to {self.stop - 1}"


class MdsSplits:
    """Lists ranges of the samples of all shards.

    Args:
        files: folders, patterns or URLs.
        rows: (start, stop) of the samples to serve, counted over all folders.
        split_rows: samples of a split.
    """

    def __init__(self, files: fs.Files, rows: Any, split_rows: int | None) -> None:
        self.__name__ = "Feed.from_files"
        self._files = fs.checked(files)
        self._rows = checked_rows(rows)
        self._split_rows = checked_split_rows(split_rows)

    def __call__(self) -> list[ShardRange]:
        """Read the index of each dataset.

        Raises:
            OSError, ValueError: see `shards_of`; or there are no samples.
        """
        shards = {one.file: one for folder in fs.expand_folders(self._files) for one in shards_of(folder)}
        tables = [
            Table(one.file, one.size, one.samples, one.nbytes // max(1, one.samples), *_units(one))
            for one in shards.values()
            if one.samples
        ]
        if not tables:
            raise ValueError(f"{', '.join(self._files)}: the index lists no samples")
        found = []
        for part in divide(tables, self._rows, self._split_rows):
            one = shards[part.file]
            found.append(ShardRange(one.file, part.start, part.stop, one.nbytes, one.size, one.compression, one.hashes))
        return found


def _units(shard: Stored) -> tuple[int, int]:
    """Return `unit` and `better` of a `Table`: a compressed shard is one split."""
    unit = shard.samples if shard.compression else 1
    return unit, unit


@on_disk_as("penstock_server.sources.mds.MdsRows")
class MdsRows(Reader):
    """Yields the samples of a range.

    Args:
        leaves: names of columns in the structure of a sample; by default a dict of all.
        decode: functions that turn the bytes of a column into a value.

    Raises:
        TypeError: `decode` is no dict of functions.
    """

    def __init__(self, leaves: Any, decode: Mapping[str, Callable[[bytes], Any]]) -> None:
        self.__name__ = "Feed.from_files"
        if not isinstance(decode, Mapping) or not all(callable(function) for function in decode.values()):
            raise TypeError(f"decode must be a dict of functions by column, got {shown(decode)}")
        self._columns = None if leaves is None else Columns(leaves, "column")
        self._decode = dict(decode)
        self._compared: set[tuple[Any, ...]] = set()

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns, self._decode

    def __call__(self, split: ShardRange) -> Iterator[Any]:
        """Yield the samples of a split.

        Raises:
            ImportError: a package for its compression is missing.
            OSError: the shard is damaged, or has changed.
            LookupError, TypeError, ValueError: a column is missing, or cannot be served.
        """
        if (now := fs.size_of(split.file)) not in (None, split.size):
            raise OSError(
                f"{split.file} has {now:,} bytes, and {split.size:,} in the index: copy the dataset again, or, if you "
                "have written it again, start the daemon again"
            )
        with fs.open_binary(split.file) as opened:
            source: Any = opened
            if split.compression:
                source = io.BytesIO(_decompressed(split, opened))
            else:
                self._compare(split, opened)
            shard = Shard(split.file, source, split.nbytes)
            columns = self._columns or Columns({name: name for name in shard.names}, "column")
            read = shard.readers(columns.names, self._decode)
            readers, make = [(name, *read[name]) for name in columns.names], columns.maker()
            for number, values in shard.samples(split.start, split.stop):
                row = []
                for name, place, function in readers:
                    try:
                        row.append(function(values[place]))
                    except MemoryError:
                        raise
                    except Exception as error:
                        raise ValueError(
                            f"{split.file} sample {number}: {name!r} cannot be decoded: {type(error).__name__}: {error}"
                        ) from error
                yield make(row)

    def _compare(self, split: ShardRange, opened: Any) -> None:
        """Compare the hashes of a file that is not compressed, once in each worker."""
        key = (split.file, *fs.stamp_of(split.file))
        if key not in self._compared:
            digests = [(name, made, wanted) for name, wanted in split.hashes if (made := hash_of(name)) is not None]
            while digests and (data := opened.read(1 << 20)):
                for _, made, _ in digests:
                    made.update(data)
            for name, made, wanted in digests:
                _check(split, name, made.hexdigest(), wanted)
            self._compared.add(key)


class Shard:
    """An open shard.

    Args:
        file: its name, for messages.
        opened: its bytes, not compressed.
        nbytes: how many bytes there are.

    Raises:
        OSError: it is damaged.

    Attributes:
        names: the names of its columns.
        encodings: their encodings.
    """

    def __init__(self, file: str, opened: Any, nbytes: int) -> None:
        self._file = file
        self._opened = opened
        opened.seek(0)
        count = int.from_bytes(self._read(4), "little")
        if count > min(_SAMPLES, nbytes // 4):
            raise self._damaged(f"{count:,} samples in {nbytes:,} bytes")
        offsets = np.frombuffer(self._read(4 * (count + 1)), "<u4").astype(np.int64)
        header = int(offsets[0]) - 4 * (count + 2)
        if not 0 <= header <= _HEADER or (np.diff(offsets) < 0).any() or offsets[-1] > nbytes:
            raise self._damaged("the offsets of its samples do not ascend, or go beyond its end")
        self._offsets = offsets
        try:
            config = json.loads(self._read(header))
            self.names = [str(name) for name in config["column_names"]]
            self.encodings = [str(name) for name in config["column_encodings"]]
            self._sizes = [None if one is None else int(one) for one in config["column_sizes"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._damaged(f"its columns cannot be read: {type(error).__name__}: {error}") from None
        if not len(self.names) == len(self.encodings) == len(self._sizes):
            raise self._damaged("it has more names than encodings")

    def readers(
        self, names: list[str], decode: Mapping[str, Callable[[bytes], Any]]
    ) -> dict[str, tuple[int, Callable[[bytes], Any]]]:
        """Return the place of each of these columns, and the function that decodes its values.

        Raises:
            LookupError: there is no such column.
            TypeError: a column cannot be served.
        """
        found = {}
        for name in names:
            if name not in self.names:
                raise LookupError(f"{self._file} has no column {name!r}; its columns are {', '.join(self.names)}")
            place = self.names.index(name)
            try:
                found[name] = place, decode.get(name) or decoder(self.encodings[place])
            except TypeError as error:
                raise TypeError(f"{self._file}: {name!r} {error}") from None
        return found

    def samples(self, start: int, stop: int) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the number of each sample, and the bytes of its columns.

        Raises:
            OSError: they are damaged, or there are not so many.
        """
        if stop >= len(self._offsets):
            raise self._damaged(f"it has {len(self._offsets) - 1} samples, fewer than the index says")
        varying = self._sizes.count(None) + self._sizes.count(0)
        self._opened.seek(int(self._offsets[start]))
        none: Iterator[int] = iter(())
        for number, nbytes in enumerate(np.diff(self._offsets[start : stop + 1]).tolist(), start):
            data = self._read(nbytes)
            lengths = none
            if varying and nbytes >= 4 * varying:
                lengths = iter(np.frombuffer(data[: 4 * varying], "<u4").tolist())
            at, values = 4 * varying, []
            for fixed in self._sizes:
                length = fixed or next(lengths, -1)
                if length < 0 or at + length > nbytes:
                    raise self._damaged(f"the columns of sample {number} are longer than the sample")
                values.append(data[at : at + length])
                at += length
            if at != nbytes:
                raise self._damaged(f"the columns of sample {number} are shorter than the sample")
            yield number, values

    def _read(self, count: int) -> bytes:
        data = fs.read_exactly(self._opened, count)
        if len(data) < count:
            raise self._damaged("it ends early")
        return data

    def _damaged(self, why: str) -> OSError:
        return OSError(f"{self._file}: the shard is damaged ({why}): copy it again")


def _decompressed(split: ShardRange, opened: Any) -> bytes:
    """Return the bytes of a compressed shard, whose hashes are compared."""
    check_at_once(max(split.nbytes, split.size), split.file, "shards")
    data = fs.read_exactly(opened, AT_ONCE + 1)
    for name, wanted in split.hashes:
        if (made := hash_of(name)) is not None:
            made.update(data)
            _check(split, name, made.hexdigest(), wanted)
    try:
        if split.compression == "gz":
            found = gzip.GzipFile(fileobj=io.BytesIO(data)).read(split.nbytes + 1)
        elif split.compression == "bz2":
            found = bz2.BZ2File(io.BytesIO(data)).read(split.nbytes + 1)
        else:
            found = _by_arrow(split, data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise OSError(f"{split.file} is truncated or damaged ({error}): copy it again") from None
    if len(found) != split.nbytes:
        raise OSError(
            f"{split.file} is not the shard of the index: decompressed, it has {size(len(found))} and not "
            f"{size(split.nbytes)}. Copy it again"
        )
    return found


def _by_arrow(split: ShardRange, data: bytes) -> bytes:
    names = {"zstd": "zstd", "br": "brotli", "snappy": "snappy"}
    if split.compression not in names:
        raise ValueError(f"the compression {split.compression!r} is not known")
    try:
        import pyarrow
    except ImportError:
        raise ImportError(
            f"{split.file} is compressed with {split.compression}, which pyarrow reads: "
            f"{distribution.pip_install('parquet')}"
        ) from None
    codec = pyarrow.Codec(names[split.compression])
    return bytes(codec.decompress(data, decompressed_size=split.nbytes, asbytes=True))


def hash_of(name: str) -> Any:
    """Return a hash object, or None if its package (xxhash) is not installed."""
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, usedforsecurity=False)
    try:
        return getattr(importlib.import_module("xxhash"), name)()
    except (ImportError, AttributeError):
        return None


def _check(split: ShardRange, name: str, found: str, wanted: str) -> None:
    if found != wanted:
        raise OSError(f"{split.file} is damaged: its {name} is not that of the index. Copy it again")
