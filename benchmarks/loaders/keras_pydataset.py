"""Keras `PyDataset` with processes, read as `fit` reads it.

`fit` wraps one in a `PyDatasetAdapter`, which starts the pool, queues `max_queue_size` batches (10, the default) and
makes the `tf.data.Dataset` that `fit` iterates over. By default, and as Keras's documentation says, the pool is forked
from the trainer, in which TensorFlow already runs. That can hang.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaders import WORKERS


@contextmanager
def batches(name: str) -> Iterator[Any]:
    import keras
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    from loaders.samples import EPOCH, batch

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return EPOCH

        def __getitem__(self, number: int) -> Any:
            return (batch(name, number),)

    adapter = PyDatasetAdapter(Batches(workers=WORKERS, use_multiprocessing=True), shuffle=False)
    adapter.on_epoch_begin()
    try:
        yield adapter.get_tf_dataset()
    finally:
        adapter.on_epoch_end()
