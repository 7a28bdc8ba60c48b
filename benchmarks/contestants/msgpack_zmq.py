"""A common hand-written solution. msgpack-numpy packs the arrays into one ZeroMQ frame over TCP, a generator unpacks
them, and `from_generator` passes them to TensorFlow.

`msgpack_numpy.decode` unpickles arrays of objects, so it must never read messages from strangers. Here both ends are
ours.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from contestants import prebuilt
from contestants.in_process import signature
from contestants.process import running

WINDOW = 4  # messages that each end may queue
TIMEOUT_MS = 60_000  # a dead peer ends the run


def produce(port: int, load: prebuilt.Load) -> None:
    import msgpack_numpy
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.set_hwm(WINDOW)
        sender.connect(f"tcp://127.0.0.1:{port}")
        for batch in prebuilt.stream(load, prebuilt.pool(load)):
            sender.send(msgpack_numpy.packb(batch), copy=False)


@contextmanager
def batches(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    import msgpack_numpy
    import tensorflow as tf
    import zmq

    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.set_hwm(WINDOW)
        receiver.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")

        def received() -> Iterator[Any]:
            while True:
                yield msgpack_numpy.unpackb(receiver.recv(copy=False).buffer)

        with running(produce, port, load):
            yield tf.data.Dataset.from_generator(received, output_signature=signature(load)).prefetch(2)
