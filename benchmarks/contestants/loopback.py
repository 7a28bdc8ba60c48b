"""The limit for TCP: a socket, `sendall` and `recv_into`. No TensorFlow, no framing, one leaf.

The receiver cycles through aligned buffers, as many as Penstock has slots.
"""

import itertools
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from contestants import prebuilt
from contestants.process import running

TIMEOUT = 60.0  # seconds; a dead peer ends the run


def produce(port: int, load: prebuilt.Load) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for batch in prebuilt.stream(load, prebuilt.pool(load)):
            connection.sendall(batch.data.cast("B"))


@contextmanager
def batches(load: prebuilt.Load) -> Iterator[Iterable[np.ndarray]]:
    targets = [prebuilt.aligned(load.nbytes) for _ in range(load.pool)]

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
        with running(produce, server.getsockname()[1], load):
            connection, _ = server.accept()
            connection.settimeout(TIMEOUT)
            with connection:
                yield received(connection)
