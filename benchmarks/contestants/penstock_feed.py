"""The feed that the Penstock contestants serve: whole batches that are ready before they are asked
for, so that the worker's one write into the slot is all that it does."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from contestants import prebuilt
from penstock_server import Feed

LOAD = prebuilt.Load.of(os.environ["TRANSPORT_LOAD"])
pool = functools.cache(prebuilt.pool)  # made once, however many epochs are begun


def whole_batches(split: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yields samples, each of which is a whole batch, so that it is copied into the slot in one write.

    `rng` is asked for and not used: Penstock then leaves the global random state alone.
    """
    return prebuilt.stream(LOAD, pool(LOAD))


feed = Feed(whole_batches, splits=[0], batch_size=1)
