"""The feeds of tests/test_golden.py: kinds that tests/data/stream_feeds.py does not have, because they read files or
keep a cache. Add feeds, but never change one: that would change its stream, or what is on disk for it.

Paths are relative to the daemon's folder, because they are part of the list of splits. `local://` makes a URL of a
file: the key of a cached split has a file's absolute path and time, but only the name of a URL.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from penstock_server import Cache, Feed, FixedLen, Shuffle, VarLen, Weights

CACHE = os.path.abspath("cache")
SIZES = [7, 0, 31, 1, 16, 24, 5, 12]
SPLITS = list(range(len(SIZES)))

# --- generators ---


def counted(split: int) -> Iterator[Any]:
    for i in range(SIZES[split]):
        yield {"id": np.int64(1000 * split + i), "x": np.full(3, 1000 * split + i, "float32")}


def drawn_globally(split: int) -> Iterator[Any]:
    for i in range(SIZES[split]):
        yield np.int64(1000 * split + i), np.random.random_sample(3)


def alone(epoch: int) -> Iterator[Any]:
    for i in range(83):
        yield np.int64(1000 * epoch + i)


def whole() -> Iterator[Any]:
    yield from map(np.int64, range(83))


def shared_out(shard: tuple[int, int]) -> Iterator[Any]:
    index, count = shard
    yield from map(np.int64, range(index, 83, count))


def endless(rng: np.random.Generator) -> Iterator[Any]:
    while True:
        yield rng.bit_generator.random_raw(2)


def batches(split: int) -> Iterator[Any]:
    for start in range(0, SIZES[split], 5):
        yield np.arange(1000 * split + start, 1000 * split + min(start + 5, SIZES[split]))


def kinds(split: Any, owned: Any = (), *, more: Any = None) -> Iterator[Any]:
    for i, value in enumerate((split, more, *owned, *(split if isinstance(split, list | tuple) else ()))):
        yield f"{i} {type(value).__name__}"


class Reader:
    def __init__(self, offset: int) -> None:
        self.offset = offset

    def rows(self, split: int) -> Iterator[Any]:
        for i in range(SIZES[split]):
            yield np.int64(self.offset + 1000 * split + i)


class Table:
    def __len__(self) -> int:
        return 103

    def __getitem__(self, i: int) -> Any:
        return np.int64(i)


def doubled(sample: Any, rng: np.random.Generator) -> Any:
    return sample, 2 * sample, np.uint64(rng.bit_generator.random_raw())


def reordered(sample: Any) -> Any:
    return sample[::-1]


# --- datasets of Keras and PyTorch, or stand-ins ---


class PyDataset:
    """A stand-in for that of Keras, which workers would need seconds to import."""

    @property
    def num_batches(self) -> Any:
        return len(self)  # type: ignore[arg-type]

    def on_epoch_begin(self) -> None:
        pass

    def on_epoch_end(self) -> None:
        pass


PyDataset.__module__ = "keras.src.trainers.data_adapters.py_dataset_adapter"

if importlib.util.find_spec("torch") is None:
    worker: Any = sys.modules.setdefault("torch.utils.data._utils.worker", ModuleType("worker"))
    worker._worker_info = None

    class Dataset:
        def __getitem__(self, index: int) -> Any:
            raise NotImplementedError

    class IterableDataset(Dataset):
        pass

    Dataset.__module__ = IterableDataset.__module__ = "torch.utils.data.dataset"

    def get_worker_info() -> Any:
        return worker._worker_info
else:
    from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Shuffled(PyDataset):
    """Shuffles its rows after each epoch with a generator of its own."""

    def __init__(self) -> None:
        self.x = np.arange(103)
        self.rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return 11

    def on_epoch_end(self) -> None:
        self.x = self.x[np.argsort(self.rng.bit_generator.random_raw(103))]

    def __getitem__(self, i: int) -> Any:
        rows = self.x[10 * i : 10 * i + 10]
        return [rows, rows * 2.0]


class Endless(PyDataset):
    num_batches = None

    def __getitem__(self, i: int) -> Any:
        return np.array([i, i]), np.random.random_sample(2)


class Items(Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 103

    def __getitem__(self, i: int) -> Any:
        return [np.array([i, i + 1]), [np.array([i]), 2.5]]


class Divided(IterableDataset):  # type: ignore[misc]
    """Divides itself, and counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        for i in range(info.id, 103, info.num_workers):
            yield np.int64(1000 * self.epoch + i)


# --- feeds ---

