"""Write scikit-learn's handwritten digits as HDF5 files: 1,437 for training and 360 for testing.

python prepare.py /tmp/digits
"""

import sys
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

TEST_SAMPLES = 360
TRAIN_FILES, TEST_FILES = 16, 4


def prepare(directory):
    """Write train-00.h5, test-00.h5 and so on: `images` uint8 (n, 8, 8) and `labels` int64 (n)."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    directory.mkdir(parents=True, exist_ok=True)
    for kind, rows, files in (
        ("test", order[:TEST_SAMPLES], TEST_FILES),
        ("train", order[TEST_SAMPLES:], TRAIN_FILES),
    ):
        for number, part in enumerate(np.array_split(rows, files)):
            with h5py.File(directory / f"{kind}-{number:02}.h5", "w") as file:
                file["images"] = digits.images[part].astype(np.uint8)  # grey levels from 0 to 16
                file["labels"] = digits.target[part]
        print(f"{len(rows):5} {kind} images in {files} files")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    prepare(Path(sys.argv[1]))
