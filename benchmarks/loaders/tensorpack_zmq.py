"""tensorpack's `MultiProcessRunnerZMQ`: worker processes that send pickled batches over ZeroMQ's ipc.

Each worker runs a copy of the whole dataflow, so every sample comes twice. Its configuration is the default (a
high-water mark of 50 batches). Its processes are forked; there is no option for that.
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
        """Batches as lists of one component, as tensorpack expects."""

        def __len__(self) -> int:
            return EPOCH

        def __iter__(self) -> Iterator[list[Any]]:
            return ([batch] for batch in batch_stream(name))

    flow = MultiProcessRunnerZMQ(Batches(), num_proc=WORKERS)
    flow.reset_state()
    yield (batch for (batch,) in flow)
