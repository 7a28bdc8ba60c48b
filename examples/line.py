"""A feed that makes up points on a line, with some noise. The examples for PyTorch and JAX train on it."""

import numpy as np

from penstock_server import Feed

SLOPE, OFFSET = 3.0, -1.0


def points(rng):
    """Yield {"x", "y"}, each float32 (), without end."""
    while True:
        x = rng.uniform(-1, 1)
        yield {"x": np.float32(x), "y": np.float32(SLOPE * x + OFFSET + rng.normal(0, 0.01))}


feed = Feed(points, segment=1000, batch_size=64, seed=1)
