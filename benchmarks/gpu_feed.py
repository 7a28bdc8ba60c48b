"""The user code of gpu.py: uint8 images with a label, mirrored, or decoded from JPEG and cropped as for ImageNet."""

import io
import itertools
import os
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed

SIDE, BATCH, WORK = int(os.environ["GPU_SIDE"]), int(os.environ["GPU_BATCH"]), os.environ["GPU_WORK"]
SPLIT = 64 * BATCH  # samples
SPLITS = range(0, 50_000 * SPLIT, SPLIT)  # more than a run reads
CLASSES = 1000
PHOTOS, PHOTO = 64, (375, 500)  # height and width, in pixels; ImageNet's are 400 x 350 on average


def photo(number: int) -> bytes:
    """Return a JPEG file of some 100 KB: noise that is smooth, so that decoding costs what a photograph costs."""
    from PIL import Image

    coarse = np.random.default_rng(number).integers(0, 256, (PHOTO[0] // 5, PHOTO[1] // 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(PHOTO[::-1], Image.Resampling.BILINEAR).save(file, "JPEG", quality=90)
    return file.getvalue()


def decoded(data: bytes, rng: np.random.Generator) -> np.ndarray:
    """Return a random crop of the image, SIDE x SIDE, mirrored every second time."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    size = int(rng.integers(min(image.size) // 2, min(image.size)))
    left, top = (int(rng.integers(length - size + 1)) for length in image.size)
    pixels = np.array(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, (left, top, left + size, top + size)))
    return pixels[:, ::-1] if rng.integers(2) else pixels


if WORK == "jpeg":
    FILES = [photo(number) for number in range(PHOTOS)]
else:
    IMAGES = np.random.default_rng(0).integers(0, 256, (256, SIDE, SIDE, 3), np.uint8)


def samples(start: int) -> Iterator[tuple[np.ndarray, np.int32]]:
    rng = np.random.default_rng(start)
    for number in range(start, start + SPLIT):
        image = decoded(FILES[number % PHOTOS], rng) if WORK == "jpeg" else IMAGES[number % len(IMAGES)][:, ::-1]
        yield np.ascontiguousarray(image), np.int32(number % CLASSES)


def stream(reader: int = 0, readers: int = 1) -> Iterator[tuple[np.ndarray, np.int32]]:
    """Yield the samples of all splits, one after another, or those of one of several readers."""
    return itertools.chain.from_iterable(map(samples, SPLITS[reader::readers]))


feed = Feed(samples, splits=SPLITS, batch_size=BATCH)
