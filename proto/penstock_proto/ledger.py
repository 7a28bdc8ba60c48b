"""The ledger: one page of shared memory of each same-host session, by which the client marks slabs as handed.

The client writes the number of slabs that it has handed over so far *before* it yields the slab to TensorFlow, which
may write into the memory from then on. When the connection ends it says what can be given to
somebody else (not marked; no daemon does that yet) and what is never read again (marked).
Slabs are handed in the order of their sequence numbers, so one
64-bit count says it all, and storing it is one aligned write.

    0    uint64 handed (native order)
    64   16 bytes: the nonce that the client repeats in Open, which proves that it maps the daemon's memory
"""

from __future__ import annotations

import mmap
import sys

NBYTES = 4096
NONCE = slice(64, 80)


def handed(page: mmap.mmap) -> int:
    """How many slabs the client has marked as handed."""
    return int.from_bytes(page[0:8], sys.byteorder)


class Mark:
    """The client's side: writes the count of handed slabs."""

    def __init__(self, page: mmap.mmap) -> None:
        self._cells = memoryview(page).cast("Q")

    def write(self, count: int) -> None:
        """Mark the first `count` slabs as handed."""
        self._cells[0] = count

    def release(self) -> None:
        """Let go of the page, so that it can be closed."""
        self._cells.release()