FEATURES = {
    "id": FixedLen((), "int64"),
    "x": FixedLen((3,), "float32", default=0.5),
    "more": VarLen("int64", pad_to=4, pad_value=-1, cap=True),
}
LEAVES = {"image": "image", "label": "label"}
SHARDS = {"image": "image.npy", "label": "cls"}

# Files.
hdf5 = Feed.from_hdf5("files/rows.h5", LEAVES, batch_size=8, lanes=3, turn=2, split_rows=12)
hdf5_shuffled = Feed.from_hdf5("files/rows.h5", ("label", "image"), batch_size=8, lanes=3, shuffle=48, split_rows=8)
parquet = Feed.from_parquet("files/rows.parquet", batch_size=8, lanes=3, turn=2)
parquet_pools = Feed.from_parquet("files/rows.parquet", ("label",), batch_size=4, lanes=6, shuffle=48, turn=2, seed=3)
arrow = Feed.from_files("files/rows.arrow", batch_size=8, lanes=3, turn=2)
npy = Feed.from_numpy("files/image.npy", batch_size=8, lanes=3, turn=2, split_rows=10, rows=(5, 93))
npy_together = Feed.from_numpy(
    {"image": "files/image.npy", "label": "files/label.npy"}, batch_size=8, lanes=3, turn=2, split_rows=10
)
npz = Feed.from_numpy("files/rows.npz", batch_size=8, lanes=3, turn=2, shuffle=32)
tfrecord = Feed.from_tfrecord("files/rows.tfrecord", FEATURES, batch_size=8, lanes=3, turn=2, split_bytes=900)
webdataset = Feed.from_webdataset("files/*.tar", SHARDS, batch_size=8, lanes=2, turn=2, shuffle=32)
zarr = Feed.from_zarr("files/rows.zarr", LEAVES, batch_size=8, lanes=3, turn=2)
json_lines = Feed.from_json_lines("files/rows.jsonl", batch_size=8, lanes=3, turn=2, shuffle=48)
csv = Feed.from_csv("files/rows.csv", batch_size=8, shuffle=100, seed=2)
folder = Feed.from_folder("files/classes", batch_size=8, shuffle=100, seed=2)
weighted = Feed(Table(), batch_size=8, weights=range(103), seed=2)
weighted_once = Feed(Table(), batch_size=8, weights=Weights(range(103), replacement=False), samples=60, seed=2)
urls = Feed.from_parquet(["local://files/rows.parquet"] * 2, batch_size=8, lanes=3, turn=2)

# A generator that is not divided, but transformed; transforms; a class with a method; batches of another size.
shared = Feed(alone, batch_size=8, lanes=3, turn=2, transform=doubled)
shared_shuffled = Feed(alone, batch_size=8, lanes=3, turn=2, transform=doubled, shuffle=32, seed=2)
transformed = Feed(shared_out, batch_size=8, lanes=3, turn=2, transform=[doubled, reordered], seed=3)
method = Feed(Reader, method="rows", args=(7,), splits=SPLITS, batch_size=8, lanes=3, turn=2)
rebatched = Feed(batches, splits=SPLITS, batch_size=None, rebatch=4, lanes=3)
in_blocks = Feed(Table(), batch_size=8, shuffle=Shuffle(24, block=8), turn=2, seed=4)

# Fast order with several lanes: only the rows of an epoch are published, not their order.
fast = Feed.from_parquet("files/rows.parquet", {"id": "label"}, batch_size=8, lanes=3, turn=2, order="fast")
fast_shuffled = Feed(counted, splits=SPLITS, batch_size=8, lanes=3, turn=2, order="fast", shuffle=32)

# Datasets.
keras = Feed(Shuffled(), batch_size=None)
keras_shuffled = Feed(Shuffled(), batch_size=None, shuffle=11, seed=3)
keras_endless = Feed(Endless(), batch_size=None)
torch_items = Feed(Items(), batch_size=8, shuffle=103)
torch_iterable = Feed(Divided(), batch_size=8, lanes=3, turn=2)

