"""A pipeline in the forms that loaders take: a stream of samples, a stream of stacked batches, and samples by
number."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
from pipelines_feeds import PIPELINES

EPOCH = 64 * 2000  # batches


def stacked(samples: list[Any]) -> Any:
    """Stack these samples into a batch with np.stack."""
    if isinstance(samples[0], dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    return np.stack(samples)


def leaves(batch: Any) -> list[np.ndarray]:
    """Return the arrays of a batch, which is a dict or tuple of tensors or arrays, or a single one."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else None
    return [np.asarray(batch)] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def summed(batch: Any) -> list[list[Any]]:
    """Return the shape, dtype and sum of each leaf, as plain JSON."""
    return [[list(leaf.shape), str(leaf.dtype), float(leaf.sum(dtype=np.float64))] for leaf in leaves(batch)]


@functools.lru_cache(2)
def permutation(window: int, size: int) -> list[int]:
    """Return the numbers below `size` in the order of this window."""
    return np.random.default_rng(window).permutation(size).tolist()


def sample(name: str, number: int) -> Any:
    """Return sample `number` of the pipeline's stream. A shuffled pipeline permutes the numbers in windows of
    `shuffle`, because a loader with an index need not hold samples to shuffle them."""
    pipeline = PIPELINES[name]
    if pipeline.shuffle:
        window, place = divmod(number, pipeline.shuffle)
        number = window * pipeline.shuffle + permutation(window, pipeline.shuffle)[place]
    return pipeline.sample(number)


def batch(name: str, number: int) -> Any:
    """Return batch `number` of the pipeline's stream."""
    rows = PIPELINES[name].batch
    return stacked([sample(name, i) for i in range(number * rows, (number + 1) * rows)])


def sample_stream(name: str) -> Iterator[Any]:
    """Yield the samples in order, even those of a shuffled pipeline: its loaders shuffle the samples that they
    receive."""
    return map(PIPELINES[name].sample, range(EPOCH * PIPELINES[name].batch))


def batch_stream(name: str) -> Iterator[Any]:
    return (batch(name, number) for number in range(EPOCH))


class Samples:
    """An epoch's samples by number, for loaders with an index. Pickled by name, so that a worker imports the user
    code."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return EPOCH * PIPELINES[self._name].batch

    def __getitem__(self, number: int) -> Any:
        return sample(self._name, number)


def tensor_spec(value: Any, *, batched: bool = False) -> Any:
    """Return the `tf.TensorSpec` of a sample or, with any number of rows as from `.batch`, of a batch."""
    import tensorflow as tf

    if isinstance(value, dict):
        return {key: tensor_spec(leaf, batched=batched) for key, leaf in value.items()}
    return tf.TensorSpec((None, *value.shape[1:]) if batched else value.shape, value.dtype)
