"""The feed that the daemon serves: the code that a user of Penstock writes around a pipeline's sample function."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
from pipelines_feeds import PIPELINES

from loaders.samples import EPOCH
from penstock_server import Feed

PIPELINE = PIPELINES[os.environ["PIPELINE"]]
SPLIT = 64 * PIPELINE.batch  # samples


def samples(start: int, rng: np.random.Generator) -> Iterator[Any]:
    """Yield the samples of a split. Takes `rng`, though unused, as most pipelines do."""
    return map(PIPELINE.sample, range(start, start + SPLIT))


feed = Feed(
    samples,
    splits=range(0, EPOCH * PIPELINE.batch, SPLIT),
    batch_size=PIPELINE.batch,
    shuffle=PIPELINE.shuffle,
)
