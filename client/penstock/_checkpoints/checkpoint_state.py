"""`penstock.keras.CheckpointState`: the position of a connection as a part of a `tf.train.Checkpoint`. Imports
TensorFlow."""

from __future__ import annotations

import json
from collections.abc import Callable

import tensorflow as tf

from .._adapters.connection import Connection
from .resume import checked


class CheckpointState(tf.train.experimental.PythonState):  # type: ignore[misc]
    """The state of a connection as a part of a `tf.train.Checkpoint`, saved and restored with the model.

        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step,
                                         data=penstock.keras.CheckpointState(connection, consumed=step))

    Restoring loads the state into the connection, which must not have been read before (see
    `Connection.load_state_dict`). This happens at `restore`, or, if that is later, when the object is added to the
    checkpoint.
    """

    def __init__(self, connection: Connection, consumed: Callable[[], int] | tf.Variable | None = None) -> None:
        """`consumed`: a function that returns, or a variable that holds, the number of batches that the training loop
        has consumed since the very beginning of the stream, including earlier runs. (A variable is restored with the
        same checkpoint.) None if the loop reads `Connection.batches`, which counts them.
        """
        super().__init__()
        self._connection = checked(connection, "CheckpointState")
        self._consumed = consumed

    def serialize(self) -> str:
        """Return the state as JSON. Called by TensorFlow."""
        count = self._consumed
        if count is not None:
            count = int(count() if callable(count) and not isinstance(count, tf.Variable) else count.numpy())
        return json.dumps(self._connection.state_dict(count))

    def deserialize(self, text: bytes) -> None:
        """Load the state into the connection. Called by TensorFlow."""
        self._connection.load_state_dict(json.loads(text))
