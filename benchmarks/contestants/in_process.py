"""The cost of TensorFlow's loops for ready batches in the trainer's process: no producer, no copy."""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import prebuilt


@contextmanager
def constant(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    """A dataset that repeats one tensor."""
    import tensorflow as tf

    yield tf.data.Dataset.from_tensors(prebuilt.pool(load)[0]).repeat().prefetch(4)


@contextmanager
def generator(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    """A bare `from_generator`, with one component for each leaf. TensorFlow takes the arrays without a copy."""
    import tensorflow as tf

    ready = functools.partial(prebuilt.stream, load, prebuilt.pool(load))
    yield tf.data.Dataset.from_generator(ready, output_signature=signature(load)).prefetch(2)


def signature(load: prebuilt.Load) -> Any:
    """Return the output signature of a generator of such batches."""
    import tensorflow as tf

    return load.structure([tf.TensorSpec(load.shape, tf.float32)] * load.leaves)
