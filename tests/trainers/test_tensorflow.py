"""What a trainer sees in TensorFlow: structure, shapes, no copy, no reuse under a living tensor, Keras."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_proto.spec import DTYPES
from tests.conftest import Serve

FEEDS = """
    import numpy as np
    from penstock_server import Feed

    def numbered(split):
        for i in range(8):
            n = 8 * split + i
            yield np.full((64, 64), n, "float32"), np.int64(n)

    feed = Feed(numbered, splits=range(12), batch_size=8, turn=1, lanes=4)        # 128 KiB, one batch a slab
    turns = Feed(numbered, splits=range(12), batch_size=2, turn=5, lanes=4)       # several batches a slab
    full = Feed(numbered, splits=range(12), batch_size=10, drop_remainder=True, samples=96)
    counted = Feed(numbered, splits=range(12), batch_size=10, samples=96)
    small = Feed(numbered, splits=range(2), batch_size=8, samples=16, epochs=None)

    def ready(split):
        for rows in (3, 5):
            yield {"x": np.full((rows, 7), split, "float32"), "flags": np.ones(rows, bool)}

    batches = Feed(ready, splits=range(4), batch_size=None)

    def kinds(split):
        names = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bool"
        arrays = {name: np.zeros((128, 128), name) for name in names.split()}
        yield {**arrays, "odd": np.ones((99, 101, 3), "uint8"), "label": np.int32(7), "scalar": 1.5}

    dtypes = Feed(kinds, splits=range(6), batch_size=1, turn=1)
"""


def address(tensor: Any) -> int:
    """Return the address of the tensor's bytes."""
    return int(np.frombuffer(memoryview(tensor), np.uint8).__array_interface__["data"][0])


