"""Grain's datasets with `mp_prefetch` and two worker processes."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import grain
import numpy as np
import sources
from absl import flags
from judge import Rows
from sources import BATCH, PATHS
from table import Cells

flags.FLAGS.mark_as_parsed()  # as `absl.app.run` does, under which Grain wants to run

cells = Cells()
READING = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
OF_FILES = "an `IterDataset` around it with an iterator of your own, and `InterleaveIterDataset` over the files"


def processes(dataset: grain.IterDataset, workers: int = 2) -> Iterator[Any]:
    return iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)))


def load(rows: Any, workers: int = 2, **options: Any) -> Iterator[Any]:
    """Read anything that can be indexed."""
    return processes(grain.MapDataset.source(rows).batch(BATCH, **options).to_iter_dataset(READING), workers)


class Generated(grain.DatasetIterator):
    """Runs a generator, and counts its items. A state is that count."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        super().__init__()
        self.make, self.count, self.generator = make, 0, make()

    def __next__(self) -> Any:
        self.count += 1
        return next(self.generator)

    def get_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_state(self, state: dict[str, int]) -> None:
        self.count, self.generator = state["count"], itertools.islice(self.make(), state["count"], None)


class Source(grain.IterDataset):
    """A generator as a dataset, as Grain's documentation says."""

    def __init__(self, generator: Callable[..., Iterator[Any]], *args: Any) -> None:
        super().__init__()
        self.generator, self.args = generator, args

    def __iter__(self) -> Generated:
        return Generated(lambda: iter(self.generator(*self.args)))


def of_files(generator: Callable[..., Iterator[Any]], paths: list[str]) -> Iterator[Any]:
    """Each worker reads its share of the files."""
    files = grain.MapDataset.source(paths).map(lambda path: Source(generator, [path]))
    return processes(grain.experimental.InterleaveIterDataset(files, cycle_length=4).batch(BATCH))


@cells(adapter=OF_FILES)
def files() -> Iterator[Any]:
    return of_files(sources.of_files, PATHS)


def scenes_of(worker: int) -> Iterator[Any]:
    return sources.Scenes(sources.scene_files()).generate_data()


@cells(adapter="an `IterDataset` around it with an iterator of your own, once for each worker")
def scenes() -> Iterator[Any]:
    runs = grain.MapDataset.range(2).map(lambda worker: Source(scenes_of, worker))
    return processes(grain.experimental.InterleaveIterDataset(runs, cycle_length=1))


def share(worker: int) -> Iterator[Any]:
    return map(sources.spectrum, itertools.islice(sources.readings(), worker, None, 2))


@cells(adapter="an `IterDataset` around both: each worker runs the generator and transforms its share")
def undivided() -> Iterator[Any]:
    runs = grain.MapDataset.range(2).map(lambda worker: Source(share, worker))
    return processes(grain.experimental.InterleaveIterDataset(runs, cycle_length=1).batch(BATCH))


@cells()
def indexed() -> Iterator[Any]:
    return load(sources.Table())


@cells()
def torch_map() -> Iterator[Any]:
    from torch_sources import Rows

    return load(Rows())


@cells(note="`Cannot slice IterDataset source`: it cannot be divided between processes")
def torch_iterable() -> Iterator[Any]:
    from torch_sources import Stream

    return processes(Source(Stream).batch(BATCH))


@cells(adapter="your loop calls `on_epoch_end`, and makes a dataset again for each epoch")
def keras_shuffled() -> Iterator[Any]:
    from keras_sources import Shuffled

    source = Shuffled()
    for _ in range(2):
        batches = processes(grain.MapDataset.source(source).to_iter_dataset(READING))
        yield from (batch[0] for batch in batches)
        source.on_epoch_end()


@cells(adapter="`MapDataset.range` of a large number, and a `map` that indexes the object")
def keras_endless() -> Iterator[Any]:
    from keras_sources import Endless

    source = Endless()
    yield from processes(grain.MapDataset.range(2**40).map(lambda number: source[number][0]).to_iter_dataset(READING))


@cells(note="an open file cannot be pickled for the processes that Grain spawns")
def hdf5() -> Iterator[Any]:
    return load(sources.OpenTable())


@cells(note="`TFRecordIterDataset` reads no compressed files")
def tfrecord() -> Iterator[Any]:
    def sample(record: bytes) -> Any:
        import tensorflow as tf

        features = {"image": tf.io.FixedLenFeature((4, 4), tf.float32), "label": tf.io.FixedLenFeature((), tf.int64)}
        return sources.seen({key: leaf.numpy() for key, leaf in tf.io.parse_single_example(record, features).items()})

    paths = grain.MapDataset.source(sources.parts("*.tfrecord.gz")).map(grain.experimental.TFRecordIterDataset)
    return processes(grain.experimental.InterleaveIterDataset(paths, cycle_length=4).map(sample).batch(BATCH))


@cells()
def parquet() -> Iterator[Any]:
    paths = grain.MapDataset.source(sources.parts("*.parquet")).map(grain.experimental.ParquetIterDataset)
    return processes(grain.experimental.InterleaveIterDataset(paths, cycle_length=4).map(sources.seen).batch(BATCH))


@cells(adapter="no reader: " + OF_FILES)
def tar() -> Iterator[Any]:
    return of_files(sources.of_tar, sources.parts("*.tar"))


@cells(adapter=OF_FILES)
def notebook() -> Iterator[Any]:
    return of_files(sources.in_notebook(), PATHS)


def structure(name: str) -> Any:
    return sources.Table(item=sources.STRUCTURES[name])


for _name in ("nested", "text", "rare", "weights"):
    cells(_name)(lambda name=_name: load(structure(name)))


@cells(adapter="a `batch_fn` that keeps the rows as a list")
def ragged() -> Iterator[Any]:
    return (Rows(batch) for batch in load(structure("ragged"), batch_fn=list))


@cells(adapter="a source of groups of rows by length, and a `map` that pads")
def buckets() -> Iterator[Any]:
    groups = list(sources.by_bucket(range(sources.SAMPLES)))
    dataset = grain.MapDataset.source(groups).map(lambda some: sources.padded([sources.ragged(row) for row in some]))
    return processes(dataset.to_iter_dataset(READING))


@cells(adapter=OF_FILES)
def rebatch() -> Iterator[Any]:
    files = grain.MapDataset.source(PATHS).map(lambda path: Source(sources.of_batches, [path]))
    batches = grain.experimental.InterleaveIterDataset(files, cycle_length=4)
    return processes(grain.experimental.RebatchIterDataset(batches, BATCH, drop_remainder=False))


@cells()
def same(workers: int) -> Iterator[Any]:
    return load(sources.Table(), workers)


@cells(adapter="`random_map`, which gives the function an `rng`")
def same_random(workers: int) -> Iterator[Any]:
    def augmented(number: int, rng: np.random.Generator) -> Any:
        sources.made()
        return {"noise": rng.normal(size=4), "label": np.int64(number)}

    dataset = grain.MapDataset.range(sources.SAMPLES).seed(0).random_map(augmented).batch(BATCH)
    return processes(dataset.to_iter_dataset(READING), workers)


@cells()
def resume() -> Iterator[Any]:
    first = load(sources.Table())
    yield from itertools.islice(first, 5)
    rest = load(sources.Table())
    rest.set_state(first.get_state())
    yield from rest


@cells(note="`Worker process was terminated unexpectedly`")
def killed() -> Iterator[Any]:
    for number, batch in enumerate(load(sources.Table(sources.LONG))):
        if number == 3:
            os.kill(sources.a_maker(), signal.SIGKILL)
        yield batch
