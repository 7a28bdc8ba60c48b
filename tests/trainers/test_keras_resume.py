"""`Resume` and `Feeding` work with `connection.keras()` on the backends of Keras that are not TensorFlow."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Serve
from tests.processes.forked import Launcher
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
import keras
import numpy as np

assert keras.backend.backend() == "BACKEND"

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
print(json.dumps([Kill.steps, resume.consumed, history.epoch, feeding.summary]))
"""
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("feed", ["feed", pytest.param("endless", marks=pytest.mark.soak)])
def test_fit_killed_within_epoch_1_ends_with_the_same_weights_bit_by_bit(
    serve: Serve, tmp_path: Path, backend: str, keras_launcher: Launcher, feed: str
) -> None:
    url = serve(FEED, "feed", "endless").urls[feed]
    code = TRAIN.replace("BACKEND", backend)

    def train(name: str, kill_at: int = 0) -> tuple[int, list[str], str]:
        trainer = keras_launcher.start(code, url, str(tmp_path / name), str(tmp_path / f"{name}.npz"), str(kill_at))
        try:
            out, errors = trainer.communicate(150)
            return trainer.wait(), out.splitlines(), errors
        finally:
            trainer.close()

    status, told, errors = train("a")
    assert status == 0, errors
    *counts, epochs, summary = json.loads(told[-1])
    assert (counts, epochs) == ([24, 24], [0, 1, 2, 3])
    assert summary.startswith("the trainer waited "), "the batch that built the model must not confuse Feeding"
    assert train("b", kill_at=9)[0] == -signal.SIGKILL
    status, told, errors = train("b")
    assert status == 0, errors
    *counts, epochs, _ = json.loads(told[-1])
    assert (counts, epochs) == ([16, 24], [1, 2, 3]), "it continues after step 8"
    assert "ran out of data" not in errors
    check_equal(tmp_path / "a.npz", tmp_path / "b.npz")
