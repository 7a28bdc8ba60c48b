"""Tar files in the layout of WebDataset as a feed.

    python tar_shards.py

Writes ten shards to the current directory, and reads one epoch of them.
"""

import io
import tarfile

import numpy as np
from PIL import Image

import penstock
from penstock_server import Feed


def decode_png(data):
    """Return the pixels of a PNG file."""
    return np.asarray(Image.open(io.BytesIO(data)))


feed = Feed.from_webdataset(
    "digits-*.tar",
    {"image": "png", "label": "cls"},  # leaves of a sample: the extensions of the files that hold them
    decode={"png": decode_png},
    batch_size=32,
    shuffle=1000,
    seed=7,
)


def write(path, numbers):
    """Write random images as PNG files, and their labels."""
    rng = np.random.default_rng(numbers.start)
    with tarfile.open(path, "w") as tar:
        for number in numbers:
            png = io.BytesIO()
            Image.fromarray(rng.integers(0, 17, (8, 8), dtype=np.uint8)).save(png, "png")
            for extension, data in (("png", png.getvalue()), ("cls", str(rng.integers(0, 10)).encode())):
                info = tarfile.TarInfo(f"{number:06}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


if __name__ == "__main__":
    for number in range(10):
        write(f"digits-{number}.tar", range(number * 200, (number + 1) * 200))
    with penstock.connect(f"{__file__}:feed", workers=2) as connection:
        samples = sum(len(batch["label"]) for batch in connection.batches())
    print(f"{samples} samples of {connection.element_spec}")
