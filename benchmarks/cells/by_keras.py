"""Keras' `PyDataset` with `workers=2, use_multiprocessing=True`, read through the adapter that `fit` uses.

A source that is not a PyDataset is wrapped in one, which makes batch `number` from the samples with that batch's
indices.
"""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import sources
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from sources import BATCH, SAMPLES
from table import ERROR, REWRITE, Cells

cells = Cells()
BY_INDEX = "a PyDataset around it, which stacks the samples of a batch"


class Batches(keras.utils.PyDataset):
    """Batches of anything that can be indexed."""

    def __init__(self, rows: Any, stack: Callable[[list[Any]], Any], workers: int) -> None:
        super().__init__(workers=workers, use_multiprocessing=True)
        self.rows, self.stack = rows, stack

    def __len__(self) -> int:
        return -(-len(self.rows) // BATCH)

    def __getitem__(self, number: int) -> Any:
        first = number * BATCH
        batch = self.stack([self.rows[row] for row in range(first, min(first + BATCH, len(self.rows)))])
        return batch if isinstance(batch, tuple) else (batch,)


def read(source: keras.utils.PyDataset, epochs: int = 1) -> Iterator[Any]:
    """Read a PyDataset as `fit` does. Batches of one leaf or dict come as tuples of one, which Keras takes apart."""
    adapter = PyDatasetAdapter(source, shuffle=False)
    dataset = adapter.get_tf_dataset()  # this asks for two batches, and then `fit` begins the epoch
    for _ in range(epochs):
        adapter.on_epoch_begin()
        for batch in dataset:
            yield batch[0] if len(batch) == 1 else batch
        adapter.on_epoch_end()


def over(rows: Any, stack: Callable[[list[Any]], Any] = sources.stacked, workers: int = 2) -> Iterator[Any]:
    return read(Batches(rows, stack, workers))


WITHOUT_INDEX = "a PyDataset makes batch *i* for any *i*, which a generator cannot"
for _name in ("files", "undivided", "torch_iterable", "notebook", "rebatch"):
    cells.untried(_name, REWRITE, WITHOUT_INDEX)
for _name in ("tfrecord", "tar"):
    cells.untried(_name, REWRITE, "Keras has no reader, and these files have no index: batch *i* cannot be found")


class Drawn(keras.utils.PyDataset):
    """Each worker runs the generator, whatever batch Keras asks for."""

    num_batches = None

    def __init__(self) -> None:
        super().__init__(workers=2, use_multiprocessing=True)
        self.generator = None

    def __getitem__(self, number: int) -> Any:
        if self.generator is None:
            self.generator = sources.Scenes(sources.scene_files()).generate_data()
        return next(self.generator)


@cells(adapter="a PyDataset without a length, whose `__getitem__` ignores the index")
def scenes() -> Iterator[Any]:
    return read(Drawn())


@cells(adapter=BY_INDEX)
def indexed() -> Iterator[Any]:
    return over(sources.Table())


@cells(adapter=BY_INDEX)
def torch_map() -> Iterator[Any]:
    import torch
    from torch_sources import Rows

    return over(Rows(), lambda rows: torch.utils.data.default_collate(rows))


@cells()
def keras_shuffled() -> Iterator[Any]:
    from keras_sources import Shuffled

    return read(Shuffled(workers=2, use_multiprocessing=True), epochs=2)


@cells()
def keras_endless() -> Iterator[Any]:
    from keras_sources import Endless

    return read(Endless(workers=2, use_multiprocessing=True))


@cells(adapter=BY_INDEX)
def hdf5() -> Iterator[Any]:
    return over(sources.OpenTable())


class Groups:
    """Rows of Parquet files by number, as a user would write it: find the row group, read it, keep it."""

    def __init__(self) -> None:
        self.paths, self.part = sources.parts("*.parquet"), None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        part, row = divmod(number, SAMPLES // len(self.paths))
        if self.part != part:
            import pyarrow.parquet

            self.part, self.table = part, pyarrow.parquet.read_table(self.paths[part], use_threads=False)
        sources.made()
        return {name: self.table[name].to_numpy()[row] for name in ("value", "label")}


@cells(note="the pool is forked from a process that has used pyarrow, since Keras first asks for two batches")
def parquet() -> Iterator[Any]:
    return over(Groups())


def structure(name: str) -> sources.Table:
    return sources.Table(item=sources.STRUCTURES[name])


for _name in ("nested", "rare", "weights"):
    cells(_name)(lambda name=_name: over(structure(name)))


@cells(adapter="your PyDataset makes a `tf.constant` of the texts, as NumPy's objects are refused")
def text() -> Iterator[Any]:
    import tensorflow as tf

    def stack(rows: list[Any]) -> Any:
        return {"text": tf.constant([row["text"] for row in rows]), "label": np.stack([row["label"] for row in rows])}

    return over(structure("text"), stack)


@cells()
def ragged() -> Iterator[Any]:
    import tensorflow as tf

    return over(structure("ragged"), tf.ragged.stack)


class Buckets(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__(workers=2, use_multiprocessing=True)
        self.batches = list(sources.by_bucket(range(SAMPLES)))

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> Any:
        return (sources.padded([sources.ragged(row) for row in self.batches[number]]),)


@cells(note="Keras takes the shape of the first two batches for that of all; here both belong to one bucket")
def buckets() -> Iterator[Any]:
    return read(Buckets())


@cells()
def same(workers: int) -> Iterator[Any]:
    return over(sources.Table(), workers=workers)


@cells()
def same_random(workers: int) -> Iterator[Any]:
    keras.utils.set_random_seed(0)
    return over(sources.Table(item=sources.augmented), workers=workers)


cells.untried("resume", ERROR, "it has no state; `fit(initial_epoch=)` begins at an epoch")


@cells()
def killed() -> Iterator[Any]:
    for number, batch in enumerate(over(sources.Table(sources.LONG))):
        if number == 3:
            os.kill(sources.a_maker(), signal.SIGKILL)
        yield batch
