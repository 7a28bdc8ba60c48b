"""The iterator over the NumPy batches of an epoch. An iterator that is dropped leaves its epoch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_proto.messages import End

from .._state.build_reads import BuildReads
from .._stream.stream_handle import StreamHandle
from . import keras_calls

logger = logging.getLogger("penstock")

_NONE = object()
"""In place of a batch: the slab has no more."""


class NumpyBatches:
    """Iterates over one epoch. The epoch begins with the first `next` and is left when this object is gone.

    If Keras reads it only to build a model and then drops it, the next iteration begins with the same batches. Several
    threads may read it: each batch goes to one of them.
    """

    def __init__(self, handle: StreamHandle) -> None:
        self._handle = handle
        self._epoch: int | None = None
        self._build: BuildReads | None = None
        self._over = False
        self._slab: Iterator[Any] = iter(())
        self._unread = [0]
        self._consumed: int | None = None
        """The batches of the stream that were handed over, up to the end of the latest slab; without one, None."""
        self._reading = threading.RLock()

    def __iter__(self) -> NumpyBatches:
        return self

    def __repr__(self) -> str:
        # Keras shows this if it is given to model.fit.
        return f"<NumPy batches of {self._handle.handoff.url}; model.fit takes connection.keras() instead>"

    @property
    def epoch(self) -> int | None:
        """The number of the epoch, or None before it has begun."""
        return self._epoch

    def __next__(self) -> Any:
        __tracebackhide__ = True  # notebooks and pytest show the caller's line, and then the error
        try:
            with self._reading:
                batch, unread = next(self._slab, _NONE) if self._build is None else _NONE, self._unread
                if batch is _NONE:
                    batch, unread = self._next()
            unread[0] -= 1  # No signal comes between this and the return, as no function is called.
            return batch
        except BaseException as error:
            if not isinstance(error, Exception):
                self._interrupted()
            raise

    def _interrupted(self) -> None:
        """Have everything that was not returned handed over again: a signal, such as Ctrl-C, has interrupted `next`."""
        with self._reading:
            if self._epoch is None or self._consumed is None or self._build is not None:
                return
            self._slab = iter(())
            self._handle.handoff.interrupted(self._epoch, self._consumed - self._unread[0])
            self._unread = self._handle.unread = [0]

    def _next(self) -> tuple[Any, list[int]]:
        """Return the next batch, and where to count it as read."""
        __tracebackhide__ = True
        if self._build is not None and not keras_calls.builds_here():
            self._read_on(self._build)
        for batch in self._slab:
            return batch, self._unread
        self._slab = iter(())  # releases the slab before waiting for the next
        if self._over:
            raise StopIteration
        if self._epoch is None:
            self._begin()
        assert self._epoch is not None
        self._consumed, self._unread = self._handle.handoff.handed_over, [0]
        item = self._handle.take(self._epoch, self._build)
        while isinstance(item, End):
            if not self._handle.handoff.nothing_left(self._epoch):
                self._over = True
                raise StopIteration
            self._epoch = self._handle.begin(self._build)
            item = self._handle.take(self._epoch, self._build)
        self._slab = self._handle.views.batches(item.slab, item.layout, np.asarray(item.root))
        unread = [item.slab.batches]
        self._consumed += unread[0]  # and no signal comes here
        self._unread = self._handle.unread = unread
        return next(self._slab), unread

    def _begin(self) -> None:
        if self._handle.begins_within and self._handle.cardinality is None:
            keras_calls.check_length(self._handle.handoff.url)
        if keras_calls.builds_here():
            self._build = BuildReads()
        elif keras_calls.builds_beside_tensorflow():
            raise ValueError(
                f"{self._handle.handoff.url}: under a tf.distribute strategy Keras reads this data on a thread of "
                "TensorFlow's, once only to build the model, and the model would never see those batches: give "
                "model.fit connection.keras()"
            )
        elif keras_calls.peeks():
            logger.warning(
                "%s: Keras takes the first two batches of a generator to learn their shapes, and trains on them again "
                "in each later epoch, in which a generator over batches() has no others. Give model.fit "
                "connection.keras()",
                self._handle.handoff.url,
            )
        self._epoch = self._handle.begin(self._build)

    def _read_on(self, build: BuildReads) -> None:
        """Count this iteration like any other: it is still read although Keras has built the model."""
        if not self._handle.handoff.go_on(build):
            return  # it will learn that it has ended
        self._build = None
        logger.warning(
            "%s: Keras has read the first batches only to build the model, and now trains on those that follow, since "
            "an iterator over batches() does not begin again. So the model never sees the first ones. Give model.fit "
            "connection.keras()",
            self._handle.handoff.url,
        )

    def close(self) -> None:
        """Leave the epoch."""
        self._slab = iter(())
        self._over = True
        if self._epoch is not None and self._build is None:
            self._handle.handoff.mailbox.leave(self._epoch)

    def __del__(self) -> None:
        self.close()
