"""The arena's memory as this worker sees it: mapped memfds, and arrays over the batches of a slot."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_proto import ProtocolError
from penstock_proto.batches.layout import SlotLayout

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # linux/mman.h


@dataclass(frozen=True, slots=True)
class SlotArrays:
    """Arrays over the batches of a slot: row k of each belongs to batch k.

    `headers`: int64 [batches, 8]; `leaves`: [batches, batch size, ...].
    """

    layout: SlotLayout
    headers: npt.NDArray[np.int64]
    leaves: list[npt.NDArray[Any]]

    def rows(self, first: int, batches: int) -> list[npt.NDArray[Any]]:
        """Return the rows of `batches` batches from batch `first` on: one array [rows, ...] for each leaf."""
        return [leaf[first : first + batches].reshape(batches * leaf.shape[1], *leaf.shape[2:]) for leaf in self.leaves]


class Memfds:
    """The mapped memfds."""

    def __init__(self) -> None:
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        self._batches: dict[int, SlotArrays] = {}

    def add(self, memfd: int, nbytes: int, fd: int) -> None:
        """Map a memfd, and close `fd`."""
        try:
            self._memory[memfd] = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        finally:
            os.close(fd)

    def put(self, memfd: int, memory: npt.NDArray[np.uint8]) -> None:
        """Use `memory` of this process as memfd `memfd`. It replaces an earlier one with this number."""
        self._batches.pop(memfd, None)
        self._memory[memfd] = memory

    def remove(self, memfd: int) -> None:
        """Forget a memfd; it is unmapped with the last array over it."""
        del self._memory[memfd]
        self._batches.pop(memfd, None)

    def abandon(self) -> None:
        """Replace the mappings by private memory, in a forked process."""
        libc = ctypes.CDLL(None)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        for memory in self._memory.values():
            libc.mmap(memory.ctypes.data, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, private, -1, 0)

    def batches(self, layout: SlotLayout, memfd: int) -> SlotArrays:
        """Return arrays over the slot in this memfd. They are cached, as making them takes about 10 us.

        Raises:
            ProtocolError: the memfd is smaller than the slot, or not mapped.
        """
        found = self._batches.get(memfd)
        if found is None or found.layout is not layout:
            memory = self._memory.get(memfd)
            if memory is None or layout.nbytes > len(memory):
                raise ProtocolError(f"a slot of {layout.nbytes} bytes in memfd {memfd}, which is not mapped")
            found = self._batches[memfd] = SlotArrays(layout, layout.headers(memory), layout.leaves(memory))
        return found
