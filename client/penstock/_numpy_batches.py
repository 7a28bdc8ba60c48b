"""The iterator over the NumPy batches of an epoch. An iterator that is dropped leaves its epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_proto.messages import End

from ._stream_handle import StreamHandle


class NumpyBatches:
    """Iterates over one epoch. The epoch begins with the first `next` and is left when this object is gone."""

    def __init__(self, handle: StreamHandle) -> None:
        self._handle = handle
        self._epoch: int | None = None
        self._over = False
        self._slab: Iterator[Any] = iter(())
        self._unread = [0]

    def __iter__(self) -> NumpyBatches:
        return self

    def __repr__(self) -> str:
        # Keras shows this if it is given to model.fit.
        return f"<NumPy batches of {self._handle.handoff.url}; model.fit takes connection.dataset() instead>"

    def __next__(self) -> Any:
        for batch in self._slab:
            self._unread[0] -= 1
            return batch
        self._slab = iter(())  # releases the slab before waiting for the next
        if self._over:
            raise StopIteration
        if self._epoch is None:
            self._epoch = self._handle.begin()
        item = self._handle.take(self._epoch)
        while isinstance(item, End):
            if not self._handle.handoff.nothing_left(self._epoch):
                self._over = True
                raise StopIteration
            self._epoch = self._handle.begin()
            item = self._handle.take(self._epoch)
        self._unread = self._handle.unread = [item.slab.batches - 1]
        self._slab = self._handle.views.batches(item.slab, item.layout, np.asarray(item.root))
        return next(self._slab)

    def close(self) -> None:
        """Leave the epoch."""
        self._slab = iter(())
        self._over = True
        if self._epoch is not None:
            self._handle.handoff.mailbox.leave(self._epoch)

    def __del__(self) -> None:
        self.close()
