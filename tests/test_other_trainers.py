"""NumPy batches outside of TensorFlow: JAX takes them as they are, and Keras refuses them and names the fix."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_example_for_jax_trains() -> None:
    pytest.importorskip("jax")
    example = EXAMPLES / "train_jax.py"
    ended = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the error is below 0.01" in ended.stdout


def test_fit_refuses_numpy_batches_and_says_what_it_takes(tf: Any) -> None:
    import keras

    inputs = keras.Input([], name="x")
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs[:, None]))
    model.compile(loss="mse")
    with penstock.connect(f"{EXAMPLES}/line.py:feed", workers=0) as connection:
        with pytest.raises(ValueError, match=r"model\.fit takes connection\.dataset\(\) instead"):
            model.fit(connection.batches())
        dataset = connection.dataset().map(lambda batch: (batch["x"], batch["y"]))
        assert model.fit(dataset, steps_per_epoch=5, verbose=0).epoch == [0]
