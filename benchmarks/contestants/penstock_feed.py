"""The feed of the Penstock contestants: whole batches that are ready beforehand, so that the worker only writes them
into the slot."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from contestants import prebuilt
from penstock_server import Feed

LOAD = prebuilt.Load.of(os.environ["TRANSPORT_LOAD"])
pool = functools.cache(prebuilt.pool)  # made once, for any number of epochs


def whole_batches(split: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yield samples that are whole batches, so that each is copied into the slot in one write.

    Takes `rng`, though unused, so that Penstock leaves the global random state alone.
    """
    return prebuilt.stream(LOAD, pool(LOAD))


feed = Feed(whole_batches, splits=[0], batch_size=1)
