"""`fit` gives the model each batch of `connection.keras()` once and in order, whatever a batch is and whatever else
`fit` is given. What cannot work is refused with a message that says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from tests.conftest import Serve
from tests.processes.forked import Launcher

CLASS_WEIGHT = {0: 1.0, 1: 5.0, 2: 7.0}

FEEDS = """
import numpy as np
from penstock_server import Feed

def feed_of(made):
    def samples(split):
        for i in range(8):
            yield made(8 * split + i)
    return Feed(samples, splits=range(3), samples=24, batch_size=4, lanes=2, turn=2, shuffle=8, seed=3)

def x(n):
    return np.full(2, n, "float32")

classes = feed_of(lambda n: (x(n), np.int32(n % 3)))
weighted = feed_of(lambda n: (x(n), np.int32(n % 3), np.float32(n)))
inputs = feed_of(lambda n: ({"a": x(n), "b": x(n)[:1]}, np.float32(n)))
four = feed_of(lambda n: (x(n), np.int32(n % 3), np.float32(0), np.float32(n)))

def forever(rng):
    while True:
        yield x(rng.integers(9)), np.int32(1)

endless = Feed(forever, segment=16, batch_size=4)
"""
NAMES = ("classes", "weighted", "inputs", "four", "endless")

REFUSED = {
    "both_weights": "`class_weight` and `sample_weight` at the same time",
    "y_besides": "y= cannot be given together with a dataset of Penstock",
    "sample_weight_besides": "sample_weight= cannot be given together with a dataset of Penstock",
    "endless": "the stream has no end, so fit needs steps_per_epoch=",
    "endless_validation": "validation_steps=, if this is its validation data",
    "four_parts": "a sample of feed four has 4 parts, but a batch for Keras is x, (x, y) or (x, y, sample_weight)",
    "four_parts_of_map": "what the function of connection.keras(map) returned has 4 parts",
    "forgotten_return": "connection.keras(map) returned is None: did you forget to `return` the batch?",
}


def listed(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: listed(leaf) for name, leaf in batch.items()}
    return [listed(leaf) for leaf in batch] if isinstance(batch, tuple) else batch.tolist()


def two_epochs(url: str) -> list[list[Any]]:
    with penstock.connect(url) as connection:
        return [[listed(batch) for batch in connection.batches()] for _ in range(2)]


def with_class_weights(epoch: list[Any]) -> list[Any]:
    return [[x, y, [CLASS_WEIGHT[label] for label in y]] for x, y in epoch]


def ordered(batches: list[Any]) -> list[Any]:
    return sorted(batches, key=str)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_fit_trains_on_each_batch_once_or_says_why_it_cannot(
    serve: Serve, keras_launcher: Launcher, backend: str
) -> None:
    urls = serve(FEEDS, *NAMES).urls
    code = "import keras_fitter; keras_fitter.main()"
    trainer = keras_launcher.start(code, json.dumps(urls), folder=Path(__file__).parent)
    try:
        out, errors = trainer.communicate(280)
        assert trainer.returncode == 0, errors
    finally:
        trainer.close()
    results = json.loads(out.splitlines()[-1])
    for name, words in REFUSED.items():
        assert words in results.pop(name)["error"], name
    errors = {name: result["error"] for name, result in results.items() if "error" in result}
    assert not errors

    assert results.pop("x_alone") == {"predicted": 24}
    classes, weighted, inputs, four = (two_epochs(urls[name]) for name in NAMES[:4])
    trained = {name: result["trained"] for name, result in results.items()}
    assert trained["classes_with_weights"] == [*map(with_class_weights, classes)]
    assert trained["weights_only_in_the_first_fit"] == [with_class_weights(classes[0]), classes[1]]
    assert trained["samples_with_weights"] == weighted
    assert trained["a_dict_of_inputs"] == inputs
    assert trained["arranged"] == [[[x, y, weight] for x, y, _, weight in epoch] for epoch in four]
    assert trained["another_feed_for_validation"] == [*map(with_class_weights, classes)]
    assert results["another_feed_for_validation"]["validated"] == weighted
    assert trained["a_rank"] == [epoch[::2] for epoch in classes]
    assert results["a_rank"]["validated"] == [epoch[1::2] for epoch in classes]
    for number, epoch in enumerate(classes):
        of_group = results["a_group"]
        assert ordered(of_group["trained"][number] + of_group["validated"][number]) == ordered(epoch)


@pytest.mark.soak  # eight processes import TensorFlow
def test_trainings_of_the_example_of_a_sweep_have_the_same_losses_with_sharing_and_without() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "sweep.py"
    ended = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    shared, alone = ended.stdout.splitlines()
    assert shared.startswith("share=True: ")
    assert alone.startswith("share=False: ")
    assert shared.partition("losses")[2] == alone.partition("losses")[2]
    assert len(set(shared.partition("losses")[2].split(", "))) == 4
