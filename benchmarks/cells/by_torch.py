"""PyTorch's `DataLoader(num_workers=2)`, with its default way of starting workers (fork on Linux)."""

import itertools
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import sources
import torch
from judge import Rows
from sources import BATCH, PATHS, SAMPLES
from table import Cells
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

cells = Cells()
BY_WORKER = "an `IterableDataset` around it, which gives each worker its files by `get_worker_info()`"


class Shared(IterableDataset):
    """Runs a generator over this worker's share of the files, as PyTorch's documentation shows."""

    def __init__(self, generator: Callable[..., Any], paths: list[str]) -> None:
        self.generator, self.paths = generator, paths

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return self.generator(self.paths[info.id :: info.num_workers])


def load(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": BATCH, "num_workers": 2, **options})


@cells(adapter=BY_WORKER)
def files() -> Iterable[Any]:
    return load(Shared(sources.of_files, PATHS))


class Drawn(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return sources.Scenes(sources.scene_files()).generate_data()


@cells(adapter="an `IterableDataset` around it, of three lines")
def scenes() -> Iterable[Any]:
    return load(Drawn(), batch_size=None)


class Spectra(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return map(sources.spectrum, itertools.islice(sources.readings(), info.id, None, info.num_workers))


@cells(adapter="an `IterableDataset` around both: each worker runs the generator and transforms its share")
def undivided() -> Iterable[Any]:
    return load(Spectra())


@cells()
def indexed() -> Iterable[Any]:
    return load(sources.Table())


@cells()
def torch_map() -> Iterable[Any]:
    from torch_sources import Rows

    return load(Rows())


@cells()
def torch_iterable() -> Iterable[Any]:
    from torch_sources import Stream

    return load(Stream())


@cells(adapter="your loop calls `on_epoch_end`")
def keras_shuffled() -> Iterator[Any]:
    from keras_sources import Shuffled

    source = Shuffled()
    for _ in range(2):
        yield from (batch[0] for batch in load(source, batch_size=None))
        source.on_epoch_end()


@cells(adapter="`sampler=itertools.count()`")
def keras_endless() -> Iterator[Any]:
    from keras_sources import Endless

    yield from (batch[0] for batch in load(Endless(), batch_size=None, sampler=itertools.count()))


@cells()
def hdf5() -> Iterable[Any]:
    return load(sources.OpenTable())


def of_tfrecord(paths: list[str]) -> Iterator[Any]:
    from tfrecord.reader import tfrecord_loader

    for path in paths:
        features = {"image": "float", "label": "int"}
        for row in tfrecord_loader(path, None, features, compression_type="gzip"):
            yield sources.seen({"image": row["image"].reshape(4, 4), "label": np.int64(row["label"][0])})


@cells(adapter="an `IterableDataset` around the package `tfrecord`, which gives each worker its files")
def tfrecord() -> Iterable[Any]:
    return load(Shared(of_tfrecord, sources.parts("*.tfrecord.gz")))


@cells(adapter="no reader: an `IterableDataset` around pyarrow, which gives each worker its files")
def parquet() -> Iterable[Any]:
    return load(Shared(sources.of_parquet, sources.parts("*.parquet")))


@cells(adapter="by the package `webdataset`, which divides the shards by worker")
def tar() -> Iterator[Any]:
    import webdataset

    def sample(row: Any) -> Any:
        return sources.tar_sample({"npy": row["npy"], "json": row["json"]})

    dataset = webdataset.WebDataset(sources.parts("*.tar"), shardshuffle=False).map(sample)
    for batch in load(dataset):
        yield {key: leaf for key, leaf in batch.items() if key != "__key__"}  # the key that webdataset adds


@cells(adapter=BY_WORKER)
def notebook() -> Iterable[Any]:
    return load(Shared(sources.in_notebook(), PATHS))


def structure(name: str) -> Any:
    return sources.Table(item=sources.STRUCTURES[name])


for _name in ("nested", "text", "weights"):
    cells(_name)(lambda name=_name: load(structure(name)))


@cells(note="`default_collate` refuses NumPy's bfloat16; torch's own works, and so do complex64 and bool")
def rare() -> Iterable[Any]:
    return load(structure("rare"))


@cells(adapter="a `collate_fn` that keeps the rows as a list")
def ragged() -> Iterable[Any]:
    return load(structure("ragged"), collate_fn=Rows)


def padded(rows: list[Any]) -> torch.Tensor:
    return torch.from_numpy(sources.padded(rows))


@cells(adapter="a `batch_sampler` that sorts the rows by length, and a `collate_fn` that pads")
def buckets() -> Iterable[Any]:
    groups = list(sources.by_bucket(range(SAMPLES)))
    return DataLoader(structure("buckets"), batch_sampler=groups, collate_fn=padded, num_workers=2)


def rows_of(paths: list[str]) -> Iterator[Any]:
    from judge import rows

    for batch in sources.of_batches(paths):
        yield from rows(batch)


@cells(adapter=BY_WORKER + " and yields single rows")
def rebatch() -> Iterable[Any]:
    return load(Shared(rows_of, PATHS))


@cells()
def same(workers: int) -> Iterable[Any]:
    return load(sources.Table(), num_workers=workers)


@cells()
def same_random(workers: int) -> Iterable[Any]:
    torch.manual_seed(0)
    return load(sources.Table(item=sources.augmented), num_workers=workers)


@cells(adapter="by torchdata's `StatefulDataLoader`; `DataLoader` itself has no state")
def resume() -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    first = StatefulDataLoader(sources.Table(), BATCH, num_workers=2)
    yield from itertools.islice(first, 5)
    rest = StatefulDataLoader(sources.Table(), BATCH, num_workers=2)
    rest.load_state_dict(first.state_dict())
    yield from rest


@cells(note="`DataLoader worker exited unexpectedly`")
def killed() -> Iterator[Any]:
    for number, batch in enumerate(load(sources.Table(sources.LONG))):
        if number == 3:
            os.kill(sources.a_maker(), signal.SIGKILL)
        yield batch
