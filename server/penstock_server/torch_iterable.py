"""A torch `IterableDataset` as a generator function that is divided among lanes.

Such a dataset divides itself with `torch.utils.data.get_worker_info()`, which here tells it the lane and the number of
lanes. A dataset that never asks would yield all its samples in every lane, so it is refused if there are several lanes.
This file does not import torch: the dataset has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock_proto import FeedError

from .indexables import as_structure


class _Info:
    """The result of `get_worker_info()`: torch's own attributes, and whether the dataset has read them."""

    def __init__(self, lane: int, lanes: int, dataset: Any) -> None:
        self.asked = False
        self._id, self._num_workers = lane, lanes
        self.dataset = dataset

    @property
    def id(self) -> int:
        """The lane."""
        self.asked = True
        return self._id

    @property
    def num_workers(self) -> int:
        """The number of lanes."""
        self.asked = True
        return self._num_workers

    @property
    def seed(self) -> int:
        """A seed for this lane, as in torch. It comes from the states that Penstock seeds."""
        module: Any = sys.modules["torch"]
        return int(module.initial_seed())


class TorchIterable:
    """A generator function, with the parameter `shard`, that reads one lane of a torch `IterableDataset`."""

    def __init__(self, dataset: Any) -> None:
        self.__name__ = type(dataset).__name__
        self._dataset = dataset

    def __call__(self, shard: tuple[int, int], epoch: int) -> Iterator[Any]:
        """Yield the lane's samples.

        Raises:
            FeedError: the dataset does not divide itself, or can only be read once.
        """
        lane, lanes = shard
        info = _Info(lane, lanes, self._dataset)
        with _told(info):
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(epoch)
            samples = iter(self._dataset)
        if samples is self._dataset:
            raise FeedError(
                f"{self.__name__}.__iter__ returns the dataset itself, so it can be read only once, and by one lane: "
                "let __iter__ be a generator function, or return a new iterator each time"
            )
        while True:
            with _told(info):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            if lanes > 1 and not info.asked:
                raise FeedError(
                    f"{self.__name__} does not divide itself: its __iter__ never reads the id and num_workers of "
                    f"torch.utils.data.get_worker_info(), so each of {lanes} lanes would yield all of its samples. "
                    "Divide it there, as torch's documentation of IterableDataset shows, or give Feed(lanes=1), with "
                    "which one worker reads it all"
                )
            yield as_structure(sample)


@contextmanager
def _told(info: _Info) -> Iterator[None]:
    """Let `get_worker_info()` return `info` within this block. Lanes take turns in one process, so use it for one call
    at a time."""
    worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if worker is None or not hasattr(worker, "_worker_info"):
        raise FeedError(
            "this version of torch keeps its worker information elsewhere, so its IterableDataset cannot be divided: "
            "read the dataset in a generator function that takes shard, and yield every count-th sample from index on"
        )
    before, worker._worker_info = worker._worker_info, info
    try:
        yield
    finally:
        worker._worker_info = before
