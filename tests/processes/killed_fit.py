"""For tests that kill a `fit`, run it again, and compare the weights with those of an undisturbed one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

KILL = """
class Kill(keras.callbacks.Callback):
    steps = 0
    def on_train_batch_end(self, batch, logs=None):
        Kill.steps += 1
        if Kill.steps == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""A part of the trainer's script: a callback that kills it after step `kill_at`."""


def check_equal(one: Path, other: Path) -> None:
    """Check that two files of NumPy arrays have the same bits."""
    with np.load(one) as whole, np.load(other) as pieced:
        assert whole.files == pieced.files
        for name in whole.files:
            np.testing.assert_array_equal(whole[name], pieced[name])
