"""The feeds of undivided.py: a generator that cannot be divided, with a transform.

Each sample takes `COST` milliseconds of CPU time, of which the generator takes a `SHARE`. With `APART=1` each lane runs
the generator itself, as if the samples could not be copied.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_server import Feed
from penstock_server.worker.reading.passes import Passes

COST = float(os.environ.get("COST", "2")) / 1e3
SHARE = float(os.environ.get("SHARE", "0.25"))
if os.environ.get("APART") == "1":
    Passes.__init__.__kwdefaults__["shared"] = False


def work(seconds: float) -> None:
    """Keep a CPU busy for so many seconds of this thread's time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def generate() -> Iterator[tuple[Any, int]]:
    """Yield images of 64 x 64 x 3, one after another, in the same array."""
    image = np.zeros((64, 64, 3), np.uint8)
    number = 0
    while True:
        work(SHARE * COST)
        image += 1
        yield image, number
        number += 1


def transform(sample: tuple[Any, int]) -> tuple[Any, int]:
    work((1 - SHARE) * COST)
    return sample


in_order = Feed(generate, transform=transform, batch_size=32)
shuffled = Feed(generate, transform=transform, batch_size=32, shuffle=1000)
