"""Files of JSON lines, divided at lines: JSON has no line breaks inside a value."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock_proto.spec import MAX_DIMS
from penstock_proto.value_text import shown

from .. import files as fs
from ..dtypes import checked_dtypes, converted
from ..inflating import inflated
from ..names_on_disk import on_disk_as
from ..reader import Reader
from ..splits.byte_range import ByteRange
from ..structure import Columns

MOST_LINE = 256 << 20
"""Bytes of a line, at most."""

_PIECES = 256
_LEAST, _MOST = 256 << 10, 16 << 20
"""The least and the greatest size of a split in bytes. A file of up to twice a split's size is not divided."""

_OR_TRANSFORM = "or give transform=, a function that gets the whole sample and makes arrays or text of it"
_decode = msgspec.json.Decoder().decode
"""Makes the same of what it can decode as `json.loads`, in half the time."""
_NO_NULL = f"a list must hold numbers or text, and no null or object; {_OR_TRANSFORM}"
_TOO_DEEP = f"its lists are nested more than {MAX_DIMS} deep: flatten them, {_OR_TRANSFORM}"

_GZIP = b"\x1f\x8b"


class JsonLineSplits:
    """Lists files, and ranges of large files that are not compressed."""

    def __init__(self, files: fs.Files) -> None:
        self.__name__ = "Feed.from_json_lines"
        self._files = fs.checked(files)

    def __call__(self) -> list[ByteRange]:
        """Find the files.

        Raises:
            OSError: a file is missing or cannot be read.
        """
        found = fs.expand(self._files)
        sizes = {file: fs.size_in_splits(file) for file in found}
        about = min(_MOST, max(_LEAST, sum(size or 0 for size in sizes.values()) // _PIECES))
        splits: list[ByteRange] = []
        for file in found:
            size = sizes[file]
            if size is None or size <= 2 * about or _is_compressed(file):
                splits.append(ByteRange(file, 0, None, size))
            else:
                starts = range(0, size, about)
                splits += [ByteRange(file, start, min(start + about, size), size) for start in starts]
        return splits


@on_disk_as("penstock_server.sources.json_lines.JsonRows")
class JsonRows(Reader):
    """Yields the objects of a range as samples.

    Args:
        leaves: names of keys in the structure of a sample; by default a dict of all keys of each object. A name with
            dots stands for a key of an object in an object.
        dtypes: dtypes of numbers and of lists of numbers, by name.
        transformed: whether a function gets the samples. Then values that cannot be leaves, such as lists of objects,
            are left as they are.

    Raises:
        TypeError: a dtype is not one of numbers.
    """

    def __init__(self, leaves: Any, dtypes: Mapping[str, Any], transformed: bool = False) -> None:
        self.__name__ = "Feed.from_json_lines"
        self._columns = None if leaves is None else Columns(leaves, "key")
        self._dtypes = checked_dtypes(dtypes)
        self._transformed = transformed

    @property
    def cached_as(self) -> Any:
        """See `Reader`."""
        return self._columns, sorted((name, str(dtype)) for name, dtype in self._dtypes.items())

    def __call__(self, split: ByteRange) -> Iterator[Any]:
        """Yield one sample for each line. Empty lines are left out.

        Raises:
            OSError: the file cannot be read, or has changed since its splits were listed.
            ValueError: a line is no JSON object, or lacks a key; the message has the file and the line's first byte.
        """
        make = None if self._columns is None else self._columns.maker()
        for place, value in objects(split):
            names = [*value] if self._columns is None else self._columns.names
            row = [self._value(place, value, name) for name in names]
            yield dict(zip(names, row, strict=True)) if make is None else make(row)

    def _value(self, place: str, value: dict[str, Any], name: str) -> Any:
        found: Any = value
        for key in (name,) if name in value else name.split("."):
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"{place} has no key {name!r}; its keys are {', '.join(map(repr, [*value][:12]))}")
            found = found[key]
        dtype = self._dtypes.get(name)
        try:
            return leaf(found, anything=self._transformed) if dtype is None else _as_dtype(found, dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{place}: {name!r} is {shown(found)}: {error}") from None


def objects(split: ByteRange) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects on the lines of a range, each with its place in words.

    Raises:
        OSError, ValueError: see `JsonRows`.
    """
    with fs.open_binary(split.file, split.size) as opened:
        head = opened.read(2)
        opened.seek(0)
        source = inflated(opened, "GZIP") if head == _GZIP else opened
        at = 0
        try:
            if split.start:
                source.seek(split.start - 1)
                at = split.start - 1 + len(_line(source, split.file, split.start))  # the rest of an earlier line
            while split.stop is None or at < split.stop:
                line = _line(source, split.file, at)
                if not line:
                    return
                if line.strip():
                    place = f"{split.file}: the line at byte {at}"
                    yield place, _object(line, place)
                at += len(line)
        except (EOFError, zlib.error) as error:
            raise OSError(f"{split.file} is truncated or damaged ({error}): copy it again") from None


def _line(source: Any, file: str, at: int) -> bytes:
    line: bytes = source.readline(MOST_LINE + 1)
    if len(line) > MOST_LINE:
        raise ValueError(
            f"{file}: the line at byte {at} has more than {MOST_LINE >> 20} MiB, and lines are read as a whole: write "
            "one object a line"
        )
    return line


def _object(line: bytes, place: str) -> dict[str, Any]:
    try:
        value = _decode(line)
    except Exception:  # what `json` takes besides: NaN, Infinity, UTF-16, a byte order mark, half of a surrogate pair
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = ": is the file one JSON document? Write one object a line" if line.strip() in (b"[", b"{") else ""
            raise ValueError(f"{place} is not JSON ({type(error).__name__}: {error}){hint}") from None
    if not isinstance(value, dict):
        raise ValueError(f'{place} is no JSON object, but {shown(value)}: write objects, such as {{"x": 1}}')
    return value


def leaf(value: Any, *, anything: bool = False) -> Any:
    """Return a value of JSON as a leaf: lists become arrays, unless they are empty, hold objects, or are lists of lists
    of different lengths.

    With `anything`, values that cannot be leaves are returned as they are.

    Raises:
        ValueError: it is null, or a list that cannot be an array; the message says what to do.
    """
    if value is None and anything:
        return None
    if value is None:
        raise ValueError("an array cannot hold null: fill it when you write the file, or leave the key out of leaves=")
    if isinstance(value, dict):
        return {key: leaf(item, anything=anything) for key, item in value.items()}
    if isinstance(value, list) and value:
        try:
            return _array(value)
        except ValueError:
            if anything:
                return value
            raise
    return value


def _array(value: list[Any], depth: int = 0) -> npt.NDArray[Any] | list[Any]:
    """Return a list that is not empty as an array, or as it is if its lists differ in length.

    Args:
        value: the list.
        depth: how many lists it is within.

    Raises:
        ValueError: it cannot be a leaf; the message says what to do.
    """
    if depth >= MAX_DIMS:
        raise ValueError(_TOO_DEEP)
    try:
        array = np.array(value)
    except ValueError:
        if None in value:
            raise ValueError(_NO_NULL) from None
        if not all(isinstance(item, list) for item in value):
            raise ValueError(f"a list holds both lists and other values: write two lists, {_OR_TRANSFORM}") from None
        for item in filter(None, value):
            _array(item, depth + 1)
        return value
    if depth + array.ndim > MAX_DIMS:
        raise ValueError(_TOO_DEEP)
    if array.dtype.kind in "biu" or (array.dtype.kind == "f" and type(value[0]) is float):
        return array
    items = np.array(value, object)
    kinds = set(map(type, items.ravel()))
    if not kinds:  # all its lists are empty, so their dtype is not known
        return value
    if kinds == {str}:
        return items
    if str in kinds and kinds <= {str, int, float, bool}:
        raise ValueError(f"a list mixes text and numbers: write two lists, {_OR_TRANSFORM}")
    if kinds <= {int, bool}:
        raise ValueError(f"its integers need more than 64 bits: write them as text, {_OR_TRANSFORM}")
    if array.dtype.kind != "f":
        raise ValueError(_NO_NULL)
    return array


def _as_dtype(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return numbers in a dtype. Lists of lists of different lengths become lists of arrays.

    Raises:
        ValueError: they are no numbers, or the dtype cannot hold them.
    """
    made = leaf(value)
    if isinstance(made, list) and any(made):
        return [_as_dtype(item, dtype) for item in made]
    array = np.asarray(made)
    if array.dtype.kind not in "biuf":
        raise ValueError(f"dtypes= cannot make {dtype} of it")
    found = converted(array, dtype)
    if found is None:
        raise ValueError(f"{dtype} cannot hold it")
    return found if found.ndim else found[()]


def _is_compressed(file: str) -> bool:
    with fs.open_binary(file) as opened:
        return opened.read(2) == _GZIP
