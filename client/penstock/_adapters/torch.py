"""A stream as a PyTorch `IterableDataset`. Only this module imports PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset, get_worker_info

from .._stream.stream_handle import StreamHandle, datasets
from .numpy_batches import NumpyBatches


class TorchBatches(IterableDataset[Any]):  # type: ignore[misc]
    """The batches of a connection as tensors. Each iteration is one epoch of the stream, in order.

    Iterate over it, or pass it to `DataLoader(batches, batch_size=None)`. The loader must not have workers of its own
    (`num_workers=0`): Penstock's workers make the batches, and a loader's worker could not read the stream.

    A batch has the feed's structure of dicts and tuples (a `DataLoader` turns the tuples into lists). Its tensors have
    the dtypes and shapes of the feed's element spec, and alias the batch's memory, which is freed when they are gone.
    Text stays a NumPy array of objects, since PyTorch has no tensors of text.
    """

    def __init__(self, handle: StreamHandle) -> None:
        self._handle = handle
        datasets.add(handle)

    def __repr__(self) -> str:
        # Keras shows this if it is given to model.fit.
        return f"<PyTorch batches of {self._handle.handoff.url}; model.fit takes connection.keras() instead>"

    def __iter__(self) -> Iterator[Any]:
        """Begin the next epoch with the first `next`.

        Raises:
            RuntimeError: a DataLoader's worker iterates.
            TypeError: a DataLoader without `batch_size=None` iterates, which would make batches of batches.
            PenstockError: as `Connection.batches`.
        """
        if get_worker_info() is not None:
            raise RuntimeError(
                "a DataLoader's worker cannot read a Penstock connection: write DataLoader(batches, batch_size=None, "
                "num_workers=0). The feed has workers of its own"
            )
        if sys._getframe(1).f_locals.get("auto_collation"):  # the caller is torch's _IterableDatasetFetcher
            raise TypeError(
                "the feed makes the batches already, and this DataLoader would put them into batches of batches: write "
                "DataLoader(batches, batch_size=None)"
            )
        return map(_tensors, NumpyBatches(self._handle))

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches that were yielded, as `Connection.state_dict` does."""
        return self._handle.state(None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, as `Connection.load_state_dict` does."""
        self._handle.load(state)


class SizedTorchBatches(TorchBatches):
    """The batches of a connection whose epochs have a known number of batches. (Keras and others ask for `__len__`.)"""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        assert isinstance(self._handle.cardinality, int)
        return self._handle.cardinality


def _tensors(batch: Any) -> Any:
    """Return the batch with a tensor over each array."""
    if isinstance(batch, dict):
        return {key: _tensors(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(map(_tensors, batch))
    return _tensor(batch) if isinstance(batch, np.ndarray) else batch


def _tensor(array: npt.NDArray[Any]) -> Any:
    if array.dtype.kind == "O":
        return array
    if array.dtype.kind != "V":
        return torch.from_numpy(array)
    dtype = getattr(torch, array.dtype.name)  # a type of ml_dtypes, such as bfloat16
    return torch.from_numpy(array.view(np.dtype(f"u{array.itemsize}"))).view(dtype)
