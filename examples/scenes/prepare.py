"""Write a few small HDF5 files for this example: prepare.py FOLDER"""

import sys
from pathlib import Path

import h5py
import numpy as np


def main(folder):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(4):
        labels = rng.integers(0, 2, 40)
        images = rng.integers(0, 100, (40, 32, 32, 1)) + 100 * labels[:, None, None, None]  # 1 is brighter
        with h5py.File(folder / f"scenes-{number}.h5", "w") as file:
            file["images"], file["labels"] = images.astype("uint8"), labels


if __name__ == "__main__":
    main(Path(sys.argv[1]))
