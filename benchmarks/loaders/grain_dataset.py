"""Grain's `MapDataset`, in worker processes that it spawns: `source`, `batch`, `to_iter_dataset`, `mp_prefetch`.

With `batch` after `to_iter_dataset`, a worker's batches would consist of every other sample. Each worker reads with one
thread and prefetches 4 batches. The defaults, 16 threads and 500 elements, suit files on a network; they only slow
Python code down.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaders import WORKERS


@contextmanager
def batches(name: str) -> Iterator[Iterator[Any]]:
    import grain
    from pipelines_feeds import PIPELINES

    from loaders.samples import Samples

    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    batched = grain.MapDataset.source(Samples(name)).batch(PIPELINES[name].batch).to_iter_dataset(reading)
    yield iter(batched.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS)))
