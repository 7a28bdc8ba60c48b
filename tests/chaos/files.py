"""The files of feeds that are made of files."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

from .sample import checksum, payload
from .scenario import FeedCase


def write(case: FeedCase, folder: Path) -> None:
    """Write a file for each split of the feed."""
    for split, size in enumerate(case.sizes[0]):
        _write(case, split, size, folder / f"data-{case.tag}-{split:02d}.{case.format}")


def _write(case: FeedCase, split: int, size: int, path: Path) -> None:
    draw = np.zeros((size, 2))
    body = np.zeros((size, case.width), np.uint8)
    identity = np.zeros((size, 5), np.int64)
    for number in range(size):
        body[number] = payload(case.tag, -1, split, number, case.width)
        identity[number] = case.tag, -1, split, number, checksum(body[number], draw[number])
    columns = {"payload": body, "draw": draw, "id": identity}
    if case.format == "npz":
        np.savez(path, allow_pickle=False, **columns)
    elif case.format == "parquet":
        import pyarrow
        from pyarrow import parquet

        lists = {
            name: pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(column.reshape(-1)), column.shape[1])
            for name, column in columns.items()
        }
        parquet.write_table(pyarrow.table(lists), path, row_group_size=50)
    else:
        with h5py.File(path, "w") as file:
            for name, column in columns.items():
                chunks = (
                    {"chunks": (min(13, size), column.shape[1]), "compression": "gzip"} if split % 2 and size else {}
                )
                file.create_dataset(name, data=column, **chunks)
