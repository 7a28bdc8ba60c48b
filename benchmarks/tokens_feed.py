"""The feeds of tokens.py: rows of token ids whose lengths vary, from a table in memory."""

from collections.abc import Iterator

import numpy as np

from penstock_server import Feed, Pad

BATCH = 64
BUCKETS = [32, 64, 128, 256]
_draw = np.random.default_rng(0)
LENGTHS = np.minimum(8 + _draw.geometric(1 / 60, 4096), 256).tolist()
ROWS = [_draw.integers(1, 30_000, length, dtype=np.int32) for length in LENGTHS]


def rows(split: int) -> Iterator[tuple[np.ndarray, np.int64]]:
    """Yield the 4096 rows of a split, each with a label."""
    for number, row in enumerate(ROWS):
        yield row, np.int64(number)


SPLITS = range(10_000)
padded = Feed(rows, splits=SPLITS, batch_size=BATCH, batching="pad")
ragged = Feed(rows, splits=SPLITS, batch_size=BATCH, batching="ragged")
buckets = Feed(rows, splits=SPLITS, batch_size=BATCH, batching=Pad(buckets=BUCKETS), shuffle=40_000)
