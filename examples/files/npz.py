"""Arrays of a .npz file as a feed.

    python npz.py

Writes digits.npz to the current directory, and reads one epoch of it.
"""

import numpy as np

import penstock
from penstock_server import Feed

feed = Feed.from_numpy(
    "digits.npz",
    {"image": "images", "label": "labels"},  # leaves of a sample: the arrays that hold them
    batch_size=32,
    shuffle=1000,
    seed=7,
)


def write(path):
    """Write 2,000 random images and their labels, uncompressed, so that workers map the file and share its memory."""
    rng = np.random.default_rng(0)
    np.savez(path, images=rng.integers(0, 17, (2000, 8, 8), dtype=np.uint8), labels=rng.integers(0, 10, 2000))


if __name__ == "__main__":
    write("digits.npz")
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
