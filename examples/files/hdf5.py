"""Datasets of an HDF5 file as a feed, without a generator.

    python hdf5.py

Writes digits.h5 to the current directory, and reads one epoch of it. From the command line the same feed is

    penstock serve digits.h5 --leaf image=images --leaf label=labels --batch-size 32 --shuffle 1000
"""

import h5py
import numpy as np

import penstock
from penstock_server import Feed

feed = Feed.from_hdf5(
    "digits.h5",  # or a pattern, a URL, or a list of these
    {"image": "images", "label": "labels"},  # leaves of a sample: the datasets that hold them
    batch_size=32,
    shuffle=1000,
    seed=7,
)


def write(path):
    """Write 2,000 random images, compressed in chunks of 100, and their labels."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = rng.integers(0, 17, (2000, 8, 8), dtype=np.uint8)
        file.create_dataset("images", data=images, chunks=(100, 8, 8), compression="gzip")
        file["labels"] = rng.integers(0, 10, 2000)


if __name__ == "__main__":
    write("digits.h5")
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