def mapped() -> list[range]:
    """Return the addresses at which slots are mapped into this process."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:penstock " in line + " " and "ledger" not in line:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            ranges.append(range(start, end))
    return ranges


def in_a_slot(tensor: Any) -> bool:
    return any(address(tensor) in place for place in mapped())


def test_the_element_spec_is_that_of_the_feed(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "feed", "full", "counted", "batches")
    spec = tf.TensorSpec
    expected = {
        "feed": ((spec([None, 64, 64], "float32"), spec([None], "int64")), tf.data.UNKNOWN_CARDINALITY),
        "full": ((spec([10, 64, 64], "float32"), spec([10], "int64")), 9),
        "counted": ((spec([None, 64, 64], "float32"), spec([None], "int64")), 10),
        "batches": ({"flags": spec([None], "bool"), "x": spec([None, 7], "float32")}, tf.data.UNKNOWN_CARDINALITY),
    }
    for name, (element_spec, cardinality) in expected.items():
        dataset = penstock.dataset(daemon.urls[name])
        assert dataset.element_spec == element_spec
        assert dataset.cardinality() == cardinality
        with penstock.connect(daemon.urls[name]) as connection:
            assert connection.cardinality == (None if cardinality < 0 else cardinality)
        del dataset
        gc.collect()


@pytest.mark.parametrize("transport", ["local", "tcp"])
@pytest.mark.parametrize("name", ["feed", "turns", "full", "counted", "batches"])
def test_tensorflow_sees_the_batches_that_numpy_sees(serve: Serve, tf: Any, name: str, transport: str) -> None:
    daemon = serve(FEEDS, name)
    with (
        penstock.connect(daemon.url, transport=transport) as one,
        penstock.connect(daemon.url, transport=transport) as other,
    ):
        dataset = one.dataset()
        for _ in range(2):
            tensors = [tf.nest.map_structure(np.array, batch) for batch in dataset]
            arrays = [tf.nest.map_structure(np.array, batch) for batch in other.batches()]
            assert len(tensors) == len(arrays) > 0
            for seen, expected in zip(tensors, arrays, strict=True):
                tf.nest.map_structure(np.testing.assert_array_equal, seen, expected)
                tf.nest.map_structure(lambda a, b: pytest.fail("dtype") if a.dtype != b.dtype else None, seen, expected)


def test_a_tensor_of_every_dtype_that_can_lies_in_the_slot(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "dtypes")
    with penstock.connect(daemon.url) as connection:
        assert connection.stats()["transport"] == "local"
        for batch in connection.dataset():
            for name, tensor in batch.items():
                if name in ("label", "scalar"):
                    continue  # a few bytes, cheaper to copy than to hand over separately
                assert in_a_slot(tensor), name
                assert address(tensor) % 64 == 0
            assert set(batch) - {"odd", "label", "scalar"} == DTYPES - {"bfloat16", "string"}
            del batch, tensor
    gc.collect()


def test_no_slot_is_used_again_while_a_tensor_over_it_lives(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "feed")
    with penstock.connect(daemon.url) as connection:
        dataset = connection.dataset()
        for hoarding in (dataset, dataset.shuffle(100), dataset.cache()):
            held = list(hoarding)
            assert len(held) == 12
            seen = []
            for x, n in held:
                np.testing.assert_array_equal(x.numpy()[:, 0, 0], n.numpy())
                assert (x.numpy() == x.numpy()[:, :1, :1]).all()
                seen += n.numpy().tolist()
            assert sorted(seen) == list(range(96))
            del held, x, n
            gc.collect()
        assert connection.stats()["copies"] > 0, "a trainer that hoards gets copies beyond its quota"


@pytest.mark.parametrize("name", ["feed", "turns"])
def test_tensorflow_writing_in_place_into_slices_disturbs_no_other_batch(serve: Serve, tf: Any, name: str) -> None:
    changes = {
        "slice": lambda x, n: (x[:2] + 1, n),
        "row": lambda x, n: (tf.expand_dims(x[0] + 1, 0), n),
        "split": lambda x, n: (tf.split(x, [1, -1])[0] * 2 + 1, n),
        "unstack": lambda x, n: (tf.stack([part + 1 for part in tf.unstack(tf.ensure_shape(x, [k, 64, 64]))]), n),
        "whole": lambda x, n: (x + 1, n + 0),
    }
    k = 8 if name == "feed" else 2
    daemon = serve(FEEDS, name)
    with penstock.connect(daemon.url) as connection:
        for label, change in changes.items():
            kept = []
            for x, n in connection.dataset().map(change, num_parallel_calls=2):
                first = int(n[0])
                expected = 2 * first + 1 if label == "split" else first + 1
                np.testing.assert_array_equal(x[0], np.full((64, 64), expected, "float32"), err_msg=label)
                kept.append((x, first, expected))
            for x, _, expected in kept:
                assert float(x[0, 0, 0]) == expected, label
            del kept, x, n
        for _ in range(3):  # and eagerly
            for x, n in connection.dataset():
                y = x[:4] + 1
                first, rest = tf.split(x, [1, -1])
                first += 5
                np.testing.assert_array_equal(y[0], np.full((64, 64), float(n[0]) + 1))
                del first, rest, y
        assert sorted(int(i) for _, n in connection.dataset() for i in n) == list(range(96))


def test_slots_come_back_when_tensors_die(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "feed")
    with penstock.connect(daemon.url) as connection:
        for _ in range(20):
            for _ in connection.dataset():
                pass
        assert connection.stats()["copies"] == 0
        gc.collect()
        assert connection.stats()["aliased"] <= 1


def test_keras_fit_knows_its_steps_and_validates(serve: Serve, tf: Any) -> None:
    import keras

    class Steps(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int | None] = []
            self.batches = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.steps.append(self.params["steps"])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1

    daemon = serve(FEEDS, "counted", "small")
    model = keras.Sequential([keras.Input((64, 64)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile(loss="mse")
    steps = Steps()
    history = model.fit(
        penstock.dataset(daemon.urls["counted"]),
        validation_data=penstock.dataset(daemon.urls["small"]),
        epochs=3,
        verbose=0,
        callbacks=[steps],
        shuffle=False,
    )
    assert steps.steps == [10, 10, 10]
    assert steps.batches == 30
    assert len(history.history["val_loss"]) == 3
    del model, history, steps
    keras.utils.clear_session(free_memory=True)


def test_a_dataset_closes_its_connection_when_it_and_all_derived_from_it_are_gone(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "feed")

    def streams() -> int:
        return daemon.stderr().count("reads it") - daemon.stderr().count("is gone")

    dataset = penstock.dataset(daemon.url)
    derived = dataset.map(lambda x, n: n).prefetch(2)
    assert streams() == 1
    del dataset
    gc.collect()
    iterator = iter(derived)
    del derived
    gc.collect()
    assert sum(1 for _ in iterator) == 12
    assert streams() == 1
    del iterator

    import time

    for _ in range(100):
        gc.collect()
        if streams() == 0:
            break
        time.sleep(0.05)
    assert streams() == 0


def test_leaving_an_epoch_early_begins_the_next_one(serve: Serve, tf: Any) -> None:
    daemon = serve(FEEDS, "feed")
    with penstock.connect(daemon.url) as connection:
        dataset = connection.dataset()
        for _ in dataset:
            break
        assert len(list(dataset.take(2))) == 2
        assert sorted(int(i) for _, n in dataset for i in n) == list(range(96))
        assert connection.stats()["epoch"] == 2
