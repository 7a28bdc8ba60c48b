"""The code that a user writes: lists of splits, generators, and the feeds that use them.

    DIGITS_DIR=/tmp/digits penstock serve digits.py:train digits.py:val --workers 2

The generators run in Penstock's worker processes. Neither they nor this module import TensorFlow.
"""

import os
from pathlib import Path

import h5py
import numpy as np
from scipy.ndimage import rotate

from penstock_server import Feed

DIGITS = Path(os.environ["DIGITS_DIR"])  # where prepare.py wrote its files


def files(kind):
    """Return the splits: the paths of the "train" or the "test" files, one split each."""
    found = sorted(DIGITS.glob(f"{kind}-*.h5"))
    if not found:
        raise FileNotFoundError(f"no {kind}-*.h5 in {DIGITS}; write them with: prepare.py {DIGITS}")
    return [str(path) for path in found]


def count(kind):
    """Return the number of samples in an epoch. With it, Keras knows the number of steps from the start."""
    total = 0
    for path in files(kind):
        with h5py.File(path) as file:
            total += len(file["labels"])
    return total


def upright(path):
    """Yield one file's digits as they are: image float32 (8, 8, 1) from 0 to 1, label int64."""
    with h5py.File(path) as file:
        images, labels = file["images"][:], file["labels"][:]
    yield from zip(images.astype(np.float32)[..., np.newaxis] / 16, labels, strict=True)


def scenes(path, rng):
    """Yield one file's digits, each rotated by up to 15 degrees.

    Penstock passes `rng`, seeded from the feed's seed, the epoch and the split. So each epoch rotates the digits
    differently, but a second run yields the same digits, with any number of workers.
    """
    for image, label in upright(path):
        yield rotate(image, rng.uniform(-15, 15), reshape=False, order=1), label


train = Feed(
    scenes,
    splits=files("train"),
    samples=count("train"),
    batch_size=32,
    shuffle=1024,
    lanes=4,  # 4 lanes of 4 files each, so that a batch mixes 4 files; 16 lanes would have one file each
    seed=7,
)
val = Feed(upright, splits=files("test"), samples=count("test"), batch_size=32)
