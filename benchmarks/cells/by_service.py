"""tf.data service: a dispatcher and workers, each in a separate process, with dynamic sharding.

Python sources are given as in tf.data, by `from_generator`. Rows about structures have their samples in arrays in
memory (`from_tensor_slices`), since any source can carry a structure.
"""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import by_tfdata
import sources
import tensorflow as tf
from sources import BATCH, SAMPLES
from table import Cells

cells = Cells()
STAYS = "`from_generator` cannot be sent to another process"
SERVER = """
import sys, tensorflow as tf
service = tf.data.experimental.service
if len(sys.argv) == 1:
    server = service.DispatchServer(service.DispatcherConfig(port=0))
    print(server.target, flush=True)
else:
    server = service.WorkerServer(service.WorkerConfig(sys.argv[1].partition("://")[2], port=0))
    print("ready", flush=True)
server.join()
"""


def start(*arguments: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, *arguments], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().strip()


def served(dataset: tf.data.Dataset, workers: int = 2) -> tuple[tf.data.Dataset, list[subprocess.Popen]]:
    """Return the dataset through a separate service, and the worker processes. They end with this process's group."""
    _, target = start()
    processes = [start(target)[0] for _ in range(workers)]
    sharding = tf.data.experimental.service.ShardingPolicy.DYNAMIC
    return dataset.apply(tf.data.experimental.service.distribute(sharding, target)), processes


def arrays(name: str) -> tf.data.Dataset:
    """Return all samples of a structure as arrays in memory."""
    return tf.data.Dataset.from_tensor_slices(sources.stacked(list(sources.Table(item=sources.STRUCTURES[name]))))


for _name in (
    "files",
    "scenes",
    "undivided",
    "indexed",
    "torch_map",
    "torch_iterable",
    "hdf5",
    "notebook",
    "rebatch",
    "parquet",
    "tar",
):
    cells(_name, note=STAYS)(lambda name=_name: served(by_tfdata.cells[name].read())[0])
for _name in ("nested", "text", "rare", "weights"):
    cells(_name, native=True)(lambda name=_name: served(arrays(name).batch(BATCH))[0])


@cells(note=STAYS)
def keras_shuffled() -> Iterable[Any]:
    from keras_sources import Shuffled

    source = Shuffled()
    return served(by_tfdata.generated(lambda: (source[number][0] for number in range(len(source)))))[0]


@cells(note=STAYS)
def keras_endless() -> Iterable[Any]:
    from keras_sources import Endless

    source = Endless()
    return served(by_tfdata.generated(lambda: (source[number][0] for number in itertools.count())))[0]


@cells(native=True)
def tfrecord() -> Iterable[Any]:
    return served(by_tfdata.records())[0]


def ragged_rows() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(tf.ragged.stack(list(sources.Table(item=sources.ragged))))


@cells(native=True)
def ragged() -> Iterable[Any]:
    return served(ragged_rows().batch(BATCH))[0]


@cells(native=True)
def buckets() -> Iterable[Any]:
    dataset = ragged_rows().map(lambda row: row)
    return served(by_tfdata.bucketed(dataset))[0]


def labels() -> tf.data.Dataset:
    """Return the samples of `Table`, made in the graph, so that a service can run it."""

    def sample(number: Any) -> Any:
        return {"image": tf.fill((4, 4), tf.cast(number, tf.float32)), "label": number}

    return tf.data.Dataset.range(SAMPLES).map(sample)


@cells(native=True)
def same(workers: int) -> Iterable[Any]:
    return served(labels().batch(BATCH), workers)[0]


@cells(native=True)
def same_random(workers: int) -> Iterable[Any]:
    """With stateless random numbers, as the guide recommends."""

    def noisy(row: Any) -> Any:
        return {"noise": tf.random.stateless_normal((4,), (0, row["label"])), "label": row["label"]}

    return served(labels().map(noisy).batch(BATCH), workers)[0]


@cells(note="an iterator of the service cannot be saved")
def resume() -> Iterator[Any]:
    def begin() -> tuple[Any, tf.train.Checkpoint]:
        iterator = iter(served(labels().batch(BATCH))[0])
        return iterator, tf.train.Checkpoint(iterator=iterator)

    first, saved = begin()
    yield from itertools.islice(first, 5)
    path = saved.save(str(sources.FOLDER / "checkpoint"))
    rest, restored = begin()
    restored.restore(path)
    yield from rest


@cells(native=True, note="nothing came for 30 s after the kill; a longer wait was not tried")
def killed() -> Iterator[Any]:
    dataset, processes = served(labels().repeat(5).batch(BATCH))
    for number, batch in enumerate(dataset):
        if number == 3:
            os.kill(processes[0].pid, signal.SIGKILL)
        yield batch
