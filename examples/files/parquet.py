"""Columns of a Parquet file as a feed. Needs pyarrow: pip install 'penstock-loader[parquet]'

    python parquet.py

Writes digits.parquet to the current directory, and reads one epoch of it.
"""

import numpy as np

import penstock
from penstock_server import Feed

feed = Feed.from_parquet(
    "digits.parquet",
    {"image": "images", "label": "labels"},  # leaves of a sample: the columns that hold them
    batch_size=32,
    shuffle=1000,
    seed=7,
)


def write(path):
    """Write 2,000 random images and their labels in row groups of 100 rows: each is a split."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    images = pa.FixedShapeTensorArray.from_numpy_ndarray(rng.integers(0, 17, (2000, 8, 8), dtype=np.uint8))
    table = pa.table({"images": images, "labels": rng.integers(0, 10, 2000)})
    parquet.write_table(table, path, row_group_size=100)


if __name__ == "__main__":
    write("digits.parquet")
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
