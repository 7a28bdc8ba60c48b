"""Compares two recordings of the same samples, without I/O."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock_proto.spec import numpy_dtype

from ...worker.batch.nested_lists import place_of
from ..observing.recording import DIGEST, Kept, Recording, Value


@dataclass(frozen=True, slots=True)
class Difference:
    """The first sample that differs.

    Attributes:
        place, name: the sample's place (see recording.py), and the place's name.
        number: the sample's number in its place.
        leaves: the paths of the leaves that differ; empty if one of the recordings ends before the sample.
        values: a differing item of the first of these leaves in both recordings, in words; empty if it was not kept.
        samples: how many samples differ.
    """

    place: int
    name: str
    number: int
    leaves: tuple[str, ...]
    values: str
    samples: int


def compared(one: Recording, other: Recording) -> int:
    """Return how many samples are in both recordings."""
    return sum(min(one.count(place), other.count(place)) for place in one.digests)


def first_difference(one: Recording, other: Recording) -> Difference | None:
    """Return the first sample of `one`, in reading order, that differs in `other`; None if all agree."""
    width = one.width
    differing: dict[int, npt.NDArray[np.intp]] = {}
    for place in one.digests:
        rows = min(one.count(place), other.count(place))
        differ = _table(one, place, rows, width) != _table(other, place, rows, width)
        differing[place] = np.flatnonzero(differ.any(axis=1))
    total = sum(map(len, differing.values()))
    for place, start, count in one.pieces:
        found = differing[place]
        found = found[(found >= start) & (found < start + count)]
        if len(found):
            return _at(one, other, place, int(found[0]), total)
        if (end := _ends_apart(one, other, place)) is not None and start <= end <= start + count:
            return Difference(place, one.names.get(place, ""), end, (), "", max(1, total))
    return None


def _table(recording: Recording, place: int, rows: int, width: int) -> npt.NDArray[np.uint8]:
    data = bytes(recording.digests.get(place, b""))[: rows * width]
    return np.frombuffer(data, np.uint8).reshape(rows, width)


def _ends_apart(one: Recording, other: Recording, place: int) -> int | None:
    """Return the number of samples after which one recording of a place ends and the other goes on; None if neither."""
    ours, theirs = one.count(place), other.count(place)
    if place in one.ended and theirs > ours:
        return ours
    return theirs if place in other.ended and ours > theirs else None


def _at(one: Recording, other: Recording, place: int, number: int, total: int) -> Difference:
    width, leaves = one.width, []
    ours, theirs = (bytes(r.digests[place][number * width : (number + 1) * width]) for r in (one, other))
    for leaf in range(len(one.paths)):
        at = slice(leaf * DIGEST, (leaf + 1) * DIGEST)
        if ours[at] != theirs[at]:
            leaves.append(leaf)
    pair = _kept(one, place, number), _kept(other, place, number)
    values = ""
    if pair[0] is not None and pair[1] is not None:
        values = shown_difference(one.paths[leaves[0]], pair[0].values[leaves[0]], pair[1].values[leaves[0]])
    paths = tuple(one.paths[leaf] for leaf in leaves)
    return Difference(place, one.names.get(place, ""), number, paths, values, total)


def _kept(recording: Recording, place: int, number: int) -> Kept | None:
    return next((kept for kept in recording.kept if (kept.place, kept.number) == (place, number)), None)


def shown_difference(path: str, one: Value, other: Value) -> str:
    """Say how two values of a leaf differ: "sample['x'][0, 3] is 0.25 in one run and 0.75 in the other"."""
    if one.lengths != other.lengths:
        return f"{path} has lists of other lengths in one run than in the other"
    if one.dtype == "string":
        for index, (ours, theirs) in enumerate(zip(one.strings, other.strings, strict=False)):
            if ours != theirs:
                at = f"[{index}]" if len(one.strings) > 1 else ""
                if one.lengths:
                    at = str(list(place_of(one.lengths, index)))
                return f"{path}{at} is {_text(ours, theirs)} in one run and {_text(theirs, ours)} in the other"
        return f"{path} has {len(one.strings)} strings in one run and {len(other.strings)} in the other"
    if one.shape != other.shape:
        return f"{path} has the shape {one.shape} in one run and {other.shape} in the other"
    items = [np.frombuffer(value.data, numpy_dtype(value.dtype)) for value in (one, other)]
    bits = [item.view(np.uint8).reshape(len(item), -1) for item in items]
    index = int(np.flatnonzero((bits[0] != bits[1]).any(axis=1))[0])
    place = [int(i) for i in np.unravel_index(index, one.shape)]
    if one.lengths:
        place[:1] = place_of(one.lengths, place[0])
    at = str(place) if one.shape else ""
    return f"{path}{at} is {items[0][index]} in one run and {items[1][index]} in the other"


def _text(text: bytes, other: bytes) -> str:
    """Show a text from shortly before the place where it differs from another."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), 0)
    start = max(0, same - 10)
    part = text[start : start + 40]
    end = "..." if start + 40 < len(text) else ""
    return f"{'...' if start else ''}{part.decode(errors='backslashreplace')!r}{end}"
