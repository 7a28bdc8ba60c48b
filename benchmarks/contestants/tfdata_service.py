"""tf.data service: a dispatcher and one worker in one separate process, over gRPC without compression.

The worker makes its batches once and caches them, so it only sends them. They do not carry the time of sending.
"""

import multiprocessing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from contestants import prebuilt
from contestants.process import running

START_SECONDS = 120.0  # its process imports TensorFlow


def serve(report: Connection) -> None:
    """Run a dispatcher and one worker on free ports, and report the dispatcher's address."""
    import tensorflow as tf

    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    address = dispatcher.target.partition("://")[2]
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, port=0))
    report.send(dispatcher.target)
    worker.join()


@contextmanager
def serving() -> Iterator[str]:
    """Run `serve` while the block runs, and yield the dispatcher's address."""
    answer, report = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with answer, report, running(serve, report):
        if not answer.poll(START_SECONDS):
            raise TimeoutError(f"tf.data service did not start within {START_SECONDS:.0f} s")
        yield answer.recv()


@contextmanager
def batches(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    import tensorflow as tf

    with serving() as target:

        def filled(number: Any) -> Any:
            return load.structure([tf.fill(load.shape, tf.cast(number + 1, tf.float32)) for _ in range(load.leaves)])

        yield (
            tf.data.Dataset.range(load.pool)
            .map(filled)
            .cache()
            .repeat()
            .apply(
                tf.data.experimental.service.distribute(
                    "parallel_epochs", target, compression=None, data_transfer_protocol="grpc"
                )
            )
            .prefetch(2)
        )
