"""The limits that no loader exceeds, and the unit of the comparison. Nothing here is sent between processes."""

import itertools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

COPIES = 12  # distinct batches to cycle through, as in transport.py, so that large ones come from memory, not cache


@contextmanager
def copies(name: str) -> Iterator[Iterator[Any]]:
    """Yield copies of batches, made by one thread's memcpy, with all leaves of a batch in one piece."""
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
    """TensorFlow's loops over a batch that costs nothing."""
    import tensorflow as tf

    from loaders.samples import batch

    yield tf.data.Dataset.from_tensors(batch(name, 0)).repeat().prefetch(4)


@contextmanager
def unit(name: str) -> Iterator[Iterator[Any]]:
    """The user code and np.stack in one thread, and nothing else."""
    from loaders.samples import batch_stream

    yield batch_stream(name)


@contextmanager
def crowded(name: str) -> Iterator[Iterator[Any]]:
    """The unit, while other processes run it too: in all as many as a loader has workers."""
    from loaders import WORKERS
    from loaders.samples import batch_stream

    busy = f"from loaders.samples import batch_stream\nfor batch in batch_stream({name!r}): pass"
    command, folder = [sys.executable, "-c", busy], Path(__file__).resolve().parents[1]
    others = [subprocess.Popen(command, cwd=folder) for _ in range(WORKERS - 1)]
    try:
        yield batch_stream(name)
    finally:
        for other in others:
            other.kill()
            other.wait()
