"""`Resume` and `Feeding` work with `connection.keras()` on the backends of Keras that are not TensorFlow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import Serve
from tests.processes.killed_fit import KILL, check_equal

FEED = """
import numpy as np
from penstock_server import Feed

def numbers(split, rng):
    for i in range(8):
        yield rng.normal(size=3).astype("float32"), np.float32(i)

def endless(rng):
    while True:
        yield rng.normal(size=3).astype("float32"), np.float32(1)

feed = Feed(numbers, splits=range(6), batch_size=8, shuffle=8, lanes=2, turn=2, samples=48)
endless = Feed(endless, segment=16, batch_size=8, turn=2)
"""

TRAIN = (
    """
import json, os, signal, sys
import penstock, penstock.keras
imported = "tensorflow" in sys.modules
import keras
import numpy as np

url, directory, out, kill_at = sys.argv[1:5]
keras.utils.set_random_seed(7)
model = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
model.compile("adam", "mse")
"""
    + KILL
    + """
with penstock.connect(url) as connection:
    resume, feeding = penstock.keras.Resume(connection, directory, every=2), penstock.keras.Feeding()
    steps = 6 if url.endswith("endless") else None
    history = model.fit(
        connection.keras(), epochs=4, steps_per_epoch=steps, verbose=0, callbacks=[resume, Kill(), feeding]
    )
variables = [*model.variables, *model.optimizer.variables]
np.savez(out, *[keras.ops.convert_to_numpy(variable.value) for variable in variables])
print(json.dumps([imported, Kill.steps, resume.consumed, history.epoch, feeding.summary]))
"""
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("feed", ["feed", "endless"])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_fit_killed_within_epoch_1_ends_with_the_same_weights_bit_by_bit(
    serve: Serve, tmp_path: Path, backend: str, feed: str
) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    url = serve(FEED, "feed", "endless").urls[feed]

    def train(name: str, kill_at: int = 0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", TRAIN, url, str(tmp_path / name), str(tmp_path / f"{name}.npz"), str(kill_at)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"},
        )

    quiet = train("a")
    assert quiet.returncode == 0, quiet.stderr
    imported, *counts, epochs, summary = json.loads(quiet.stdout.splitlines()[-1])
    assert (imported, counts, epochs) == (False, [24, 24], [0, 1, 2, 3])
    assert summary.startswith("the trainer waited "), "the batch that built the model must not confuse Feeding"
    assert train("b", kill_at=9).returncode == -signal.SIGKILL
    again = train("b")
    assert again.returncode == 0, again.stderr
    _, *counts, epochs, _ = json.loads(again.stdout.splitlines()[-1])
    assert (counts, epochs) == ([16, 24], [1, 2, 3]), "it continues after step 8"
    assert "ran out of data" not in again.stderr
    check_equal(tmp_path / "a.npz", tmp_path / "b.npz")
