"""Datasets of Hugging Face and Grain that are no indexable objects, as generator functions.

They are recognized by their base classes, so this file imports none of these libraries.

- A `datasets.IterableDataset` has shards, which are divided among lanes. If PyTorch is installed, it is a torch
  `IterableDataset`, and divides itself (torch_iterable.py).
- A Grain `MapDataset` with a filter has no item at some indices. So the feed reads ranges of indices as splits.
- A Grain `IterDataset` cannot be divided. It begins again for each epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .indexables import length_of

_SPLITS = 256
"""Ranges of indices in an epoch of a filtered dataset."""


class ShardedDataset:
    """A generator function, with the parameter `shard`, that reads one lane of a `datasets.IterableDataset`."""

    def __init__(self, dataset: Any) -> None:
        self.__name__ = type(dataset).__name__
        self._dataset = dataset
        self.parts: int = dataset.num_shards

    def __call__(self, shard: tuple[int, int], epoch: int) -> Iterator[Any]:
        """Yield the lane's samples."""
        lane, lanes = shard
        count = min(lanes, self.parts)
        if lane < count:
            dataset = self._dataset.shard(num_shards=count, index=lane, contiguous=False)
            dataset.set_epoch(epoch)
            yield from dataset


class FilteredItems:
    """A generator function that yields the items at a range of indices, except for those that a filter leaves out."""

    def __init__(self, dataset: Any) -> None:
        self.__name__ = type(dataset).__name__
        self._dataset = dataset

    @property
    def splits(self) -> list[tuple[int, int]]:
        """The ranges."""
        length = length_of(self._dataset) or 0
        step = -(-length // _SPLITS) or 1
        return [(start, min(start + step, length)) for start in range(0, length, step)]

    def __call__(self, split: tuple[int, int]) -> Iterator[Any]:
        """Yield the items of a range."""
        for index in range(*split):
            item = self._dataset[index]
            if item is not None:
                yield item


class WholeDataset:
    """A generator function that yields all elements of a dataset that begins again when it is iterated over."""

    def __init__(self, dataset: Any) -> None:
        self.__name__ = type(dataset).__name__
        self._dataset = dataset

    def __call__(self) -> Iterator[Any]:
        """Yield the elements."""
        yield from self._dataset


def is_sharded(source: Any) -> bool:
    """Return whether `source` is an `IterableDataset` of Hugging Face."""
    return _is(source, "datasets", "IterableDataset")


def shards_of(source: Any) -> int | None:
    """Return the number of shards of a dataset of Hugging Face, or of a pipeline of webdataset. None: not known."""
    if is_sharded(source):
        return int(source.num_shards)
    if _is(source, "webdataset", "DataPipeline"):
        first = next(iter(getattr(source, "pipeline", ())), None)
        urls = getattr(first, "urls", None)
        if type(first).__name__ == "SimpleShardList" and isinstance(urls, list) and urls:
            return len(urls)
    return None


def is_filtered(source: Any) -> bool:
    """Return whether `source` is a `MapDataset` of Grain that leaves out elements, or is made of one."""
    if not _is(source, "grain", "MapDataset"):
        return False
    return type(source).__name__ == "FilterMapDataset" or any(map(is_filtered, getattr(source, "parents", ())))


def is_iterable(source: Any) -> bool:
    """Return whether `source` is an `IterDataset` of Grain."""
    return _is(source, "grain", "IterDataset")


def _is(source: Any, package: str, name: str) -> bool:
    return any(base.__name__ == name and base.__module__.partition(".")[0] == package for base in type(source).__mro__)
