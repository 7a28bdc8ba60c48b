"""Trainers without TensorFlow: JAX takes NumPy batches as they are, and whatever cannot work names the fix."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import penstock

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_example_for_jax_trains() -> None:
    pytest.importorskip("jax")
    example = EXAMPLES / "train_jax.py"
    ended = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "the error is below 0.01" in ended.stdout


def test_fit_refuses_batches_for_other_trainers_and_says_what_it_takes(tf: Any) -> None:
    import keras

    inputs = keras.Input([], name="x")
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs[:, None]))
    model.compile(loss="mse")
    with penstock.connect(f"{EXAMPLES}/line.py:feed", workers=0) as connection:
        with pytest.raises(ValueError, match=r"model\.fit takes connection\.keras\(\) instead"):
            model.fit(connection.batches())
        if find_spec("torch") is not None:
            with pytest.raises(ValueError, match=r"model\.fit takes connection\.keras\(\) instead"):
                model.fit(connection.torch())
        data = connection.keras(lambda batch: (batch["x"], batch["y"]))
        assert model.fit(data, steps_per_epoch=5, verbose=0).epoch == [0]


@pytest.mark.parametrize(
    ("absent", "code", "message"),
    [
        ("tensorflow", "penstock.dataset({feed!r})", "penstock.dataset() needs TensorFlow, which is not installed"),
        ("tensorflow", "import penstock.keras", "set the environment variable KERAS_BACKEND to a backend that is"),
        ("keras", "import penstock.keras", "Keras is not installed here"),
        ("keras", "penstock.connect({feed!r}, workers=0).keras()", "Keras is not installed here"),
        ("tensorflow", "penstock.connect({feed!r}, workers=0).dataset()", "A connection also has keras() for Keras"),
        ("torch", "penstock.connect({feed!r}, workers=0).torch()", "connection.torch() needs PyTorch"),
    ],
)
def test_a_library_that_is_missing_is_named_with_what_works_without_it(absent: str, code: str, message: str) -> None:
    script = f"""
import sys
sys.modules[{absent!r}] = None
import penstock
try:
    {code.format(feed=f"{EXAMPLES}/line.py:feed")}
except ImportError as error:
    print(error)
"""
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert message in ended.stdout
    assert "daemon" not in ended.stderr, "nothing may have been started"
