"""A pipeline in the forms that loaders take: a stream of samples, a stream of stacked batches, and samples by
number."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from pipelines_feeds import PIPELINES

EPOCH = 64 * 2000  # batches


def stacked(samples: list[Any]) -> Any:
    """Stack these samples into a batch, by np.stack."""
    if isinstance(samples[0], dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
    return np.stack(samples)


def leaves(batch: Any) -> list[np.ndarray]:
    """The arrays of a batch, which is a dict or tuple of tensors or arrays, or a single one."""
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else None
    return [np.asarray(batch)] if parts is None else [leaf for part in parts for leaf in leaves(part)]


def summed(batch: Any) -> list[list[Any]]:
    """Shape, dtype and sum of each leaf, as plain JSON."""
    return [[list(leaf.shape), str(leaf.dtype), float(leaf.sum(dtype=np.float64))] for leaf in leaves(batch)]


def batch(name: str, number: int) -> Any:
    """Batch `number` of the pipeline."""
    pipeline = PIPELINES[name]
    return stacked([pipeline.sample(i) for i in range(number * pipeline.batch, (number + 1) * pipeline.batch)])


def sample_stream(name: str) -> Iterator[Any]:
    return map(PIPELINES[name].sample, range(EPOCH * PIPELINES[name].batch))


def batch_stream(name: str) -> Iterator[Any]:
    return (batch(name, number) for number in range(EPOCH))


class Samples:
    """An epoch's samples by number, for loaders with an index. Pickled by name: a worker imports the user code."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return EPOCH * PIPELINES[self._name].batch

    def __getitem__(self, number: int) -> Any:
        return PIPELINES[self._name].sample(number)


def tensor_spec(value: Any, *, batched: bool = False) -> Any:
    """The `tf.TensorSpec` of a sample, or of a batch, with the number of rows left open, as `.batch` does."""
    import tensorflow as tf

    if isinstance(value, dict):
        return {key: tensor_spec(leaf, batched=batched) for key, leaf in value.items()}
    return tf.TensorSpec((None, *value.shape[1:]) if batched else value.shape, value.dtype)
