"""The feed of recovery.py. Each sample takes `SAMPLE_SECONDS`, and is recorded in a file.

Samples sleep, so that the benchmark measures the wait for samples that are made again, not competition for CPUs.
"""

import os
import struct
import time
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed

SAMPLE_SECONDS = float(os.environ["SAMPLE_SECONDS"])
SPLIT_SAMPLES = int(os.environ["SPLIT_SAMPLES"])
MADE = os.open(os.environ["MADE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
RECORD = struct.Struct("<qqq")

time.sleep(float(os.environ["IMPORT_SECONDS"]))  # as if the module imported something large


def samples(split: int, rng: np.random.Generator, epoch: int) -> Iterator[np.ndarray]:
    """Yield `SPLIT_SAMPLES` samples of 16 KiB."""
    for i in range(SPLIT_SAMPLES):
        if SAMPLE_SECONDS:
            time.sleep(SAMPLE_SECONDS)
            os.write(MADE, RECORD.pack(epoch, split, i))
        yield rng.integers(0, 256, 16 * 1024, "uint8")


feed = Feed(
    samples,
    splits=range(int(os.environ["SPLITS"])),
    batch_size=8,
    lanes=int(os.environ["LANES"]),
    turn=1,
    shuffle=int(os.environ["SHUFFLE"]),
)
