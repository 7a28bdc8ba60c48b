"""The arena's memory as this worker sees it: mapped segments, and arrays over the batches of a slot."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto.layout import BatchLayout

_CACHED = 1024  # slots of a segment whose arrays are kept


@dataclass(frozen=True, slots=True)
class Batches:
    """Arrays over the batches of a slot of a fixed feed: row k of each belongs to batch k.

    `headers`: int64 [batches, 4]; `leaves`: [batches, batch size, ...].
    """

    headers: npt.NDArray[np.int64]
    leaves: tuple[npt.NDArray[Any], ...]


class Segments:
    """The segments that are mapped."""

    def __init__(self) -> None:
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._batches: dict[int, dict[tuple[int, int, int], Batches]] = {}

    def add(self, segment: int, nbytes: int, fd: int) -> None:
        """Map a segment, and close `fd`."""
        try:
            self._memory[segment] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        finally:
            os.close(fd)
        self._batches[segment] = {}

    def remove(self, segment: int) -> None:
        """Let go of a segment; it is unmapped with the last array over it."""
        del self._memory[segment], self._batches[segment]

    def slot(self, segment: int, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot.

        Raises:
            ProtocolError: it lies outside the segment.
        """
        memory = self._memory.get(segment)
        if memory is None or offset + nbytes > len(memory):
            raise ProtocolError(f"a slot of {nbytes} bytes at {offset} of segment {segment}, which is not mapped")
        return memory[offset : offset + nbytes]

    def batches(self, layout: BatchLayout, segment: int, offset: int, count: int) -> Batches:
        """Arrays over `count` consecutive batches of this layout. They are kept, as making them takes some 10 us.

        Raises:
            ProtocolError: they lie outside the segment.
        """
        cache = self._batches.get(segment, {})
        key = offset, count, id(layout)
        found = cache.get(key)
        if found is None:
            if len(cache) >= _CACHED:
                cache.clear()
            found = cache[key] = _over(self.slot(segment, offset, count * layout.stride), layout, count)
        return found


def _over(memory: npt.NDArray[np.uint8], layout: BatchLayout, count: int) -> Batches:
    headers: npt.NDArray[np.int64] = np.ndarray((count, 4), np.int64, memory, 0, (layout.stride, 8))
    leaves = []
    for place in layout.places:
        inner = np.ndarray(place.shape, place.dtype, memory, place.offset).strides
        leaves.append(np.ndarray((count, *place.shape), place.dtype, memory, place.offset, (layout.stride, *inner)))
    return Batches(headers, tuple(leaves))
