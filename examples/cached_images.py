"""JPEG images that are decoded once. Later epochs read the pixels from a cache, and crop and flip them again.

    python cached_images.py

Writes 480 images and their cache to a temporary directory, and reads three epochs. If the daemon ran again, or another
one did, it would find the cache and decode nothing.
"""

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import penstock
from penstock_server import Cache, Feed

FOLDER = Path(os.environ.get("IMAGES", "images"))
PARTS, IMAGES = 16, 30


def decode(part):
    """Yield the images of a part. This is the expensive step, and its result is the same in each epoch."""
    for file in sorted((FOLDER / part).glob("*.jpg")):
        with Image.open(file) as image:
            yield {"image": np.asarray(image.resize((160, 160))), "label": int(part)}


def augment(sample, rng):
    """Crop and flip an image. This runs after the cache, with different random numbers in each epoch."""
    top, left = rng.integers(160 - 128, size=2)
    image = sample["image"][top : top + 128, left : left + 128]
    return {**sample, "image": image[:, ::-1] if rng.random() < 0.5 else image}


feed = Feed(
    decode,
    transform=augment,
    cache=Cache(FOLDER / "cache", version=1),  # change the version whenever `decode` changes
    splits=[f"{part:02}" for part in range(PARTS)],
    samples=PARTS * IMAGES,
    batch_size=32,
    shuffle=256,
)


def write():
    rng = np.random.default_rng(0)
    for part in range(PARTS):
        (FOLDER / f"{part:02}").mkdir()
        for number in range(IMAGES):
            small = Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8))
            small.resize((480, 480)).save(FOLDER / f"{part:02}" / f"{number:03}.jpg")


def main():
    write()
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        for epoch in range(3):
            began = time.monotonic()
            images = sum(len(batch["label"]) for batch in connection.batches())
            print(f"epoch {epoch}: {images} images in {time.monotonic() - began:.2f} s")
    cached = sum(file.stat().st_size for file in FOLDER.glob("cache/*/*"))
    print(f"the cache holds {cached / 1e6:.0f} MB in {len(list(FOLDER.glob('cache/*/*.split')))} files")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IMAGES"] = folder  # for the workers
        FOLDER = Path(folder)
        main()
