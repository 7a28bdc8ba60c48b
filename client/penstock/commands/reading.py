"""Reads a feed in a thread while something else looks at the daemon, for `penstock profile` and `bench --report`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from .._adapters.connection import Connection


def epochs(connection: Connection, *, tensorflow: bool = False) -> Iterator[Any]:
    """Yield the batches of one epoch after another, as NumPy arrays or as tensors."""
    dataset = connection.dataset() if tensorflow else None
    count = connection.info.epochs
    for _ in itertools.count() if count is None else range(count):
        yield from connection.batches() if dataset is None else dataset


class Reading:
    """Takes batches in a thread and drops them. As a context manager, it closes the connection at its end.

    Args:
        connection: the connection to read.
        batches: an iterator over its batches.
        step: seconds to sleep after each batch.

    Attributes:
        error: the error with which reading failed, or None.
    """

    def __init__(self, connection: Connection, batches: Iterator[Any], step: float = 0.0) -> None:
        self.error: Exception | None = None
        self._connection = connection
        self._batches = batches
        self._step = step
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="penstock-reading", daemon=True)

    def __enter__(self) -> Reading:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._connection.close()  # which ends a wait for a batch
        self._thread.join()

    def goes_on(self) -> bool:
        """Return whether batches still come: reading has not failed, and the last epoch has not ended."""
        return self._thread.is_alive()

    def _read(self) -> None:
        try:
            for _ in self._batches:
                if self._stopping.is_set():
                    return
                if self._step:
                    time.sleep(self._step)
        except Exception as error:
            if not self._stopping.is_set():
                self.error = self._connection.error or error  # TensorFlow passes on only its text
