"""PyTorch's `DataLoader` over a map-style dataset.

Workers persist (`persistent_workers=True`) and prefetch two batches each (`prefetch_factor`, the default). They are
forked from a server that has imported PyTorch, since TensorFlow's threads run in the trainer. The default `collate_fn`
stacks samples straight into shared memory. Batches become NumPy arrays, and these tensors, without a copy.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaders import WORKERS


def arrays(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: leaf.numpy() for key, leaf in batch.items()}
    return batch.numpy()


@contextmanager
def batches(name: str) -> Iterator[Iterator[Any]]:
    multiprocessing.set_forkserver_preload(["torch.utils.data"])
    from pipelines_feeds import PIPELINES
    from torch.utils.data import DataLoader

    from loaders.samples import Samples

    loader = DataLoader(
        Samples(name),  # type: ignore[arg-type]
        batch_size=PIPELINES[name].batch,
        num_workers=WORKERS,
        persistent_workers=True,
        multiprocessing_context="forkserver",
    )
    yield map(arrays, loader)
