"""A stream as a dataset for Keras, on any of its backends. Imports Keras, and TensorFlow only on that backend.

Keras lets a dataset be its own data adapter (Keras 3.8 or later). So ours says where an epoch ends, and `fit` trains on
the stream as it is: no indices to shuffle, and no length to guess. The rest of an adapter's work, which is to convert
batches for a backend and to apply `class_weight`, is left to Keras' adapters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from penstock_proto.spec import leaf_list, unflatten

from .._stream.renewed_error import renewed
from .._stream.stream_handle import StreamHandle, datasets
from . import keras_calls
from .numpy_batches import NumpyBatches

if TYPE_CHECKING:
    import tensorflow as tf
    from torch.utils.data import DataLoader


class KerasBatches(PyDatasetAdapter, keras.utils.PyDataset):  # type: ignore[misc]
    """The batches of a connection for Keras. Made by `Connection.keras`."""

    forgets_length = True  # see on_epoch_end

    def __init__(
        self, handle: StreamHandle, dataset: Callable[[], tf.data.Dataset], map: Callable[[Any], Any] | None
    ) -> None:
        """Read the stream of `handle`. `dataset`: returns it as TensorFlow's dataset. `map`: see `Connection.keras`."""
        keras.utils.PyDataset.__init__(self)
        # Not the adapter's __init__: it refers to its dataset, and the cycle would keep the connection open.
        self.class_weight: dict[int, float] | None = None
        self._handle = handle
        self._dataset = dataset
        datasets.add(handle)
        self._map = map
        self._reading: Iterator[Any] | None = None
        if map is None:
            spec = handle.views.spec
            _check_parts(unflatten(spec, leaf_list(spec)), f"a sample of feed {handle.info.name}")
            if keras.backend.backend() != "tensorflow":
                _check_leaves(handle)

    def __repr__(self) -> str:
        return f"<Keras batches of {self._handle.handoff.url}>"

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches of the stream's next epoch, as NumPy arrays."""
        self._handle.reads_ahead = True
        reading, length = NumpyBatches(self._handle), self._handle.cardinality
        for taken, batch in enumerate(reading, 1):
            epoch = reading.epoch
            if isinstance(length, int) and epoch is not None and taken + self._handle.behind(epoch) == length:
                for _ in reading:  # Keras asks for no more, and the end of the epoch has to be checked
                    raise renewed(self._handle.handoff.lose_too_long(epoch, length))
            yield batch if self._map is None else _arranged(self._map, batch)

    def __getitem__(self, index: int) -> Any:
        """Return the next batch of the stream, whatever the index is. `fit` does not use it: it reads whole epochs."""
        while True:
            if self._reading is None:
                self._reading = iter(self)
            for batch in self._reading:
                return batch
            self._reading = None

    # --- called by Keras ---

    @property
    def num_batches(self) -> int | None:
        """The number of batches in an epoch, or None if it is unknown or epochs have no end."""
        arguments = keras_calls.arguments()
        if arguments is not None:
            self.class_weight = arguments["class_weight"]
            for name in ("y", "sample_weight"):
                if arguments[name] is not None:
                    raise ValueError(
                        f"{name}= cannot be given together with a dataset of Penstock: a batch is (x, y) or (x, y, "
                        "sample_weight), so let the feed yield them, or arrange them with connection.keras(map)"
                    )
            if self._handle.cardinality == math.inf and arguments["steps_per_epoch"] is None:
                raise ValueError(
                    f"{self._handle.handoff.url}: the stream has no end, so fit needs steps_per_epoch= (and "
                    "validation_steps=, if this is its validation data), and evaluate and predict need steps="
                )
        if self._handle.cardinality is None:
            keras_calls.hide_the_end()
            self._handle.length_told = True
        batches = self._handle.cardinality
        return batches if isinstance(batches, int) else None

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Return the connection's dataset, which TensorFlow reads without copies."""
        from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

        dataset, arrange = self._dataset(), self._map
        if arrange is not None:
            bare = not isinstance(dataset.element_spec, tuple)
            dataset = dataset.map(lambda *batch: _tuples(_arranged(arrange, batch[0] if bare else batch)))
        return TFDatasetAdapter(dataset, class_weight=self.class_weight).get_tf_dataset()

    def get_torch_dataloader(self) -> DataLoader[Any]:
        """Return a DataLoader. Each iteration over Keras' own draws a random number, and a resumed `fit` has fewer."""
        from . import torch_randomness

        loader: DataLoader[Any] = super().get_torch_dataloader()
        torch_randomness.leave_alone(loader)
        return loader

    def _get_iterator(self) -> Iterator[Any]:
        for batch in self:
            yield self._standardize_batch(batch)

    def _standardize_batch(self, batch: Any) -> Any:
        # Keras takes x alone only if it is an array of NumPy's, and `map` may return a tensor of the backend.
        return super()._standardize_batch(batch if isinstance(batch, tuple | list | dict) else (batch,))

    def on_epoch_begin(self) -> None:
        """Do nothing: an epoch begins with its first batch."""

    def on_epoch_end(self) -> None:
        """Let Keras forget the length of this epoch if lengths are unknown, because others may be longer."""
        if not isinstance(self._handle.cardinality, int):
            keras_calls.forget_length()


def _arranged(map: Callable[[Any], Any], batch: Any) -> Any:
    made = map(batch)
    _check_parts(made, "what the function of connection.keras(map) returned")
    return made


def _tuples(batch: Any) -> Any:
    """Return the batch with tuples in place of lists. (A `tf.data.Dataset` would make one tensor of a list.)"""
    if isinstance(batch, dict):
        return {key: _tuples(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_tuples, batch))
    return tuple(map(_tuples, batch)) if isinstance(batch, list | tuple) else batch


def _check_parts(batch: Any, source: str) -> None:
    """Raise ValueError if Keras cannot take this as a batch."""
    if batch is None:
        raise ValueError(f"{source} is None: did you forget to `return` the batch?")
    if isinstance(batch, tuple | list) and len(batch) not in (1, 2, 3):
        raise ValueError(
            f"{source} has {len(batch)} parts, but a batch for Keras is x, (x, y) or (x, y, sample_weight). Arrange it "
            "with connection.keras(map). If x has several arrays, make it a dict, or a tuple of its own"
        )


def _check_leaves(handle: StreamHandle) -> None:
    """Raise ValueError if a leaf is of a kind that only TensorFlow has."""
    for leaf in leaf_list(handle.views.spec):
        if leaf.text or leaf.ragged:
            kind, fix = ("text", "turn it into numbers") if leaf.text else ("ragged", 'give the feed batching="pad"')
            raise ValueError(
                f"feed {handle.info.name}: {leaf} is {kind}, which Keras has no tensors for on the "
                f"{keras.backend.backend()} backend: {fix}, or leave it out with connection.keras(map)"
            )
