"""The feed of hosts.py. Samples are made beforehand, so the benchmark measures only their transport."""

import os
import time
from collections.abc import Iterator

import numpy as np

from penstock_server import Feed

NAP = float(os.environ["NAP"])
SPLIT_SAMPLES = int(os.environ["SPLIT_SAMPLES"])
SAMPLE = np.random.default_rng(0).integers(0, 256, int(os.environ["SAMPLE_BYTES"]), "uint8")


def samples(split: int) -> Iterator[np.ndarray]:
    for _ in range(SPLIT_SAMPLES):
        if NAP:
            time.sleep(NAP)
        yield SAMPLE


feed = Feed(
    samples,
    splits=range(4_000_000 // SPLIT_SAMPLES),
    batch_size=int(os.environ["BATCH"]),
    lanes=int(os.environ["LANES"]),
    turn=1,
)