# Combined feeds.
_hdf5 = Feed.from_hdf5("files/rows.h5", LEAVES, batch_size=8, split_rows=12)
_npy = Feed.from_numpy({"image": "files/image.npy", "label": "files/label.npy"}, batch_size=8, split_rows=10)
_parquet = Feed.from_parquet("files/rows.parquet", "label", batch_size=8)
_url = Feed.from_parquet("local://files/rows.parquet", "label", batch_size=8)
_labels = Feed.from_hdf5("files/rows.h5", "label", batch_size=8, split_rows=20)
_counted = Feed(counted, splits=SPLITS, batch_size=8)
_method = Feed(Reader, method="rows", args=(7,), splits=SPLITS, batch_size=8)
_shared_out = Feed(shared_out, batch_size=8)
_endless = Feed(endless, segment=10, batch_size=8)
zipped_files = Feed.zip({"a": _hdf5, "b": _npy}, lanes=3, turn=2, uneven="allow", shuffle=32)
zipped_static = Feed.zip(_counted, _method, lanes=3, turn=2)
zipped_nested = Feed.zip(_parquet, Feed.zip(_parquet, _url), uneven="allow", lanes=2, turn=2)
zipped_items = Feed.zip(Feed(Table(), batch_size=8), Feed(Items(), batch_size=8), shuffle=103)
zipped_shards = Feed.zip(_shared_out, _shared_out, lanes=3, turn=2)
zipped_segments = Feed.zip(_endless, _endless, lanes=3, turn=2, seed=5)
mixed_files = Feed.mix({"a": _parquet, "b": _labels}, weights={"a": 2, "b": 1}, stop="all", lanes=3, shuffle=48, seed=2)
_pair = Feed.from_numpy("files/label.npy", batch_size=8, transform=lambda label: (label, np.uint64(1)))
_drawn = Feed(endless, segment=10, batch_size=8, transform=lambda raw: (np.int64(raw[0] % 100), raw[1]))
mixed_with_segments = Feed.mix({"a": _pair, "b": _drawn}, lanes=3, seed=2)

# Penstock's own classes, as splits and as arguments of a generator.
OWN = [FixedLen((3,), "float32", default=0.5), VarLen("int64", pad_to=4)]
own_values = Feed(kinds, splits=[*OWN, (OWN[0], {"both": OWN}), OWN * 2], batch_size=2, lanes=3, turn=2)

# With a cache.
cached = Feed(counted, splits=SPLITS, batch_size=8, lanes=3, shuffle=32, cache=CACHE)
cached_drawn = Feed(drawn_globally, splits=[2, 4], batch_size=8, lanes=2, cache=Cache(CACHE, version="2"))
cached_whole = Feed(whole, batch_size=8, lanes=3, turn=4, transform=doubled, cache=CACHE)
cached_shards = Feed(shared_out, batch_size=8, lanes=3, cache=CACHE)
cached_method = Feed(Reader, method="rows", args=(7,), splits=[2, 4], batch_size=8, lanes=2, cache=CACHE)
cached_own_values = Feed(
    kinds, args=(OWN,), kwargs={"more": OWN[0]}, splits=[OWN[0], (OWN[1], 5)], batch_size=2, lanes=2, cache=CACHE
)
cached_hdf5 = Feed.from_hdf5("local://files/rows.h5", LEAVES, batch_size=8, lanes=3, split_rows=24, cache=CACHE)
cached_parquet = Feed.from_parquet("local://files/rows.parquet", batch_size=8, lanes=3, cache=CACHE)
cached_parquet_leaf = Feed.from_parquet("local://files/rows.parquet", "label", batch_size=8, lanes=3, cache=CACHE)
cached_arrow = Feed.from_files("local://files/rows.arrow", batch_size=8, lanes=3, cache=CACHE)
cached_zarr = Feed.from_zarr("local://files/rows.zarr", LEAVES, batch_size=8, lanes=3, cache=CACHE)
cached_json_lines = Feed.from_json_lines("local://files/rows.jsonl", batch_size=8, lanes=3, cache=CACHE)
cached_npy = Feed.from_numpy("local://files/label.npy", batch_size=8, lanes=3, split_rows=32, cache=CACHE)
cached_npy_together = Feed.from_numpy(
    {"image": "local://files/image.npy", "label": "local://files/label.npy"},
    batch_size=8,
    lanes=3,
    split_rows=32,
    cache=CACHE,
)
cached_npz = Feed.from_numpy("local://files/rows.npz", ("label", "image"), batch_size=8, lanes=3, cache=CACHE)
cached_tfrecord = Feed.from_tfrecord("local://files/rows.tfrecord", FEATURES, batch_size=8, lanes=3, cache=CACHE)
cached_webdataset = Feed.from_webdataset(
    ["local://files/a.tar", "local://files/b.tar"], SHARDS, batch_size=8, lanes=2, cache=CACHE
)
_parquet_cached = Feed.from_parquet("local://files/rows.parquet", "label", batch_size=8, cache=CACHE)
_npy_cached = Feed.from_numpy("local://files/label.npy", batch_size=8, split_rows=32, cache=CACHE)
mixed_cached = Feed.mix({"a": _parquet_cached, "b": _npy_cached}, lanes=3, seed=2)
