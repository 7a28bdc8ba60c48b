"""tf.data's own ways to run Python in the trainer's process, and tf.data service."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaders import WORKERS, Cannot


@contextmanager
def of_samples(name: str) -> Iterator[Any]:
    """As in the guide: `from_generator`, `shuffle` if the pipeline is shuffled, `batch`, `prefetch(AUTOTUNE)`."""
    import tensorflow as tf
    from pipelines_feeds import PIPELINES

    from loaders.samples import sample_stream, tensor_spec

    pipeline = PIPELINES[name]
    signature = tensor_spec(pipeline.sample(0))
    dataset = tf.data.Dataset.from_generator(functools.partial(sample_stream, name), output_signature=signature)
    if pipeline.shuffle:
        dataset = dataset.shuffle(pipeline.shuffle)
    yield dataset.batch(pipeline.batch).prefetch(tf.data.AUTOTUNE)


@contextmanager
def of_batches(name: str) -> Iterator[Any]:
    """The same, but the generator stacks the batches, which saves most of the cost for each element."""
    import tensorflow as tf

    from loaders.samples import batch, batch_stream, tensor_spec

    signature = tensor_spec(batch(name, 0), batched=True)
    dataset = tf.data.Dataset.from_generator(functools.partial(batch_stream, name), output_signature=signature)
    yield dataset.prefetch(tf.data.AUTOTUNE)


@contextmanager
def py_function(name: str) -> Iterator[Any]:
    """`map` of a `py_function`, with as many parallel calls as others have workers; one call makes a sample."""
    import tensorflow as tf
    from pipelines_feeds import PIPELINES

    from loaders.samples import EPOCH, sample, tensor_spec

    pipeline = PIPELINES[name]
    signature = tensor_spec(pipeline.sample(0))
    specs = tf.nest.flatten(signature)

    def made(number: Any) -> Any:
        leaves = tf.py_function(
            lambda number: tf.nest.flatten(sample(name, int(number))), [number], [spec.dtype for spec in specs]
        )
        for leaf, spec in zip(leaves, specs, strict=True):
            leaf.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(signature, leaves)

    numbers = tf.data.Dataset.range(EPOCH * pipeline.batch)
    yield numbers.map(made, num_parallel_calls=WORKERS).batch(pipeline.batch).prefetch(tf.data.AUTOTUNE)


@contextmanager
def service(name: str) -> Iterator[Any]:
    """A dispatcher and a worker in their own process, as in transport.py, with the graph of `of_batches`."""
    import tensorflow as tf
    from contestants.tfdata_service import serving

    with of_batches(name) as dataset, serving() as target:
        distributed = dataset.apply(tf.data.experimental.service.distribute("parallel_epochs", target))
        try:
            next(iter(distributed))
        except tf.errors.OpError as error:
            raise Cannot(f"a Python generator does not leave its process ({type(error).__name__})") from error
        yield distributed
