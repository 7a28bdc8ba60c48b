"""Reads the values of LMDB stores, in the order of their keys.

The pattern of each leaf has one `*`, as in "image-*". A sample is what the first pattern's keys, in order, have in the
place of the `*`: the values of all patterns with that in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from penstock_proto.value_text import shown

from .. import files as fs
from ..bounds import AT_ONCE, check_at_once
from ..names_on_disk import on_disk_as
from ..reader import StackReader
from ..row_stacks import RowStack
from ..structure import Columns
from .opening import damage_of, data_file, opened

_PIECES = 256
_LEAST = 64
"""About how many splits a store is divided into, and the least number of samples in one."""

_STACK = 256
"""Samples whose keys are read at once."""

Buffer: TypeAlias = bytes | memoryview
Value = TypeVar("Value")

KEY = "key"
"""The name of the leaf that is the key, not a value."""


@on_disk_as("penstock_server.sources.lmdb_stores.KeyRange")
@dataclass(frozen=True, slots=True, repr=False)
class KeyRange:
    """`count` keys of the first pattern, from `first` on."""

    file: str
    first: bytes
    count: int

    def __repr__(self) -> str:
        return f"{self.file}: {self.count} keys from {self.first!r}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of keys: what comes before and after the `*`."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, text: str) -> Pattern:
        """Parse a pattern.

        Raises:
            ValueError: it has no `*`, or more than one.
        """
        if text.count("*") != 1:
            raise ValueError(
                f"a leaf of an LMDB store is a pattern of keys with one *, such as 'image-*', or {KEY!r}, got {text!r}"
            )
        before, after = text.encode(errors="surrogateescape").split(b"*")
        return cls(before, after)

    def matching(self, entries: Iterator[tuple[Buffer, Value]]) -> Iterator[tuple[bytes, Value]]:
        """Yield the entries whose keys match, up to the first one whose key begins otherwise. __len__ and its like
        never match."""
        before, after = self.before, self.after
        least = len(before) + len(after)
        for buffer, value in entries:
            key = bytes(buffer)
            if not key.startswith(before):
                return
            if len(key) >= least and key.endswith(after) and not (key.startswith(b"__") and key.endswith(b"__")):
                yield key, value

    def part(self, key: bytes) -> bytes:
        """Return what a key that matches has in the place of the `*`."""
        return key[len(self.before) : len(key) - len(self.after)]


class LmdbFiles:
    """The leaves of stores, for both listing and reading.

    Args:
        files: paths and patterns.
        leaves: patterns of keys, or "key", in the structure of a sample.
        decode: functions that turn values into leaves, by pattern.

    Raises:
        TypeError, ValueError: an argument cannot work.
    """

    def __init__(self, files: fs.Files, leaves: Any, decode: Mapping[str, Callable[[bytes], Any]]) -> None:
        if not isinstance(decode, Mapping) or not all(callable(function) for function in decode.values()):
            raise TypeError(f"decode must be a dict of functions by pattern, got {shown(decode)}")
        self.files = fs.checked(files)
        self.columns = Columns(leaves, "pattern of keys")
        self.decode = dict(decode)
        self.patterns = {name: Pattern.of(name) for name in self.columns.names if name != KEY}
        if not self.patterns:
            raise ValueError(f"leaves must name a pattern of keys besides {KEY!r}, such as 'image-*', or '*' for all")
        self.first = next(iter(self.patterns.values()))

    def entries(self, transaction: Any, start: bytes) -> Iterator[tuple[bytes, Buffer]]:
        """Yield the keys of the first pattern from `start` on, with their values."""
        cursor = transaction.cursor()
        if cursor.set_range(start):
            yield from self.first.matching(cursor.iternext())


class LmdbSplits:
    """Lists ranges of the keys of stores."""

    def __init__(self, stores: LmdbFiles) -> None:
        self.__name__ = "Feed.from_files"
        self._stores = stores
        self._known: dict[str, tuple[Any, list[KeyRange]]] = {}

    def __call__(self) -> list[KeyRange]:
        """Read all keys of each store that is new or has changed.

        Raises:
            ImportError, OSError: a store cannot be opened.
            ValueError: no key matches.
        """
        return [split for file in fs.expand_folders(self._stores.files) for split in self._of(file)]

    def _of(self, file: str) -> list[KeyRange]:
        stamp = fs.stamp_of(data_file(file))
        known = self._known.get(file)
        if known is not None and known[0] == stamp:
            return known[1]
        found: list[KeyRange] = []
        with opened(file) as transaction:
            step = max(_LEAST, -(-transaction.stat()["entries"] // (_PIECES * len(self._stores.patterns))))
            first, count = b"", 0
            for key, _ in self._stores.entries(transaction, self._stores.first.before):
                if count == step:
                    found.append(KeyRange(file, first, count))
                    count = 0
                first = key if not count else first
                count += 1
            if count:
                found.append(KeyRange(file, first, count))
            if not found:
                name = next(iter(self._stores.patterns))
                raise ValueError(f"{file}: no key matches {name!r}: its keys are {_some(transaction)}")
        self._known[file] = stamp, found
        return found


@on_disk_as("penstock_server.sources.lmdb_stores.LmdbRows")
class LmdbRows(StackReader):
    """Yields the samples of a range of keys."""

    def __init__(self, stores: LmdbFiles) -> None:
        self.__name__ = "Feed.from_files"
        self._stores = stores

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._stores.columns, self._stores.decode

    def files_of(self, split: KeyRange) -> list[str]:
        """See `Reader`."""
        return [data_file(split.file)]

    def stacks(self, split: KeyRange) -> Iterator[RowStack]:
        """Yield a sample for each key of the first pattern; see `StackReader`.

        Raises:
            ImportError, OSError: the store cannot be read.
            LookupError: a value is missing.
            ValueError: a value cannot be decoded, or is too large; or the store has fewer keys than before.
        """
        columns, left = self._stores.columns, split.count
        with opened(split.file) as transaction, damage_of(split.file):
            entries = self._stores.entries(transaction, split.first)
            while left and (found := list(islice(entries, min(left, _STACK)))):
                parts = [self._column(transaction, split.file, name, found) for name in columns.names]
                yield RowStack(columns, parts, len(found))
                left -= len(found)
        if left:
            raise ValueError(f"{split.file} has changed: it has fewer keys than when its splits were listed")

    def _column(self, transaction: Any, file: str, name: str, found: list[tuple[bytes, Buffer]]) -> Any:
        if name == KEY:
            return [key for key, _ in found]
        pattern, first = self._stores.patterns[name], self._stores.first
        if pattern == first:
            return self._decoded(file, name, found)
        keys = [pattern.before + first.part(key) + pattern.after for key, _ in found]
        return self._decoded(file, name, zip(keys, map(transaction.get, keys), strict=True))

    def _decoded(self, file: str, name: str, entries: Iterable[tuple[bytes, Buffer | None]]) -> Iterator[Any]:
        """Yield the leaf of each entry: its value, decoded. A value of None is missing."""
        decode = self._stores.decode.get(name)
        with damage_of(file):
            for key, value in entries:
                if value is None:
                    raise LookupError(f"{file} has no key {key!r}, which {name!r} stands for: correct leaves=")
                if len(value) > AT_ONCE:
                    check_at_once(len(value), f"{file}: key {key!r}", "values")
                leaf = bytes(value)
                if decode is not None:
                    try:
                        leaf = decode(leaf)
                    except MemoryError:
                        raise
                    except Exception as error:
                        raise ValueError(
                            f"{file}: the value of key {key!r} cannot be decoded: {type(error).__name__}: {error}"
                        ) from error
                yield leaf


def _some(transaction: Any) -> str:
    keys = [
        bytes(key) for _, key in zip(range(5), transaction.cursor().iternext(keys=True, values=False), strict=False)
    ]
    return ", ".join(map(repr, keys)) or "none"
