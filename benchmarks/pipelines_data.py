"""The files that pipelines_feeds.py reads: drawn from a seed, and two photographs that scikit-learn ships."""

from pathlib import Path

import numpy as np

SEED = 7


def write(folder: Path) -> None:
    """Write all files into `folder`: some 40 MB, in a second."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(SEED)
    lengths = rng.integers(16, 513, 4000)
    arrays = {
        "images": rng.integers(0, 256, (256, 224, 224, 3), np.uint8),
        "digits": rng.integers(0, 256, (2000, 28, 28)).astype(np.float32),
        "tokens": rng.integers(1, 50_000, lengths.sum(), np.int32),
        "borders": np.concatenate([[0], lengths.cumsum()]),
        "columns": rng.standard_normal((2000, 32, 16), np.float32),
    }
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    for number, pixels in enumerate(load_sample_images().images):  # two, of 640 x 427
        picture = Image.fromarray(pixels)
        for turn, picture_ in enumerate((picture, picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT))):
            for quality in (80, 90):
                picture_.save(folder / f"{number}-{turn}-{quality}.jpg", quality=quality)
