"""For Keras: `Feeding` measures how long training waits for data (feeding.py). `Resume`, for `Model.fit` (resume.py),
and `CheckpointState`, for `tf.train.Checkpoint` (checkpoint_state.py), resume training in the middle of an epoch after
a crash:

    connection = penstock.connect("tcp://loader:5555/train")
    resume = penstock.keras.Resume(connection, "checkpoints")
    model.fit(connection.keras(), epochs=10, callbacks=[resume])

Imports Keras, and TensorFlow only for `CheckpointState` and on Keras' TensorFlow backend. `import penstock` does not
import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._adapters import optional

optional.check_keras()

from ._checkpoints.resume import Resume  # noqa: E402
from ._measure.feeding import Feeding  # noqa: E402
from ._measure.step_waits import Waits  # noqa: E402

if TYPE_CHECKING:
    from ._checkpoints.checkpoint_state import CheckpointState

__all__ = ["CheckpointState", "Feeding", "Resume", "Waits"]


def __getattr__(name: str) -> object:
    if name != "CheckpointState":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    optional.check_tensorflow("penstock.keras.CheckpointState is a part of a tf.train.Checkpoint, so it")
    from ._checkpoints.checkpoint_state import CheckpointState

    return CheckpointState


def __dir__() -> list[str]:
    return sorted(__all__)
