"""tf.data in the trainer: `from_generator` for Python sources, and its own operations where it has them."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import sources
import tensorflow as tf
from sources import BATCH, PATHS, SAMPLES
from table import NONE, Cells

cells = Cells()


def spec(value: Any) -> Any:
    """Return the `tf.TensorSpec` of a sample. Only the caller knows which dimensions vary."""
    return tf.nest.map_structure(lambda leaf: tf.TensorSpec(np.shape(leaf), dtype(leaf)), value)


def dtype(leaf: Any) -> Any:
    return tf.string if isinstance(leaf, bytes) else np.asarray(leaf).dtype


def generated(make: Callable[[], Iterable[Any]], signature: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(make, output_signature=signature or spec(next(iter(make()))))


def batched(make: Callable[[], Iterable[Any]]) -> tf.data.Dataset:
    return generated(make).batch(BATCH).prefetch(tf.data.AUTOTUNE)


@cells()
def files() -> Iterable[Any]:
    return batched(lambda: sources.of_files(PATHS))


@cells()
def scenes() -> Iterable[Any]:
    return generated(sources.Scenes(sources.scene_files()).generate_data)


@cells()
def undivided() -> Iterable[Any]:
    signature = spec(sources.spectrum(np.int64(0)))
    types = [one.dtype for one in tf.nest.flatten(signature)]

    def spectrum(value: Any) -> Any:
        flat = tf.numpy_function(lambda one: tf.nest.flatten(sources.spectrum(one)), [value], types)
        for leaf, one in zip(flat, tf.nest.flatten(signature), strict=True):
            leaf.set_shape(one.shape)
        return tf.nest.pack_sequence_as(signature, flat)

    return generated(sources.readings).map(spectrum, num_parallel_calls=2).batch(BATCH)


@cells()
def indexed() -> Iterable[Any]:
    return batched(lambda: iter(sources.Table()))


@cells()
def torch_map() -> Iterable[Any]:
    from torch_sources import Rows

    rows = Rows()
    return batched(lambda: (rows[number] for number in range(len(rows))))


@cells()
def torch_iterable() -> Iterable[Any]:
    from torch_sources import Stream

    return batched(lambda: iter(Stream()))


@cells()
def keras_shuffled() -> Iterator[Any]:
    """Use Keras' own adapter: with `workers=1` it makes such a dataset and calls the methods of epochs."""
    from keras_sources import Shuffled

    yield from keras_epochs(Shuffled())


def keras_epochs(source: Any) -> Iterator[Any]:
    """Yield two epochs of a PyDataset, read as `fit` reads it."""
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(source, shuffle=False)
    dataset = adapter.get_tf_dataset()
    for _ in range(2):
        adapter.on_epoch_begin()
        yield from (batch[0] for batch in dataset)
        adapter.on_epoch_end()


@cells()
def keras_endless() -> Iterator[Any]:
    from keras_sources import Endless

    source = Endless()
    yield from generated(lambda: (source[number][0] for number in itertools.count()))


@cells()
def hdf5() -> Iterable[Any]:
    table = sources.OpenTable()
    return batched(lambda: (table[number] for number in range(len(table))))


def records() -> tf.data.Dataset:
    features = {"image": tf.io.FixedLenFeature((4, 4), tf.float32), "label": tf.io.FixedLenFeature((), tf.int64)}
    return (
        tf.data.Dataset.from_tensor_slices(sources.parts("*.tfrecord.gz"))
        .interleave(lambda path: tf.data.TFRecordDataset(path, "GZIP"), num_parallel_calls=tf.data.AUTOTUNE)
        .map(lambda one: tf.io.parse_single_example(one, features), num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
    )


@cells(native=True)
def tfrecord() -> Iterable[Any]:
    return records()


@cells(adapter="tf.data has no reader of Parquet: a generator around pyarrow")
def parquet() -> Iterable[Any]:
    return batched(lambda: sources.of_parquet(sources.parts("*.parquet")))


@cells(adapter="tf.data has no reader of tar files: a generator around `tarfile`")
def tar() -> Iterable[Any]:
    return batched(lambda: sources.of_tar(sources.parts("*.tar")))


@cells()
def notebook() -> Iterable[Any]:
    rows = sources.in_notebook()
    return batched(lambda: rows(PATHS))


def table(name: str) -> Callable[[], Iterator[Any]]:
    return lambda: iter(sources.Table(item=sources.STRUCTURES[name]))


for _name in ("nested", "text", "rare", "weights"):
    cells(_name)(lambda name=_name: batched(table(name)))


@cells()
def ragged() -> Iterable[Any]:
    return generated(table("ragged"), tf.TensorSpec((None,), tf.int32)).ragged_batch(BATCH)


@cells()
def buckets() -> Iterable[Any]:
    return bucketed(generated(table("buckets"), tf.TensorSpec((None,), tf.int32)))


def bucketed(dataset: tf.data.Dataset) -> tf.data.Dataset:
    bounds = [bound + 1 for bound in sources.BUCKETS]
    padded = dataset.bucket_by_sequence_length(tf.size, bounds, [BATCH] * 4, pad_to_bucket_boundary=True)
    return padded


@cells()
def rebatch() -> Iterable[Any]:
    signature = tf.nest.map_structure(lambda one: tf.TensorSpec((None, *one.shape), one.dtype), spec(sources.sample(0)))
    return generated(lambda: sources.of_batches(PATHS), signature).rebatch(BATCH)


cells.untried("same", NONE, "it has no workers")
cells.untried("same_random", NONE, "it has no workers")
cells.untried("killed", NONE, "it has no workers")


@cells(note="`tf.train.Checkpoint` refuses `from_generator`; `skip(n)` reads again from the start")
def resume() -> Iterator[Any]:
    """`tf.train.Checkpoint` of the iterator, as the guide says."""

    def begin() -> tuple[Any, tf.train.Checkpoint]:
        iterator = iter(batched(lambda: iter(sources.Table())))
        return iterator, tf.train.Checkpoint(iterator=iterator)

    first, saved = begin()
    yield from itertools.islice(first, 5)
    path = saved.save(str(sources.FOLDER / "checkpoint"))
    rest, restored = begin()
    restored.restore(path)
    yield from itertools.islice(rest, SAMPLES)
