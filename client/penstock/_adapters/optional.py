"""Checks that a library is installed that only some trainers need, before anything is started for it."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec


def check_tensorflow(user: str) -> None:
    """Raise ImportError if TensorFlow is not installed. `user`: what needs it, the beginning of the error."""
    if find_spec("tensorflow") is None:
        raise ImportError(
            f"{user} needs TensorFlow, which is not installed here: run pip install tensorflow. A connection also has "
            "keras() for Keras, torch() for PyTorch, and batches() for NumPy and JAX",
            name="tensorflow",
        )


def check_outside_of_functions(user: str) -> None:
    """Raise RuntimeError in a function that TensorFlow traces, such as that of `Dataset.interleave`. `user`: what was
    called there, the beginning of the error."""
    inside_function = getattr(sys.modules.get("tensorflow"), "inside_function", None)
    if inside_function is not None and inside_function():
        raise RuntimeError(
            f"{user} was called in a function that TensorFlow traces (of Dataset.interleave, flat_map or map, or a "
            "tf.function). TensorFlow runs such a function once, not once for each element, so all elements would "
            "read one stream. Call it outside of the function. A feed interleaves its splits by itself: "
            "Feed(..., shuffle=Shuffle(SAMPLES, interleave=N)). For several feeds, serve Feed.mix(...), or make a "
            "dataset of each and give the list to tf.data.Dataset.sample_from_datasets"
        )


def check_torch() -> None:
    """Raise ImportError if PyTorch is not installed."""
    if find_spec("torch") is None:
        raise ImportError("connection.torch() needs PyTorch, which is not installed here", name="torch")


def check_keras() -> None:
    """Raise ImportError if Keras cannot be imported."""
    try:
        importlib.import_module("keras")
    except ModuleNotFoundError as error:
        if error.name == "keras":
            raise ImportError("Keras is not installed here: run pip install keras", name="keras") from None
        raise ImportError(
            f"Keras cannot be imported, because its backend needs {error.name}, which is not installed here: install "
            "it, or set the environment variable KERAS_BACKEND to a backend that is installed (tensorflow, jax, torch)",
            name=error.name,
        ) from None
