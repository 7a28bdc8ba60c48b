"""A folder of images, with a subfolder for each class, as a feed. You need not convert any files.

    python image_folder.py

Writes digits/0/0000.png and so on to the current directory, and reads one epoch of them.
"""

from pathlib import Path

import numpy as np
from PIL import Image

import penstock
from penstock_server import Feed

FOLDER = Path("digits")


def write(folder):
    """Write 200 random images of each of 10 classes."""
    rng = np.random.default_rng(0)
    for label in range(10):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        for number in range(200):
            pixels = rng.integers(0, 17, rng.integers(6, 12, 2), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{number:04}.png")


if __name__ == "__main__":
    write(FOLDER)
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
else:  # in a worker
    leaves = {"image": "image", "label": "label"}
    feed = Feed.from_folder(FOLDER, leaves, size=(8, 8), mode="L", batch_size=32, shuffle=1, seed=7)
