"""Describes TFRecord files: the features that their first records have, as `FixedLen` and `VarLen`."""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections import Counter
from typing import Any

import numpy as np

from .. import files as fs
from ..description import Column, Description, local_size
from ..features import Feature, FixedLen, FixedLenSequence, VarLen
from ..image_encodings import encoding
from ..splits.byte_range import ByteRange
from .example import DTYPES, example_class
from .reader import CorruptRecord, compression_of, offsets, records

_RECORDS = 256
"""The most records that are read to find the features."""

_SECONDS = 1.0
"""The longest time that is spent on these records, and the longest time that is spent on counting records."""

_LEAST_RAW = 64
"""The fewest bytes that are taken for an array: 8 rows of 8 pixels. Fewer may be, for example, a digest."""


class _Feature:
    """The values that the records have under one name."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.lengths: Counter[int] = Counter()
        self.sizes: Counter[int] = Counter()  # of bytes values
        self.encoded: Counter[str] = Counter()  # image formats of bytes values; "" for those that are not images
        self.is_text = True
        self.floats = True  # whether all bytes values can be arrays of float32
        self.constant: int | None = None  # the value of a single int64, if it is the same everywhere

    def add(self, message: Any) -> None:
        kind = message.WhichOneof("kind")
        if kind is None:
            return
        values = getattr(message, kind).value
        self.kinds[DTYPES[kind]] += 1
        self.lengths[len(values)] += 1
        if DTYPES[kind] == "bytes":
            for value in values:
                self.sizes[len(value)] += 1
                self.encoded[encoding(value)] += 1
                self.is_text = self.is_text and _is_text(value)
                self.floats = self.floats and _can_be_floats(value)
        elif DTYPES[kind] == "int64" and len(values) == 1:
            first = sum(self.kinds.values()) == 1
            self.constant = values[0] if first or self.constant == values[0] else None


def describe(file: str) -> Description:
    """Describe a TFRecord file by its first records.

    Raises:
        CorruptRecord: the first record is corrupt, or is not an Example.
        ImportError: protobuf is not installed.
        OSError: the file cannot be read; the message names it.
    """
    features: dict[str, _Feature] = {}
    lists: dict[str, _Feature] = {}  # the steps of feature lists
    in_lists: Counter[str] = Counter()  # how many records have each
    count = 0
    deadline = time.monotonic() + _SECONDS
    with fs.open_binary(file) as opened:
        found = records(ByteRange(file, 0, None, local_size(file)), opened)
        while count < _RECORDS and (not count or time.monotonic() < deadline):
            try:
                record = next(found, None)
                if record is None:
                    break
                example = _parsed(file, *record)
                for name, message in example.features.feature.items():
                    features.setdefault(name, _Feature()).add(message)
                for name, steps in example.feature_lists.feature_list.items():
                    in_lists[name] += 1
                    for message in steps.feature:
                        lists.setdefault(name, _Feature()).add(message)
            except CorruptRecord:
                if not count:
                    raise
                break  # the sampling reports it
            count += 1
    declared, columns, left_out = _declared(features, count)
    for name in sorted(in_lists):
        if name in features:
            left_out[f"{name} (feature list)"] = "has the name of a feature, too"
        else:
            _declare_list(name, lists.get(name), in_lists[name], count, declared, columns, left_out)
    facts, rows = _counted(file)
    facts.append(f"features as in its first {count} records" if count > 1 else "features as in its first record")
    return Description(tuple(columns), left_out, tuple(facts), rows, features=dict(declared))


def _parsed(file: str, offset: int, data: bytes, why: str) -> Any:
    parse = example_class().FromString  # example_class() says what to install if protobuf is missing
    from google.protobuf.message import DecodeError

    if not why:
        try:
            return parse(data)
        except DecodeError:
            why = "it is not a tf.train.Example"
    raise CorruptRecord(f"{file}: record at byte {offset}: {why}")


def _declared(features: dict[str, _Feature], count: int) -> tuple[dict[str, Feature], list[Column], dict[str, str]]:
    declared: dict[str, Feature] = {}
    columns: list[Column] = []
    left_out: dict[str, str] = {}
    for name in sorted(features):
        feature = features[name]
        if len(feature.kinds) != 1:
            left_out[name] = f"is {' and '.join(sorted(feature.kinds))}" if feature.kinds else "is always empty"
            continue
        (dtype,) = feature.kinds
        present = feature.kinds[dtype]
        fixed = present == count and len(feature.lengths) == 1
        length = max(feature.lengths)
        words = [f"feature {name!r}"]
        if present < count:
            words.append(f"in {present} of {count} records")
        if not fixed and dtype == "bytes":
            left_out[name] = (
                f"has {min(feature.lengths) if present == count else 0} to {length} strings, but a leaf needs the same "
                f'number in each sample: declare VarLen("bytes", pad_to={length})'
            )
            continue
        if not fixed:
            declared[name] = VarLen(dtype)
        elif dtype == "bytes" and length == 1 and (shape := _raw_shape(feature, features)) is not None:
            decode, dims = shape
            declared[name] = FixedLen(dims, "bytes", decode=decode)
            words.append(f"each {next(iter(feature.sizes))} bytes, read as {decode}{list(dims)}: that is a guess")
        else:
            declared[name] = FixedLen(() if length == 1 else (length,), dtype)
        columns.append(Column(name, name, ", ".join(words), image=bool(feature.encoded) and not feature.encoded[""]))
    return declared, columns, left_out


def _declare_list(
    name: str,
    steps: _Feature | None,
    present: int,
    count: int,
    declared: dict[str, Feature],
    columns: list[Column],
    left_out: dict[str, str],
) -> None:
    """Declare a feature list by its steps, or say why it is left out."""
    if steps is None or not steps.kinds:
        left_out[name] = "is a feature list that is always empty"
        return
    low, high = min(steps.lengths), max(steps.lengths)
    if len(steps.kinds) > 1:
        left_out[name] = f"is a feature list of {' and '.join(sorted(steps.kinds))}"
    elif present < count:
        left_out[name] = f"is a feature list of only {present} of {count} records"
    elif low != high:
        left_out[name] = f"is a feature list whose steps have {low} to {high} values: a generator could pad them"
    else:
        (dtype,) = steps.kinds
        shape: tuple[int, ...] = () if high == 1 else (high,)
        decode, guess = None, ""
        if dtype == "bytes":
            raw = _raw_shape(steps, {}) if high == 1 else None
            if raw is None:
                left_out[name] = (
                    "is a feature list of strings, but a leaf needs the same number in each sample: if all records "
                    f"have the same number of steps, declare FixedLenSequence({shape}, 'bytes')"
                )
                return
            decode, shape = raw
            guess = f", each {next(iter(steps.sizes))} bytes, read as {decode}{list(shape)}: that is a guess"
        declared[name] = FixedLenSequence(shape, dtype, decode=decode)
        columns.append(Column(name, name, f"feature list {name!r}{guess}"))


def _raw_shape(feature: _Feature, features: dict[str, _Feature]) -> tuple[str, tuple[int, ...]] | None:
    """Return the likely dtype and shape of bytes that are an array; None if they are not an array."""
    nbytes = next(iter(feature.sizes))
    if len(feature.sizes) > 1 or feature.is_text or not feature.encoded[""] or nbytes < _LEAST_RAW:
        return None
    decode, count = ("float32", nbytes // 4) if feature.floats else ("uint8", nbytes)

    def value(*names: str) -> int | None:
        found = (features[key].constant for key in features if key.rpartition("/")[2].lower() in names)
        return next((one for one in found if one), None)

    height, width = value("height", "rows"), value("width", "cols", "columns")
    if height and width and count % (height * width) == 0:
        depth = count // (height * width)
        return decode, (height, width, depth) if depth > 1 or value("depth", "channels") else (height, width)
    for depth in (1, 3):
        side = math.isqrt(count // depth)
        if side * side * depth == count:
            return decode, (side, side) if depth == 1 else (side, side, depth)
    return decode, (count,)


def _counted(file: str) -> tuple[list[str], int | None]:
    """Return facts about compression and the number of records, and that number; None if it is unknown."""
    with fs.open_binary(file) as opened:
        compression = compression_of(fs.read_exactly(opened, 12))
        if compression:
            return [f"compressed with {compression}, so it is a single split"], None
        if fs.is_url(file):
            return [], None
        if not local_size(file):
            return [], 0
        deadline = time.monotonic() + _SECONDS
        with mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            count = 0
            for count, _ in enumerate(offsets(data), 1):
                if count % 1000 == 0 and time.monotonic() > deadline:
                    return [f"more than {count} records"], None
            return [], count


def _is_text(value: bytes) -> bool:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter in "\t\n\r" for letter in itertools.islice(text, 1000))


def _can_be_floats(value: bytes) -> bool:
    """Return whether bytes look like float32: numbers of a usual magnitude. The bytes of an image hardly ever do."""
    if not value or len(value) % 4:
        return False
    numbers = np.abs(np.frombuffer(value, "<f4"))
    usual = (numbers > 1e-6) & (numbers < 1e6)
    return bool((usual | (numbers == 0)).all() and usual.any())
