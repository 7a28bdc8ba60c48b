"""The yardstick for TCP: a socket, `sendall` and `recv_into`. No TensorFlow, no framing.

The receiver fills aligned buffers in turn, as many as Penstock has slots.
"""

import itertools
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from contestants import prebuilt
from contestants.process import running

TIMEOUT = 60.0  # seconds; a dead peer ends the run


def produce(port: int, size: int) -> None:
    sources = [batch.data.cast("B") for batch in prebuilt.pool(size)]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for source in itertools.cycle(sources):
            connection.sendall(source)


@contextmanager
def batches(size: int) -> Iterator[Iterable[np.ndarray]]:
    targets = [prebuilt.aligned(size) for _ in range(prebuilt.POOL)]

    def received(connection: socket.socket) -> Iterator[np.ndarray]:
        for target in itertools.cycle(targets):
            rest = target.data.cast("B")
            while rest:
                count = connection.recv_into(rest)
                if count == 0:
                    raise ConnectionError("the producer closed the connection")
                rest = rest[count:]
            yield target

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(TIMEOUT)
        with running(produce, server.getsockname()[1], size):
            connection, _ = server.accept()
            connection.settimeout(TIMEOUT)
            with connection:
                yield received(connection)
