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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock_proto import distribution
from penstock_proto.status.figures import size
from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import AT_ONCE, check_at_once
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack
from ..splits.row_ranges import Table, checked_rows, checked_split_rows, divide
from ..structure import Columns
from .index import Stored, shards_of
from .values import decoder, stacker

_HEADER = 16 << 20
"""Bytes of the description of a shard's columns, at most."""

_SLAB = 1 << 20
"""Bytes of samples that are read at once. One sample may have more."""

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
class MdsRows(StackReader):
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

    def stacks(self, split: ShardRange) -> Iterator[RowStack]:
        """Yield the samples of a split; see `StackReader`.

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
            readers = [shard.column(name, self._decode.get(name)) for name in columns.names]
            for slab in shard.slabs(split.start, split.stop):
                yield RowStack(columns, [column.values(slab) for column in readers], slab.rows)
                del slab  # before the next one is read

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


class Slab(NamedTuple):
    """Consecutive samples.

    Attributes:
        first: the number of the first one.
        rows: how many there are.
        columns: the bytes of each column: uint8[rows, length] if they have one length in all samples.
    """

    first: int
    rows: int
    columns: Sequence[npt.NDArray[np.uint8] | list[bytes]]


@dataclass(frozen=True, slots=True)
class ShardColumn:
    """A column that is served.

    Attributes:
        file, name: of the shard and the column.
        place: its number in the shard.
        decode: makes a leaf of the bytes of a value.
        stack: makes leaves of the bytes of many values; see `stacker`.
    """

    file: str
    name: str
    place: int
    decode: Callable[[bytes], Any]
    stack: Callable[[npt.NDArray[np.uint8]], Any] | None

    def values(self, slab: Slab) -> Any:
        """Return the leaves of a slab, or an iterator that decodes each of them.

        Raises:
            ValueError: raised by the iterator: a value cannot be decoded.
        """
        data = slab.columns[self.place]
        if isinstance(data, list):
            return self._each(slab.first, data)
        found = self.stack(data) if self.stack else None
        return self._each(slab.first, (row.tobytes() for row in data)) if found is None else found

    def _each(self, first: int, values: Iterable[bytes]) -> Iterator[Any]:
        decode = self.decode
        for number, value in enumerate(values, first):
            try:
                yield decode(value)
            except MemoryError:
                raise
            except Exception as error:
                raise ValueError(
                    f"{self.file} sample {number}: {self.name!r} cannot be decoded: {type(error).__name__}: {error}"
                ) from error


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
        self._varying = self._sizes.count(None) + self._sizes.count(0)

    def column(self, name: str, decode: Callable[[bytes], Any] | None) -> ShardColumn:
        """Return a column, whose values `decode` decodes, or by default what its encoding says.

        Raises:
            LookupError: there is no such column.
            TypeError: it cannot be served.
        """
        if name not in self.names:
            raise LookupError(f"{self._file} has no column {name!r}; its columns are {', '.join(self.names)}")
        place = self.names.index(name)
        encoding = self.encodings[place]
        if decode is not None:
            return ShardColumn(self._file, name, place, decode, None)
        try:
            return ShardColumn(self._file, name, place, decoder(encoding), stacker(encoding))
        except TypeError as error:
            raise TypeError(f"{self._file}: {name!r} {error}") from None

    def slabs(self, start: int, stop: int) -> Iterator[Slab]:
        """Yield samples, about 1 MiB at a time.

        Raises:
            OSError: a sample is damaged, or the shard has fewer samples. Those before the damage are yielded first.
        """
        if stop >= len(self._offsets):
            raise self._damaged(f"it has {len(self._offsets) - 1} samples, fewer than the index says")
        self._opened.seek(int(self._offsets[start]))
        while start < stop:
            begin = int(self._offsets[start])
            whole = int(np.searchsorted(self._offsets, begin + _SLAB, "right")) - 1
            end = max(start + 1, min(stop, whole))
            data = self._read(int(self._offsets[end]) - begin)
            slab = self._equal(start, end, data)
            if slab is None:
                yield from self._unequal(start, end, data)
            else:
                yield slab
            del data, slab  # before the next ones are read
            start = end

    def _equal(self, start: int, end: int, data: bytes) -> Slab | None:
        """Return these samples if they are intact, and each column has one length in all of them."""
        sizes = np.diff(self._offsets[start : end + 1])
        if not (sizes == sizes[0]).all():
            return None
        rows = np.frombuffer(data, np.uint8).reshape(end - start, int(sizes[0]))
        head = 4 * self._varying
        try:
            places = self._places(data[: int(sizes[0])])
        except ValueError:
            return None
        if (rows[:, :head] != rows[0, :head]).any():
            return None
        return Slab(start, end - start, [rows[:, low:high] for low, high in places])

    def _unequal(self, start: int, end: int, data: bytes) -> Iterator[Slab]:
        """Yield the samples up to the first damaged one.

        Raises:
            OSError: one is damaged.
        """
        columns: list[list[bytes]] = [[] for _ in self.names]
        offsets = (self._offsets[start : end + 1] - self._offsets[start]).tolist()
        for number, (low, high) in enumerate(pairwise(offsets), start):
            sample = data[low:high]
            try:
                places = self._places(sample)
            except ValueError as error:
                if number > start:
                    yield Slab(start, number - start, columns)
                raise self._damaged(f"the columns of sample {number} {error}") from None
            for column, (first, after) in zip(columns, places, strict=True):
                column.append(sample[first:after])
        yield Slab(start, end - start, columns)

    def _places(self, sample: bytes) -> list[tuple[int, int]]:
        """Return where each column of a sample begins and ends.

        Raises:
            ValueError: the sample is damaged.
        """
        at = 4 * self._varying
        lengths = iter(np.frombuffer(sample, "<u4", self._varying).tolist() if len(sample) >= at else ())
        places = []
        for fixed in self._sizes:
            length = fixed or next(lengths, -1)
            if length < 0 or at + length > len(sample):
                raise ValueError("are longer than the sample")
            places.append((at, at + length))
            at += length
        if at != len(sample):
            raise ValueError("are shorter than the sample")
        return places

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
