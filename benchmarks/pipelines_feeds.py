"""The user code that pipelines.py measures: one plain function for each pipeline, which makes sample `number`.

Every loader calls these same functions. `pipelines_data.py` writes the files that they read.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(os.environ["PIPELINES_DATA"])
SIDE = 224  # of the images, in pixels
ROW = 512  # tokens
LEAVES = 32


def table(name: str) -> np.ndarray:
    """Return an array from the files. It is mapped, so that processes share its pages."""
    return np.load(DATA / f"{name}.npy", mmap_mode="r")


def flipped_image(number: int) -> np.ndarray:
    return np.ascontiguousarray(IMAGES[number % len(IMAGES)][:, ::-1])


def turned_digit(number: int) -> np.ndarray:
    from scipy.ndimage import rotate  # here, since the other pipelines do not need it

    return rotate(DIGITS[number % len(DIGITS)], number % 31 - 15, reshape=False)


def scaled_digit(number: int) -> np.ndarray:
    return DIGITS[number % len(DIGITS)] * np.float32(1 / 255)


def photograph(number: int) -> np.ndarray:
    from PIL import Image

    with Image.open(PHOTOGRAPHS[number % len(PHOTOGRAPHS)]) as picture:
        return np.asarray(picture.convert("RGB").resize((SIDE, SIDE)))


def padded_tokens(number: int) -> np.ndarray:
    start, stop = BORDERS[number % (len(BORDERS) - 1) :][:2]
    row = np.zeros(ROW, np.int32)
    row[: stop - start] = TOKENS[start:stop]
    return row


def record(number: int) -> dict[str, np.ndarray]:
    columns = COLUMNS[number % len(COLUMNS)]
    return {f"column{index:02}": columns[index] for index in range(LEAVES)}


IMAGES, DIGITS, TOKENS, BORDERS, COLUMNS = map(table, ("images", "digits", "tokens", "borders", "columns"))
PHOTOGRAPHS = sorted(DATA.glob("*.jpg"))


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A table of the result: its title, the function that makes its samples, the batch size, and the number of samples
    over which a loader shuffles (0: samples come in order)."""

    label: str
    sample: Callable[[int], Any]
    batch: int
    shuffle: int = 0


PIPELINES = {
    "images": Pipeline("Cheap images: 224x224x3 uint8 flipped, 32 a batch", flipped_image, 32),
    "rotate": Pipeline("Heavy Python: 28x28 float32 through scipy.ndimage.rotate, 32 a batch", turned_digit, 32),
    "small": Pipeline("Small batches: 28x28 float32 scaled, 32 a batch", scaled_digit, 32),
    "shuffled": Pipeline("Shuffled: the small batches, shuffled over 8192 samples", scaled_digit, 32, shuffle=8192),
    "jpeg": Pipeline("Photographs: JPEG decoded and resized to 224x224 by Pillow, 32 a batch", photograph, 32),
    "tokens": Pipeline("Token rows: int32, padded to 512, 64 a batch", padded_tokens, 64),
    "leaves": Pipeline("Many leaves: a dict of 32 rows of 16 float32, 32 a batch", record, 32),
}
