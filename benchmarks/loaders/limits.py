"""What no loader exceeds, and the unit of the comparison. Not one of them has a process or a thread of its own."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

COPIES = 12  # batches that are copied in turn, as in transport.py, so that large ones come from memory, not cache


@contextmanager
def copies(name: str) -> Iterator[Iterator[Any]]:
    """One thread's memcpy of a batch, all leaves of it in one piece."""
    from loaders.samples import batch, leaves

    size = sum(leaf.nbytes for leaf in leaves(batch(name, 0)))
    sources, targets = ([np.ones(size, np.uint8) for _ in range(COPIES)] for _ in range(2))

    def copied() -> Iterator[np.ndarray]:
        for target, source in itertools.cycle(zip(targets, sources, strict=True)):
            np.copyto(target, source)
            yield target

    yield copied()


@contextmanager
def constant(name: str) -> Iterator[Any]:
    """What TensorFlow's loops make of a batch that costs nothing."""
    import tensorflow as tf

    from loaders.samples import batch

    yield tf.data.Dataset.from_tensors(batch(name, 0)).repeat().prefetch(4)


@contextmanager
def unit(name: str) -> Iterator[Iterator[Any]]:
    """The user code and np.stack in one thread, and nothing else."""
    from loaders.samples import batch_stream

    yield batch_stream(name)
