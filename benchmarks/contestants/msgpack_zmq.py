"""What is often written by hand: the array packed by msgpack-numpy into one ZeroMQ frame over TCP,
unpacked in a generator and handed to TensorFlow by `from_generator`.

`msgpack_numpy.decode` unpickles arrays of objects, so it must never read what a stranger sent.
Here both ends are ours.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from contestants import prebuilt
from contestants.process import running

WINDOW = 4  # messages that each end may queue
TIMEOUT_MS = 60_000  # a dead peer ends the run


def produce(port: int, size: int) -> None:
    import msgpack_numpy
    import zmq

    sources = prebuilt.pool(size)
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.set_hwm(WINDOW)
        sender.connect(f"tcp://127.0.0.1:{port}")
        for source in itertools.cycle(sources):
            sender.send(msgpack_numpy.packb(source), copy=False)


@contextmanager
def batches(size: int) -> Iterator[Iterable[Any]]:
    import msgpack_numpy
    import tensorflow as tf
    import zmq

    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.set_hwm(WINDOW)
        receiver.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        port = receiver.bind_to_random_port("tcp://127.0.0.1")

        def received() -> Iterator[np.ndarray]:
            while True:
                yield msgpack_numpy.unpackb(receiver.recv(copy=False).buffer)

        with running(produce, port, size):
            signature = tf.TensorSpec(prebuilt.shape(size), tf.float32)
            yield tf.data.Dataset.from_generator(received, output_signature=signature).prefetch(2)
