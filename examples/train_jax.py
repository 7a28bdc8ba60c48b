"""Train with JAX on a feed of NumPy batches. Each batch is put on the device while the previous step runs.

python train_jax.py
"""

from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp

import penstock

FEED = f"{Path(__file__).parent}/line.py:feed"


def loss(parameters, batch):
    slope, offset = parameters
    return jnp.mean((slope * batch["x"] + offset - batch["y"]) ** 2)


@jax.jit
def step(parameters, batch):
    error, gradient = jax.value_and_grad(loss)(parameters, batch)
    return jax.tree.map(lambda value, slope: value - 0.3 * slope, parameters, gradient), error


def main():
    parameters = jnp.zeros(2)
    with penstock.connect(FEED, workers=2) as connection:
        for batch in map(jax.device_put, islice(connection.batches(), 100)):  # neither device_put nor `step` blocks
            parameters, error = step(parameters, batch)
    print("the error is", "below" if error < 0.01 else "above", 0.01)


if __name__ == "__main__":
    main()
