"""tensorpack's `MultiProcessRunnerZMQ`: worker processes that send pickled batches over ZeroMQ's ipc.

Each worker runs a copy of the whole dataflow, so that every sample comes twice. It is configured by its defaults (50
batches of high-water mark); the processes are forked, which it has no option for.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from loaders import WORKERS


@contextmanager
def batches(name: str) -> Iterator[Iterator[Any]]:
    from tensorpack.dataflow import DataFlow, MultiProcessRunnerZMQ

    from loaders.samples import EPOCH, batch_stream

    class Batches(DataFlow):
        """Batches in a list of one component, which is how tensorpack has them."""

        def __len__(self) -> int:
            return EPOCH

        def __iter__(self) -> Iterator[list[Any]]:
            return ([batch] for batch in batch_stream(name))

    flow = MultiProcessRunnerZMQ(Batches(), num_proc=WORKERS)
    flow.reset_state()
    yield (batch for (batch,) in flow)
