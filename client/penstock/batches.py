"""The reader of a session's stream, and the iterator over its NumPy batches. Nobody who reads on leaves it open."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_proto import PenstockError
from penstock_proto.messages import End, FeedInfo

from .cut import Cut
from .session import STEP, Session
from .stream import Received, Refused


class Reader:
    """What connections, iterators and datasets share: when the last of them is gone the session closes."""

    def __init__(self, session: Session, info: FeedInfo, cut: Cut) -> None:
        self.session = session
        self.info = info
        self.cut = cut
        self._error: PenstockError | None = None

    def __del__(self) -> None:
        self.session.close_soon()

    @property
    def error(self) -> PenstockError | None:
        """The one error by which the stream failed, or None."""
        if self._error is None and self.session.error is not None:
            self._error = copy.copy(self.session.error)
        return self._error

    def begin(self) -> int:
        """Begin the next epoch and return its number.

        Raises:
            EndOfStream: the feed has no further epoch.
            StreamClosed: the connection was closed.
            PenstockError: the stream failed.
        """
        try:
            return self.session.begin()
        except Refused as refused:
            error = refused.error
        raise self._raised(error)

    def take(self, epoch: int) -> Received | End:
        """The next slab of `epoch`, or its End; waits for it.

        Raises:
            StreamClosed: the connection was closed, or a newer iteration has begun.
            PenstockError: the stream failed.
        """
        try:
            while (item := self.session.take(epoch, STEP)) is None:
                pass
            return item
        except Refused as refused:
            error = refused.error
        raise self._raised(error)

    def _raised(self, error: PenstockError) -> PenstockError:
        kept = self.error
        if kept is not None and error is self.session.error:
            return kept.with_traceback(None)
        return copy.copy(error)


class Batches:
    """Iterates over one epoch. The epoch begins with the first `next`, and is left when this object is gone."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._epoch: int | None = None
        self._over = False
        self._slab: Iterator[Any] = iter(())

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        for batch in self._slab:
            return batch
        self._slab = iter(())  # lets go of the slab before the wait for the next
        if self._over:
            raise StopIteration
        if self._epoch is None:
            self._epoch = self._reader.begin()
        item = self._reader.take(self._epoch)
        if isinstance(item, End):
            self._over = True
            raise StopIteration
        self._slab = self._reader.cut.batches(item.slab, item.layout, np.asarray(item.root))
        return next(self._slab)

    def close(self) -> None:
        """Leave the epoch."""
        self._slab = iter(())
        self._over = True
        if self._epoch is not None:
            self._reader.session.leave_soon(self._epoch)

    def __del__(self) -> None:
        self.close()
