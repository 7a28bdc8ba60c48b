"""Puts samples of similar length into the same batches, within a shuffle block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def bucketed(order: npt.NDArray[np.int64], bucket_of: npt.NDArray[np.int64], batch_rows: int) -> npt.NDArray[np.int64]:
    """Reorder the rows of `order` so that batches cut from it hold rows of one bucket each, where possible.

    Rows of a bucket keep their order. Batches are in the order of their last rows. Rows that do not fill a batch of
    their bucket come at the end, from the first bucket to the last. (`tf.data.bucket_by_sequence_length` does the same,
    but keeps these rows until the end of the data.)

    Args:
        order: the rows of a block, in shuffled order.
        bucket_of: the bucket of each row of the block, by row number.
        batch_rows: rows in a batch.
    """
    waiting: dict[int, list[int]] = {}
    found: list[int] = []
    for row, bucket in zip(order.tolist(), bucket_of[order].tolist(), strict=True):
        batch = waiting.setdefault(bucket, [])
        batch.append(row)
        if len(batch) == batch_rows:
            found += batch
            batch.clear()
    for bucket in sorted(waiting):
        found += waiting[bucket]
    return np.array(found, np.int64)
