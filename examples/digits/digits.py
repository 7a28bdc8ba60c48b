"""What a user writes: a work list, a generator, and the feeds made of them.

    DIGITS_DIR=/tmp/digits penstock serve digits.py:train digits.py:val --workers 2

The generators run in Penstock's worker processes; neither they nor this module import TensorFlow.
"""

import os
from pathlib import Path

import h5py
import numpy as np
from scipy.ndimage import rotate

from penstock_server import Feed

DIGITS = Path(os.environ["DIGITS_DIR"])  # where prepare.py wrote its files


def files(kind):
    """The work list: paths of the "train" or the "test" files. Each file is one split."""
    found = sorted(DIGITS.glob(f"{kind}-*.h5"))
    if not found:
        raise FileNotFoundError(f"no {kind}-*.h5 in {DIGITS}; write them with: prepare.py {DIGITS}")
    return [str(path) for path in found]


def count(kind):
    """How many samples an epoch has. With it, Keras knows the number of steps from the start."""
    total = 0
    for path in files(kind):
        with h5py.File(path) as file:
            total += len(file["labels"])
    return total


def upright(path):
    """Yields one file's digits as they are: image float32 (8, 8, 1) from 0 to 1, label int64."""
    with h5py.File(path) as file:
        images, labels = file["images"][:], file["labels"][:]
    yield from zip(images.astype(np.float32)[..., np.newaxis] / 16, labels, strict=True)


def scenes(path, rng):
    """Yields one file's digits, each turned by up to 15 degrees.

    `rng` comes from Penstock. Its seed is made from the feed's seed, the epoch and the split, so
    every epoch turns the digits anew, and a second run, with any number of workers, sees the same.
    """
    for image, label in upright(path):
        yield rotate(image, rng.uniform(-15, 15), reshape=False, order=1), label


train = Feed(
    scenes,
    splits=files("train"),
    samples=count("train"),
    batch_size=32,
    shuffle=1024,
    lanes=4,  # 4 lanes of 4 files each, and so a batch mixes 4 files; 16 lanes would have one each
    seed=7,
)
val = Feed(upright, splits=files("test"), samples=count("test"), batch_size=32)
