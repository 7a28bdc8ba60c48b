"""The ledger: one page of shared memory for each same-host session, in which the client counts slabs handed over.

The client writes the count *before* it gives a slab to TensorFlow, which may write into the memory from then on. When
the connection of a group's consumer ends, the daemon sends the slabs that are not counted to another consumer. Slabs
are handed over in the order of their sequence numbers, so one 64-bit count suffices, and storing it is one aligned
write.

    0    uint64 handed (native order)
    64   16 bytes: the nonce that the client repeats in Open, which proves that it maps the daemon's memory
"""

from __future__ import annotations

import mmap
import sys

NBYTES = 4096
NONCE = slice(64, 80)


def handed(page: mmap.mmap) -> int:
    """Return how many slabs the client has counted as handed over."""
    return int.from_bytes(page[0:8], sys.byteorder)


class Mark:
    """The client's side of the ledger."""

    def __init__(self, page: mmap.mmap) -> None:
        self._cells = memoryview(page).cast("Q")

    def write(self, count: int) -> None:
        """Count the first `count` slabs as handed over."""
        self._cells[0] = count

    def release(self) -> None:
        """Release the page, so that it can be closed."""
        self._cells.release()
