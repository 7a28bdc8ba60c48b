"""Recognises, from the stack, why Keras reads data. Imports nothing of Keras.

Keras reads a batch before it trains, to learn the shapes that it builds the model with: on its JAX and PyTorch
backends, and under a `tf.distribute` strategy. Then it drops the iterator, and begins another one. No argument tells a
dataset why it is read, so the names of the functions that read are the only sign. They are Keras' own (3.8 to 3.15);
the tests run each backend, so they notice a version that renames them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_KERAS = "keras.src."
ARGUMENTS = ("y", "sample_weight", "class_weight", "steps_per_epoch")
_BUILD = {"_symbolic_build", "_maybe_symbolic_build", "get_tf_dataset"}
"""Functions of Keras that read batches only to learn their shapes. (`get_tf_dataset`: of data that is no tf.data.)"""
_PY_FUNCTIONS = "tensorflow.python.ops.script_ops"
"""The module that calls generators on threads of TensorFlow."""
_MAY_BUILD = {"keras.src.backend.jax.trainer", "keras.src.backend.numpy.trainer", "keras.src.backend.openvino.trainer"}
"""Modules whose `evaluate` and `predict` may read a batch in a loop of their own, if the model is not built yet."""


def builds_here() -> bool:
    """Return whether this thread reads only so that Keras can build a model."""
    return any(map(_builds, _frames(sys._getframe(1))))


def builds_somewhere() -> bool:
    """Return whether any thread reads so. TensorFlow runs generators on threads of its own."""
    threads = sys._current_frames()
    del threads[threading.get_ident()]  # this frame would refer to itself, and keep those of the other threads alive
    return any(_builds(frame) for stack in threads.values() for frame in _frames(stack))


def builds_beside_tensorflow() -> bool:
    """Return whether this is a thread of TensorFlow's while another one waits for data to build a model."""
    ours = any(f.f_globals.get("__name__") == _PY_FUNCTIONS for f in _frames(sys._getframe(1)))
    return ours and builds_somewhere()


def peeks() -> bool:
    """Return whether Keras takes the first two batches of a generator, to give them again in each epoch."""
    return any(f.f_code.co_name == "peek_and_restore" and _is_keras(f) for f in _frames(sys._getframe(1)))


def arguments() -> dict[str, Any] | None:
    """Return those of `fit`, `evaluate` or `predict` that concern the data, or None outside of these: called by a data
    adapter's `num_batches`, when Keras takes the adapter. (`steps_per_epoch` is called `steps` in the latter two, and
    `validation_steps` for validation data.)"""
    for frame in _frames(sys._getframe(2)):
        if _takes_data(frame):
            return {name: frame.f_locals.get(name) for name in ARGUMENTS}
    return None


def forget_length() -> None:
    """Let Keras forget the length of the epoch that just ended: called by a data adapter's `on_epoch_end`.

    If Keras does not know the length of an epoch, it takes that of the first one for all, and drops the rest of later
    ones. The first one is shorter after a resume, and the others may differ.
    """
    caller = sys._getframe(2)
    if caller.f_code.co_name == "catch_stop_iteration" and _is_keras(caller):
        caller.f_locals["self"]._num_batches = None


def check_length(url: str) -> None:
    """Raise ValueError if `fit` is about to take the rest of an epoch, of unknown length, for the length of all epochs.

    Called when such a stream is first read. It may be read on a thread of TensorFlow, while the main thread waits.
    """
    if any(map(_learns_length, _frames_of_main())):
        raise ValueError(
            f"{url}: the number of batches in an epoch is unknown, and the first iteration is the rest of an epoch, so "
            "fit would take its length for that of the next ones, and drop their ends. Give fit connection.keras(), or "
            "set Feed(samples=), or train this rest with a fit of its own"
        )


def waits_for_the_end() -> bool:
    """Return whether a `fit` is about to read until an epoch ends, since it does not know the number of its batches.

    Called when a stream of unknown length is first read, as `check_length`.
    """
    return any(
        frame.f_code.co_name == "fit" and _is_keras(frame) and frame.f_locals.get("steps_per_epoch") is None
        for frame in _frames_of_main()
    )


def hide_the_end() -> None:
    """Let Keras not warn that the input ran out of data: called by a data adapter's `num_batches`, when Keras takes the
    adapter of a stream whose length is unknown. Without `steps_per_epoch`, that is how an epoch ends."""
    for frame in _frames(sys._getframe(2)):
        if _takes_data(frame) and frame.f_locals.get("steps_per_epoch") is None:
            frame.f_locals["self"]._interrupted_warning = _nothing


def _learns_length(frame: FrameType) -> bool:
    """Return whether this is a `fit` that will take the length of its first epoch for that of the others."""
    if frame.f_code.co_name != "fit" or not _is_keras(frame):
        return False
    known = frame.f_locals
    data = known.get("epoch_iterator")
    if data is None or data.num_batches is not None or getattr(data.data_adapter, "forgets_length", False):
        return False
    return bool(known["epochs"] - known["initial_epoch"] > 1)


def _builds(frame: FrameType) -> bool:
    name = frame.f_code.co_name
    if name in _BUILD:
        return _is_keras(frame)
    if name in ("predict", "evaluate") and frame.f_globals.get("__name__") in _MAY_BUILD:
        return not all(layer.built for layer in frame.f_locals["self"]._flatten_layers())
    return False


def _takes_data(frame: FrameType) -> bool:
    """Return whether this is the function in which `fit`, `evaluate` or `predict` takes its data."""
    name = frame.f_globals.get("__name__")
    return frame.f_code.co_name == "__init__" and name == "keras.src.trainers.epoch_iterator"


def _nothing() -> None:
    pass


def _frames_of_main() -> Iterator[FrameType]:
    """Yield the frames of this thread, and of the main thread, which waits while a thread of TensorFlow reads."""
    yield from _frames(sys._getframe(1))
    main = threading.main_thread().ident or 0
    if main != threading.get_ident():
        yield from _frames(sys._current_frames()[main])


def _is_keras(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_KERAS)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
