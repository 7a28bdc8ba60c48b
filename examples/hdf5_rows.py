"""Random rows of a compressed HDF5 file, without decompressing a chunk for each row.

    python hdf5_rows.py

`Shuffle(block=)` keeps the rows of a chunk together, and `__getitems__` reads all rows of a batch in one call.
"""

import os
import tempfile
from collections import OrderedDict

import h5py
import numpy as np

import penstock
from penstock_server import Feed, Shuffle

PATH = os.environ.get("ROWS_H5", os.path.join(tempfile.gettempdir(), "rows.h5"))
ROWS, CHUNK = 20_000, 500


class Rows:
    """The rows of a dataset, float32[16] each. It keeps the `keep` chunks that were used last."""

    def __init__(self, path, keep=12):
        self.path, self.keep = path, keep
        self.table = None  # opened at the first read, in the worker
        self.chunks = OrderedDict()
        self.decompressed = 0  # how many chunks were decompressed

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        return [self.chunk(i // CHUNK)[i % CHUNK] for i in indices]

    def chunk(self, number):
        if number not in self.chunks:
            if self.table is None:
                self.table = h5py.File(self.path)["rows"]
            self.chunks[number] = self.table[number * CHUNK : (number + 1) * CHUNK]
            self.decompressed += 1
            if len(self.chunks) > self.keep:
                self.chunks.popitem(last=False)
        self.chunks.move_to_end(number)
        return self.chunks[number]


feed = Feed(Rows(PATH), batch_size=100, shuffle=Shuffle(8 * CHUNK, block=CHUNK))


def decompressed(batches):
    """Return how many chunks are decompressed to read batches of these rows."""
    rows = Rows(PATH)
    for batch in batches:
        rows.__getitems__(batch)
    return rows.decompressed


def main():
    with h5py.File(PATH, "w") as file:
        rows = np.arange(ROWS, dtype=np.float32)[:, None].repeat(16, 1)
        file.create_dataset("rows", data=rows, chunks=(CHUNK, 16), compression="gzip")
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        order = [batch[:, 0].astype(int) for batch in connection.batches()]
    assert sorted(np.concatenate(order)) == list(range(ROWS))
    anywhere = np.random.default_rng(0).permutation(ROWS).reshape(-1, 100)
    print(f"{ROWS // CHUNK} chunks are decompressed {decompressed(order)} times in an epoch,", end=" ")
    print(f"and with rows from anywhere {decompressed(anywhere)} times")
    print(f"a batch mixes rows of {np.mean([len(set(batch // CHUNK)) for batch in order]):.1f} chunks")


if __name__ == "__main__":
    try:
        main()
    finally:
        os.unlink(PATH)
