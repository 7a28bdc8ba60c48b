"""Keras gets nested structures as from `tf.data` over the same arrays: leaves, their order, and sample weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from tests.conftest import Serve

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def samples(split):
        for i in range(32 * split, 32 * (split + 1)):
            x = np.sin(np.arange(6, dtype=np.float32) + i)
            inputs = {"wide": x, "deep": (x[:3] * 2, {"z": x[:2], "a": x[2:5]})}
            yield inputs, {"second": x[:1] + 1, "first": x[:2]}, {"second": np.float32(1), "first": np.float32(i % 3)}

    feed = Feed(samples, splits=[0, 1], batch_size=8, lanes=2, turn=1)
    table = Feed([sample for split in (0, 1) for sample in samples(split)], batch_size=8)
"""


def structure(value: Any) -> Any:
    """Return the structure alone, with the order of dicts."""
    if isinstance(value, dict):
        return [(key, structure(item)) for key, item in value.items()]
    return tuple(map(structure, value)) if isinstance(value, tuple) else None


def as_yielded() -> Iterator[Any]:
    """Yield the samples of the feed `table`, in its order."""
    for i in range(64):
        x = np.sin(np.arange(6, dtype=np.float32) + i)
        inputs = {"wide": x, "deep": (x[:3] * 2, {"z": x[:2], "a": x[2:5]})}
        yield inputs, {"second": x[:1] + 1, "first": x[:2]}, {"second": np.float32(1), "first": np.float32(i % 3)}


@pytest.mark.parametrize("transport", ["local", "tcp"])
def test_structures_and_the_order_of_dicts_are_those_of_a_sample(serve: Serve, tf: Any, transport: str) -> None:
    daemon = serve(FEEDS, "feed", "table")
    expected = structure(next(as_yielded()))
    for url in daemon.urls.values():
        dataset = penstock.dataset(url, transport=transport)
        assert structure(dataset.element_spec) == expected
        assert structure(next(iter(dataset))) == expected
        del dataset
        with penstock.connect(url, transport=transport) as connection:
            assert structure(next(connection.batches())) == expected


def test_a_model_with_several_inputs_outputs_and_sample_weights_trains_as_from_tf_data(serve: Serve, tf: Any) -> None:
    import keras

    class Model(keras.Model):
        """Relies on the order of its inputs, as `tf.data` keeps it."""

        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(2, kernel_initializer="ones")
            self.second = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs: Any) -> Any:
            wide, (doubled, parts) = inputs.values()
            z, a = parts.values()
            joined = keras.ops.concatenate([wide, doubled, z * 3, a * 5], axis=-1)
            return {"first": self.first(joined), "second": self.second(joined * joined)}

    def trained(dataset: Any) -> list[float]:
        model = Model()
        model.compile(keras.optimizers.SGD(1e-4), loss={"first": "mse", "second": "mae"})
        losses: list[float] = model.fit(dataset, epochs=2, verbose=0, shuffle=False).history["loss"]
        return losses

    leaves = [tf.nest.flatten(sample) for sample in as_yielded()]
    arrays = tf.nest.pack_sequence_as(next(as_yielded()), [np.stack(leaf) for leaf in zip(*leaves, strict=True)])
    expected = trained(tf.data.Dataset.from_tensor_slices(arrays).batch(8))
    daemon = serve(FEEDS, "table")
    assert trained(penstock.dataset(daemon.url)) == pytest.approx(expected, rel=1e-6)
    keras.utils.clear_session(free_memory=True)
