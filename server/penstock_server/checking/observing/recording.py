"""The recording of a run: a digest of each leaf of each sample, and some of the samples themselves.

A *place* is a split, by its index, or a batch of an indexable feed, by its number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from penstock_proto.batches.columns import TEXT, Columns
from penstock_proto.spec import leaves

from ...worker.batch.nested_lists import NestedRow
from ...worker.batch.ready_batches import ReadyBatches
from ...worker.reading.loaded_feed import LoadedFeed

DIGEST = 8
"""Bytes of a leaf's digest."""

KEPT_NBYTES = 64 << 20
"""Bytes of samples that a run keeps, so that the report can show values that differ."""


TRANSFORMED = "transformed"
"""Begins the names of leaves that `batch_transform=` has made."""


class Value(Struct, frozen=True):
    """The value of a leaf: its shape and its bytes or, for text, its strings. For a row of lists of lists, these are
    the innermost items of all of them, and `lengths` are the lengths of the lists at each level."""

    dtype: str
    shape: tuple[int, ...] = ()
    data: bytes = b""
    strings: tuple[bytes, ...] = ()
    lengths: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, value: Any) -> Value:
        """Return the record of a value from a store."""
        if isinstance(value, NestedRow):
            return msgspec.structs.replace(cls.of(value.values), lengths=tuple(map(tuple, value.lengths)))
        if isinstance(value, list):
            return cls("string", strings=tuple(value))
        array = np.ascontiguousarray(value)
        return cls(array.dtype.name, np.shape(value), array.tobytes())

    @property
    def nbytes(self) -> int:
        """About how many bytes the value takes."""
        return len(self.data) + sum(map(len, self.strings))


class Kept(Struct, frozen=True):
    """A sample that was kept: its place, its number there, and its leaves."""

    place: int
    number: int
    values: tuple[Value, ...]


class Recording(Struct):
    """The recording of a run.

    Attributes:
        paths: the names of the leaves, such as `sample['x'][0]`. With `batch_transform=`, those of what it makes of the
            samples follow.
        names: a short text for each place.
        digests: the concatenated digests of the samples of each place.
        ended: the places that were read to their end.
        pieces: the reads in their order, each as (place, number of the first sample, count).
        kept: the samples that were kept.
    """

    paths: list[str]
    names: dict[int, str] = {}
    digests: dict[int, bytearray] = {}
    ended: set[int] = set()
    pieces: list[tuple[int, int, int]] = []
    kept: list[Kept] = []

    @property
    def width(self) -> int:
        """Bytes of the digests of one sample."""
        return DIGEST * len(self.paths)

    @property
    def samples(self) -> int:
        """How many samples the recording has."""
        return sum(count for _, _, count in self.pieces)

    def count(self, place: int) -> int:
        """Return how many samples of a place the recording has."""
        return len(self.digests.get(place, b"")) // self.width

    def samples_of(self, place: int, count: int) -> list[bytes]:
        """Return the digests of the first samples of a place, without those of what `batch_transform=` made."""
        data, width = bytes(self.digests[place]), self.width
        leaves = DIGEST * sum(not path.startswith(TRANSFORMED) for path in self.paths)
        return [data[width * number : width * number + leaves] for number in range(count)]

    def save(self, path: Path) -> None:
        """Write the recording to a file."""
        path.write_bytes(msgspec.msgpack.encode(self))


def load(path: Path) -> Recording:
    """Read what `Recording.save` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=Recording)


class Recorder:
    """Makes a recording.

    Args:
        feed: the feed that is read; its spec must be known.
        other: the recording that this run repeats, or None. The recorder keeps the first sample of each place that
            differs from `other`; without `other`, it keeps the first samples that are read.
    """

    def __init__(self, feed: LoadedFeed, other: Recording | None) -> None:
        assert feed.spec is not None
        paths = [f"sample{path}" for path, _ in leaves(feed.spec)]
        if feed.has_lane_batches:
            assert feed.sample_spec is not None
            before = [f"sample{path}" for path, _ in leaves(feed.sample_spec)]
            paths = [*before, *(f"{TRANSFORMED} {path}" for path in paths)]
        self.recording = Recording(paths)
        self._columns = Columns(feed.spec, feed.plan.batch_size).columns
        self._ready = isinstance(feed.collate, ReadyBatches)
        self._other = other
        self._room = KEPT_NBYTES
        self._differ: set[int] = set()

    def add(self, place: int, store: Any, rows: int) -> None:
        """Record the first rows of a store as the next samples of a place."""
        recording = self.recording
        known = recording.digests.setdefault(place, bytearray())
        first = len(known) // recording.width
        recording.pieces.append((place, first, rows))
        for number, values in enumerate(self._rows(store, rows), first):
            digests = b"".join(map(_digest, values))
            known += digests
            if self._room > 0 and self._is_kept(place, number, digests):
                kept = Kept(place, number, tuple(map(Value.of, values)))
                self._room -= 256 + sum(value.nbytes for value in kept.values)
                recording.kept.append(kept)

    def _is_kept(self, place: int, number: int, digests: bytes) -> bool:
        if self._other is None:
            return True
        at = number * len(digests)
        known = self._other.digests.get(place)
        if place in self._differ or (known is not None and known[at : at + len(digests)] == digests):
            return False
        self._differ.add(place)
        return True

    def _rows(self, store: Any, rows: int) -> Iterator[Sequence[Any]]:
        """Yield the leaves of each row; text is a list of `bytes`."""
        if not self._ready:
            yield from ([leaf[row] for leaf in store] for row in range(rows))
            return
        for row in range(rows):
            arrays = iter(store[row])
            yield [_joined(next(arrays), next(arrays)) if c.kind is TEXT else next(arrays) for c in self._columns]


def _joined(data: Any, offsets: Any) -> list[bytes]:
    whole, ends = data.tobytes(), offsets.tolist()
    return [whole[start:stop] for start, stop in pairwise(ends)]


def _digest(value: Any) -> bytes:
    if isinstance(value, NestedRow):
        lengths = repr(value.lengths).encode()
        return hashlib.blake2b(lengths + _digest(value.values), digest_size=DIGEST).digest()
    if isinstance(value, list):
        made = hashlib.blake2b(repr(list(map(len, value))).encode(), digest_size=DIGEST)
        for string in value:
            made.update(string)
        return made.digest()
    data = value.tobytes()
    return hashlib.blake2b(data, digest_size=DIGEST, salt=_salt(np.shape(value))).digest()


def _salt(shape: tuple[int, ...]) -> bytes:
    """Return 8 bytes that differ for arrays of different shapes."""
    return hash(shape).to_bytes(8, "little", signed=True)  # a hash of integers, so it is the same in every process
