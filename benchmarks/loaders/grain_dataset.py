"""Grain's `MapDataset`, in worker processes that it spawns: `source`, `batch`, `to_iter_dataset`, `mp_prefetch`.

With `batch` behind `to_iter_dataset` a worker's batches would be of every other sample. Each worker reads with one
thread and has 4 batches ahead of what it sends: the defaults, 16 threads and 500 elements, are made for files that wait
for a network, and Python code only gets slower by them.
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
