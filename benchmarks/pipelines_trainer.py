"""The process that receives one loader's batches. `pipelines.py` starts one for each trial.

    python pipelines_trainer.py LOADER PIPELINE SECONDS

It runs an eager loop and then `Dataset.reduce`, each for SECONDS, and answers with a line of JSON: a `Run`, or the
reason why this loader cannot run the pipeline.
"""

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import process_tree
from contestants.prebuilt import ALIGNMENT
from loaders import LOADERS, Cannot, Loader
from measure import Run
from trainer import LEAD_BATCHES, LEAD_SHARE, LEAST_BATCHES, reduced, take

FULL_SECONDS = 0.3  # time for a loader that nobody reads to fill its queues


def tensor(array: np.ndarray) -> Any:
    """Return a tensor of this array, without a copy if it is aligned as TensorFlow needs. Shared memory mostly is."""
    import tensorflow as tf

    if array.ctypes.data % ALIGNMENT == 0 and array.flags.carray:  # includes that it is writable
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    return tf.convert_to_tensor(array)


def eagerly(source: Iterator[Any], seconds: float) -> tuple[float, float, float]:
    """Return an eager loop's batches a second, and the CPU seconds a batch of this process and of those below it."""
    take(source, seconds * LEAD_SHARE, LEAD_BATCHES)
    before = process_tree.cpu_seconds()
    trial = take(source, seconds, LEAST_BATCHES)
    below = process_tree.cpu_seconds() - before
    return trial.batches / trial.seconds, trial.cpu_seconds / trial.batches, below / trial.batches


def measured(loader: Loader, pipeline: str, seconds: float) -> Run:
    import tensorflow as tf

    from_arrays = functools.partial(tf.nest.map_structure, tensor)
    begun = time.perf_counter()
    batches = getattr(importlib.import_module(loader.module), loader.function)
    with batches(pipeline) as loaded:
        from loaders.samples import summed, tensor_spec

        is_dataset = isinstance(loaded, tf.data.Dataset)
        source = map(from_arrays, loaded) if not is_dataset and loader.tensors else iter(loaded)
        first = next(source)
        first_seconds = time.perf_counter() - begun
        sums = None if loader.limit else summed(first)
        per_second, cpu, cpu_below = eagerly(source, seconds)
        reduce_per_second = None
        if loader.tensors:
            del source  # only one iterator over a dataset may run
            if is_dataset:
                dataset = loaded
            else:
                signature = tensor_spec(tf.nest.map_structure(np.asarray, first), batched=True)
                dataset = tf.data.Dataset.from_generator(lambda: loaded, output_signature=signature)
            reduce_per_second = reduced(dataset, per_second, seconds)
            source = iter(dataset)
        last = next(source)  # noqa: F841  hold a batch, as the loops do
        time.sleep(FULL_SECONDS)
        memory = process_tree.memory_bytes()
        return Run(per_second, reduce_per_second, cpu, cpu_below, memory, first_seconds, sums)


def main() -> None:
    loader, pipeline, seconds = LOADERS[sys.argv[1]], sys.argv[2], float(sys.argv[3])
    # Answers go to the original stdout. All other output, here or in a child, goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        answer = asdict(measured(loader, pipeline, seconds))
    except Cannot as reason:
        answer = {"cannot": str(reason)}
    print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
