"""TensorFlow's checkpoints, for `Resume` on that backend of Keras. `checkpoints.py` has those for other backends."""

from __future__ import annotations

import json
import os
from typing import Any

import tensorflow as tf

_KEY = "progress/.ATTRIBUTES/py_state"


class _Progress(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The progress of `fit`, as JSON in the checkpoint of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.value: dict[str, Any] = {}

    def serialize(self) -> str:
        return json.dumps(self.value)

    def deserialize(self, text: bytes) -> None:
        self.value = json.loads(text)


class TensorFlowCheckpoints:
    """The checkpoints in a directory, which may be on any file system that TensorFlow knows. See `FileCheckpoints`."""

    def __init__(self, directory: str, keep: int) -> None:
        """Create the directory if it does not exist.

        Raises:
            OSError: it cannot be written.
            ValueError: it holds checkpoints of another backend.
        """
        self._directory, self._keep = directory, keep
        self._progress = _Progress()
        self._checkpoint: tf.train.Checkpoint | None = None
        self._manager: tf.train.CheckpointManager | None = None
        probe = os.path.join(directory, f".penstock-{os.getpid()}")
        try:
            tf.io.gfile.makedirs(directory)
            with tf.io.gfile.GFile(probe, "w") as file:
                file.write("")
            tf.io.gfile.remove(probe)
            names = tf.io.gfile.listdir(directory)
        except tf.errors.OpError as error:
            raise OSError(f"cannot save checkpoints in {directory!r}: {error.message}") from None
        if any(name.startswith("ckpt-") and name.endswith(".npz") for name in names):
            raise ValueError(
                f"{directory} has checkpoints of another backend of Keras, which the TensorFlow backend cannot "
                "continue: give Resume another directory"
            )

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        path: str | None = tf.train.latest_checkpoint(self._directory)
        return path

    def progress(self, path: str) -> dict[str, Any]:
        """Return the progress of `fit` in a checkpoint.

        Raises:
            ValueError: `Resume` did not write it.
        """
        reader = tf.train.load_checkpoint(path)
        if not reader.has_tensor(_KEY):
            raise ValueError(f"{path} was not written by penstock.keras.Resume: give it a directory of its own")
        progress: dict[str, Any] = json.loads(reader.get_tensor(_KEY))
        return progress

    def track(self, variables: dict[str, Any]) -> None:
        """Save and restore these Keras variables, by name."""
        holder = tf.train.Checkpoint(**{name: variable.value for name, variable in variables.items()})
        self._checkpoint = tf.train.Checkpoint(variables=holder, progress=self._progress)
        self._manager = tf.train.CheckpointManager(self._checkpoint, self._directory, max_to_keep=self._keep)

    def restore(self, path: str) -> None:
        """Assign the values in a checkpoint to the variables, which have the same names and shapes."""
        assert self._checkpoint is not None
        self._checkpoint.restore(path).assert_consumed()

    def save(self, progress: dict[str, Any]) -> None:
        """Save a checkpoint, then delete the oldest ones."""
        assert self._manager is not None
        self._progress.value = progress
        self._manager.save()
