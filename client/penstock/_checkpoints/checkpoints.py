"""Checkpoints in files of NumPy arrays, for `Resume` on backends of Keras other than TensorFlow.

`tf_checkpoints.py` has the same interface, with TensorFlow's checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zipfile
from typing import Any

import keras
import numpy as np

_NAME = re.compile(r"ckpt-(\d+)\.npz")
_PROGRESS = "progress"


class FileCheckpoints:
    """The checkpoints in a directory, each a file `ckpt-NUMBER.npz` with the variables and the progress of `fit`.

    A checkpoint is written under another name, and gets its own name when it is complete.
    """

    def __init__(self, directory: str, keep: int) -> None:
        """Create the directory if it does not exist.

        Raises:
            OSError: it cannot be written.
            ValueError: it holds checkpoints of the TensorFlow backend.
        """
        self._directory, self._keep = directory, keep
        self._variables: dict[str, Any] = {}
        probe = os.path.join(directory, f".penstock-{os.getpid()}")
        try:
            os.makedirs(directory, exist_ok=True)
            with open(probe, "w"):
                pass
            os.remove(probe)
        except OSError as error:
            raise OSError(f"cannot save checkpoints in {directory!r}: {error.strerror}") from None
        if any(name.endswith(".index") for name in os.listdir(directory)):
            raise ValueError(
                f"{directory} has checkpoints of Keras' TensorFlow backend, which {keras.backend.backend()} cannot "
                "continue: give Resume another directory"
            )

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint, or None."""
        numbers = self._numbers()
        return self._path(numbers[-1]) if numbers else None

    def progress(self, path: str) -> dict[str, Any]:
        """Return the progress of `fit` in a checkpoint.

        Raises:
            ValueError: it is damaged, or `Resume` did not write it.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                progress: dict[str, Any] = json.loads(str(arrays[_PROGRESS]))
        except (KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is damaged, or was not written by penstock.keras.Resume: {error}") from None
        return progress

    def track(self, variables: dict[str, Any]) -> None:
        """Save and restore these Keras variables, by name."""
        self._variables = variables

    def restore(self, path: str) -> None:
        """Assign the values in a checkpoint to the variables, which have the same names and shapes."""
        with np.load(path, allow_pickle=False) as arrays:
            for name, variable in self._variables.items():
                value = arrays[name]
                if value.dtype.kind == "V":  # a type that NumPy's files do not name, such as bfloat16
                    value = value.view(keras.ops.convert_to_numpy(variable.value).dtype)
                variable.assign(value)

    def save(self, progress: dict[str, Any]) -> None:
        """Save a checkpoint, then delete the oldest ones."""
        numbers = self._numbers()
        numbers.append(numbers[-1] + 1 if numbers else 1)
        path = self._path(numbers[-1])
        arrays: dict[str, Any] = {
            name: keras.ops.convert_to_numpy(variable.value) for name, variable in self._variables.items()
        }
        arrays[_PROGRESS] = np.asarray(json.dumps(progress))
        unfinished = f"{path}.{os.getpid()}"
        with open(unfinished, "wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        for number in numbers[: -self._keep]:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path(number))

    def _numbers(self) -> list[int]:
        found = map(_NAME.fullmatch, os.listdir(self._directory))
        return sorted(int(match[1]) for match in found if match is not None)

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"ckpt-{number}.npz")
