"""`penstock.keras.Resume`: saves the model together with its position in the data, and resumes `fit` there.

Imports Keras, and TensorFlow only on that backend.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from typing import Any

import keras

from penstock_proto import StateMismatch, StreamClosed

from .._adapters.connection import Connection

if keras.backend.backend() == "tensorflow":
    from .tf_checkpoints import TensorFlowCheckpoints as Checkpoints
else:
    from .checkpoints import FileCheckpoints as Checkpoints  # type: ignore[assignment]

logger = logging.getLogger("penstock")


class _Enough:
    """The value of `stop_training` that ends the rest of an epoch, but not the training."""


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the model with its position in the data, and resumes `fit` there after a crash, even within an epoch.

    A checkpoint holds the model, the optimizer, the seeds of random layers, the epoch, and the connection's state. On
    the PyTorch backend, layers without a seed draw from PyTorch's global generators, so it holds their states too. It
    exists whole or not at all, so these always match. A new Resume on the same directory loads the newest state into
    the connection at once, and `fit` restores the model when it begins. Training then resumes in the interrupted epoch,
    and the remaining batches are those of an undisturbed run. Later epochs have their full length.

    If the stream has no end (`Feed(segment=)` without `samples=`), `fit(steps_per_epoch=)` defines an epoch.

    With the TensorFlow backend the checkpoints are TensorFlow's, otherwise files of NumPy arrays. A backend cannot
    continue those of another.

    A Resume serves one `fit`. A script that runs again must make a new connection and a new Resume.

    Args:
        connection: from `penstock.connect`, without `state=` and `group=`, and not read yet. Give `fit` its `keras()`,
            on any backend, or its `dataset()`, or one made from the latter in which each element is still one batch, in
            order (`map` and `prefetch`, not `shuffle`, `filter`, `take` or `batch`). Nothing else may read the
            connection.
        directory: the directory for the checkpoints of one training. Created if it does not exist.
        every: steps between two checkpoints, besides those at the end of each epoch; None: only the latter. Checkpoints
            within an epoch require that `fit` knows its length. So there are none if the feed has no `samples=`, if a
            `filter` hides the length, or with `steps_per_epoch=` (which needs `dataset().repeat()`). A stream that has
            no end is an exception: it has them.
        keep: how many checkpoints to keep.

    Raises:
        TypeError: `connection` is not a Connection but, for example, a URL or a dataset.
        StateMismatch: the checkpoint was made with a different feed.
        ValueError: as `Connection.load_state_dict`; another class wrote the checkpoint; or an argument is invalid.
        StreamClosed: the connection was closed.
        OSError: `directory` cannot be written.
    """

    def __init__(
        self, connection: Connection, directory: str | os.PathLike[str], every: int | None = 100, keep: int = 2
    ) -> None:
        super().__init__()
        if every is not None and (not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: must be a number of steps, 1 or more, or None")
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep={keep!r}: must be a number of checkpoints, 1 or more")
        self._connection = checked(connection, "Resume")
        self._directory = os.fspath(directory)
        self._every = every
        self._handoff = connection._handle.handoff
        _check_unread(connection)
        self._checkpoints = Checkpoints(self._directory, keep)
        self._latest = self._checkpoints.latest()
        self._progress: dict[str, Any] | None = None
        self._consumed = 0
        self._saved = 0
        self._epoch = 0
        self._quiet = contextlib.ExitStack()
        self._rest_ends = -1
        self._before = 0
        self._enough = _Enough()
        self._values: list[tuple[Any, Any]] = []
        self._used = self._reads_it = False
        if self._latest is not None:
            self._progress = self._checkpoints.progress(self._latest)
            self._consumed = self._saved = self._progress["consumed"]
            try:
                connection.load_state_dict(self._progress["state"])
            except StateMismatch as error:
                text = f"{self._latest}: {error.message}. Give Resume another directory for another training"
                raise StateMismatch(text, feed=error.feed) from None
            self._handoff = connection._handle.handoff

    @property
    def initial_epoch(self) -> int:
        """The epoch in which training begins, as `fit` counts: 0, or the one that was interrupted."""
        return self._progress["epoch"] if self._progress is not None else 0

    @property
    def consumed(self) -> int:
        """Batches trained on since the very beginning, including earlier runs."""
        return self._consumed

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the model. Called by Keras."""
        self._begin_fit()
        model = self.model
        if not model.built:
            raise ValueError("Resume can only restore a model that is built: call model.build(shape) first")
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        variables = {
            **_named("model", model.variables),
            **_named("optimizer", getattr(model.optimizer, "variables", ())),
        }
        self._variables = list(variables.values())
        self._shapes = {name: list(variable.shape) for name, variable in variables.items()}
        self._checkpoints.track(variables)
        if self._progress is not None and self._latest is not None:
            was, now = self._progress["variables"], self._shapes
            found = [f"{name} had shape {was.get(name)} and has {now.get(name)}" for name in {**was, **now}]
            found = [text for name, text in zip({**was, **now}, found, strict=True) if was.get(name) != now.get(name)]
            if found:
                raise ValueError(
                    f"the checkpoint {self._latest} was made with another model: it has {len(was)} variables, and this "
                    f"model {len(now)}: {'; '.join(found[:3])}"
                )
            self._check_steps()
            self._checkpoints.restore(self._latest)
            if keras.backend.backend() == "torch" and "random" in self._progress:
                from .._adapters import torch_randomness

                torch_randomness.put_states(self._progress["random"])
            model._initial_epoch = self.initial_epoch  # as keras.callbacks.BackupAndRestore does
        self._epoch = self.initial_epoch
        steps, batches = self.params.get("steps"), self._connection.cardinality
        self._endless = batches == math.inf
        if self._endless and steps is None:
            raise ValueError("the stream has no end, so fit needs steps_per_epoch=, the number of steps in an epoch")
        if self._progress is not None and self.initial_epoch >= self.params["epochs"]:
            logger.warning(
                "%s: %d epochs are trained and saved here, so fit(epochs=%d) has nothing left to train, and the model "
                "is as it was saved. To continue give fit more epochs; for another training give Resume another "
                "directory",
                self._latest,
                self.initial_epoch,
                self.params["epochs"],
            )
        self._by_epochs = steps in (None, batches) and not self._endless
        self._within = steps is not None and (self._endless or steps == batches)
        if not self._within and self._every is not None:
            logger.warning(
                "%s: checkpoints are saved only at the ends of epochs, because fit counts %s steps in an epoch and the "
                "feed has %s batches: both numbers must be known and equal",
                self._directory,
                steps or "no",
                batches or "no known number of",
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note where the epoch begins. Called by Keras."""
        self._reads_it = False
        self._epoch = epoch
        self._begin = self._consumed
        resumed = self._progress is not None and epoch == self.initial_epoch
        self._before = self._progress.get("step", 0) if self._progress is not None and resumed else 0
        if self._endless:
            return
        if self._progress is not None and self._progress["within"] and resumed:
            if keras.backend.backend() == "tensorflow":
                self._rest_ends = int(self._connection.cardinality or 0) - self._behind(self._progress["state"])
            self._quiet.enter_context(warnings.catch_warnings())  # the rest of an epoch is shorter, as expected
            warnings.filterwarnings("ignore", message=r"\s*Your input ran out of data")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step, and save a checkpoint if it is time. Called by Keras."""
        self._consumed = self._begin + batch + 1
        if not self._reads_it:
            self._check_source()
        step = self._before + batch + 1
        if self._endless and self._before and step >= self.params["steps"] and not self.model.stop_training:
            self.model.stop_training = self._enough  # ends this epoch; `on_epoch_end` takes it back
        if batch + 1 == self._rest_ends:
            # TensorFlow then tries one more step, which draws random numbers although it finds no data.
            self._values = [(variable, variable.numpy()) for variable in self._variables]
        if self._every is None or self._consumed - self._saved < self._every or not self._within:
            return
        if self._endless and step >= self.params["steps"]:
            return  # the epoch ends now, and `on_epoch_end` saves
        state = self._connection.state_dict(self._consumed)
        if self._behind(state) not in (0, self._connection.cardinality):  # likewise
            self._save(state, self._epoch, step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Undo what Keras did after the last step. Called by Keras, before validation."""
        self._undo()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save. Called by Keras, after validation."""
        self._undo()
        self._quiet.close()
        if self.model.stop_training is self._enough:
            self.model.stop_training = False
        state = self._connection.state_dict(self._consumed)
        ended = self._handoff.ends_epoch(self._consumed)
        if self._by_epochs and not ended and self._behind(state) not in (0, self._connection.cardinality):
            if self.model.stop_training:  # by another callback, within the epoch: keep the last checkpoint
                return
            raise ValueError(
                f"fit took {self._consumed - self._begin} steps in epoch {epoch}, which do not end epoch "
                f"{state['position']['epoch']} of the stream: an element of fit's dataset must be one batch, in order, "
                "so give fit connection.keras(), or make it from connection.dataset() with map and prefetch alone"
            )
        if self._by_epochs and self._handoff.consumed != self._consumed:
            raise ValueError(
                f"{self._connection} handed over {self._handoff.consumed} batches by the end of epoch {epoch}, but fit "
                f"trained on {self._consumed}: something else reads it too, such as validation_data= or another "
                "callback. Give that a connection of its own"
            )
        self._save(state, epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Let a later `fit` begin at its own initial epoch. Called by Keras."""
        self._quiet.close()
        self.model._initial_epoch = None
        self._progress = None

    def _begin_fit(self) -> None:
        if self._used:
            raise ValueError(
                "this Resume was used by a fit before, and a Resume serves only one: connect again and make another "
                "Resume, on the same directory to continue this training, or on another directory for another training"
            )
        self._used = True
        if self._handoff.begun:
            raise ValueError(
                f"{self._connection} was read between Resume and the first step of fit: by code that takes a batch, a "
                "cached dataset, or another callback. Give Resume a connection that only the training of fit reads"
            )

    def _check_source(self) -> None:
        """Raise ValueError if the first steps of an epoch did not come from the connection."""
        if self._handoff.consumed < self._consumed:
            raise ValueError(
                f"fit has trained on {self._consumed} batches, but {self._connection} has handed over "
                f"{self._handoff.consumed}: fit reads another dataset. Give fit the dataset of Resume's connection: "
                "connection.keras(), connection.dataset(), or one made from the latter"
            )
        self._reads_it = True

    def _check_steps(self) -> None:
        assert self._progress is not None
        was, now = self._progress["steps"], self.params.get("steps")
        if self._progress["within"] and was != now:
            raise ValueError(
                f"{self._latest} was saved after step {self._progress['step']} of epoch {self.initial_epoch}, when "
                f"fit counted {was} steps in an epoch. Now it counts {now}: give fit the same steps_per_epoch=, and "
                "a dataset of the same length, until that epoch has ended"
            )

    def _behind(self, state: dict[str, Any]) -> int:
        """Return how many batches of its epoch come before a state; with ranks, how many of each rank."""
        batches: int = state["position"]["batches"] + state["position"]["skip"]
        return -(-batches // self._connection._handle.world_size)

    def _undo(self) -> None:
        values, self._values, self._rest_ends = self._values, [], -1
        for variable, value in values:
            variable.assign(value)

    def _save(self, state: dict[str, Any], epoch: int, step: int) -> None:
        """Save a checkpoint after `step` steps of the epoch."""
        self._sync()
        progress = {
            "consumed": self._consumed,
            "epoch": epoch,
            "step": step,
            "steps": self.params.get("steps"),
            "within": step > 0,
            "state": state,
            "variables": self._shapes,
        }
        if keras.backend.backend() == "torch":
            from .._adapters import torch_randomness

            progress["random"] = torch_randomness.take_states()
        self._checkpoints.save(progress)
        self._saved = self._consumed

    def _sync(self) -> None:
        """Bring the values of the variables up to date. On JAX they are elsewhere during an epoch."""
        _ = self.model


def _named(kind: str, variables: Any) -> dict[str, Any]:
    return {f"{kind}{number}": variable for number, variable in enumerate(variables)}


def checked(connection: Any, user: str) -> Connection:
    """Return `connection`, which the class `user` was given. Raise TypeError if it is not a Connection."""
    if isinstance(connection, Connection):
        return connection
    given = "a URL" if isinstance(connection, str) else "a dataset" if hasattr(connection, "__iter__") else ""
    raise TypeError(
        f"{user} was given {given or f'{connection!r:.80}'}, but needs the connection that the dataset comes from: "
        f"connection = penstock.connect(url); {user}(connection, ...); connection.keras() or connection.dataset()"
    )


def _check_unread(connection: Connection) -> None:
    """Raise ValueError if `fit` cannot begin at the stream's beginning, or the error that ended the stream."""
    handoff = connection._handle.handoff
    if connection.error is not None:
        raise connection.error
    if handoff.closed:
        raise StreamClosed(
            f"{connection} was closed: connect again, and give Resume the new connection", feed=connection.info.name
        )
    if connection._handle.shares:
        raise ValueError(
            "Resume was given a connection of a group, whose stream has no state, because chance decides which "
            "consumer gets a batch. Connect with rank= and world_size= instead"
        )
    if handoff.begun:
        raise ValueError(
            f"{connection} has been read already: give Resume a new connection, before its first batch, so that steps "
            "and batches are counted from the same place"
        )
    if handoff.consumed:
        raise ValueError(
            f"{connection} was given a state (after {handoff.consumed} batches): Resume keeps the state in its "
            "checkpoints and loads it itself, so connect without state="
        )
