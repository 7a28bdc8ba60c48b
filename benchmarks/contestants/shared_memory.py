"""The minimum for a loader in another process: it copies batches into shared memory, and a bare `from_generator`
passes them to TensorFlow without a copy.

There are two semaphores, but no daemon, no socket, no order, and no handling of a process that dies. A slot is reused
after `HELD` further batches were requested. TensorFlow has released it by then, unless the trainer holds batches for
longer.
"""

import itertools
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Semaphore
from typing import Any

import numpy as np

from contestants import prebuilt
from contestants.in_process import signature
from contestants.process import running

HELD = 6  # slots that the trainer may hold: two of prefetch, the current one, and those in between


def mapped(file: int, load: prebuilt.Load) -> list[Any]:
    """Return the slots in the file, each of which is a batch."""
    memory = np.frombuffer(mmap.mmap(file, load.pool * load.nbytes), np.float32).reshape(load.pool, load.leaves, -1)
    return [load.structure(list(slot)) for slot in memory]


def produce(file: str, load: prebuilt.Load, free: Semaphore, filled: Semaphore) -> None:
    opened = os.open(file, os.O_RDWR)
    for slot, batch in zip(itertools.cycle(mapped(opened, load)), prebuilt.stream(load, prebuilt.pool(load))):
        free.acquire()
        for target, source in zip(prebuilt.leaves(slot), prebuilt.leaves(batch), strict=True):
            np.copyto(target, source)
        filled.release()


@contextmanager
def batches(load: prebuilt.Load) -> Iterator[Iterable[Any]]:
    import tensorflow as tf

    file = os.memfd_create("slots")
    os.ftruncate(file, load.pool * load.nbytes)
    slots = itertools.cycle(mapped(file, load))  # shared by all iterators, as the producer never starts over
    held = min(HELD, load.pool - 1)
    spawning = get_context("spawn")
    free, filled = spawning.Semaphore(load.pool - held), spawning.Semaphore(0)

    def generator() -> Iterator[Any]:
        while True:
            filled.acquire()
            try:
                yield next(slots)
            finally:  # even if the iteration is abandoned
                free.release()

    with running(produce, f"/proc/{os.getpid()}/fd/{file}", load, free, filled):
        yield tf.data.Dataset.from_generator(generator, output_signature=signature(load)).prefetch(2)
    os.close(file)
