"""A torch `IterableDataset` as a generator function that is divided among lanes.

Such a dataset divides itself with `torch.utils.data.get_worker_info()`, which here tells it the lane and the number of
lanes. A dataset that never asks would yield all its samples in every lane, so it is refused if there are several lanes.

A dataset may change while it is read, for example to count its epochs. So each lane of each epoch reads a copy of its
own, as each worker of torch does. This file does not import torch: the dataset has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from types import GeneratorType
from typing import Any

from penstock_proto import FeedError
from penstock_proto.text import printable
from penstock_proto.value_text import shown

from .indexables import as_structure
from .iterables import shards_of
from .object_states import own_copy


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

    def explain(self, error: Exception) -> None:
        """Note in an error of the dataset how it was divided: perhaps it cannot be divided so often."""
        if self.asked and self._num_workers > 1:
            error.add_note(
                f"the dataset is divided for {self._num_workers} workers, one for each lane: give Feed(lanes=) if it "
                "has fewer parts"
            )

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

    @property
    def parts(self) -> int | None:
        """The number of its shards, or None if that is not known."""
        return shards_of(self._dataset)

    def __call__(self, shard: tuple[int, int], epoch: int) -> Iterator[Any]:
        """Yield the lane's samples.

        Raises:
            FeedError: the dataset does not divide itself, or can only be read once, or cannot be copied.
        """
        lane, lanes = shard
        parts = self.parts
        if parts is not None:
            lanes = min(lanes, parts)  # with more, libraries warn in each epoch, or raise
            if lane >= lanes:
                return
        dataset = self._copied(lanes)
        info = _Info(lane, lanes, dataset)
        with _told(info):
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
            samples = iter(dataset)
        if samples is dataset:
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

    def _copied(self, lanes: int) -> Any:
        """Return a copy of the dataset. If there is only one lane, it may share what cannot be copied."""
        try:
            dataset, shared = own_copy(self._dataset)
        except Exception as error:
            dataset, shared, reason = self._dataset, [self._dataset], printable(f" ({type(error).__name__}: {error})")
        else:
            reason = ""
        for value in shared if lanes > 1 else ():
            if value is self._dataset or isinstance(value, GeneratorType | IOBase):
                holds = "" if value is self._dataset else f" holds {shown(value)}, which"
                raise FeedError(
                    f"{self.__name__}{holds} cannot be copied{reason}, and each of {lanes} lanes needs a dataset of "
                    "its own, as each worker of torch does: open files and start generators in __iter__, or give "
                    "Feed(lanes=1)"
                )
        return dataset


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
    except Exception as error:
        info.explain(error)
        raise
    finally:
        worker._worker_info = before
