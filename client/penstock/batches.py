"""The reader of a session's stream, and the iterator over its NumPy batches. Nobody who reads on leaves it open."""

from __future__ import annotations

import copy
import math
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock_proto import PenstockError, StreamClosed
from penstock_proto.messages import End, FeedInfo
from penstock_proto.position import Position

from . import state
from .dial import Dial
from .notes import Notes
from .session import STEP, Session
from .stream import Received, Refused


class Reader:
    """What connections, iterators and datasets share: when the last of them is gone the session closes.

    Attributes:
        cut: how slabs are cut into batches.
        info: what the daemon says of the feed.
        cardinality: batches in an epoch (of one rank), `math.inf` where it has no end, or None where that is not known.
        world_size: how many ranks read the stream, of which this is one; else 1.
        session: the open session.
        shares: whether it takes from a group's stream what others do not.
        by_dataset: whether TensorFlow reads it, and so takes more than is consumed.
        unread: how many batches of the last slab were not read yet; each slab has a box of its own.
    """

    session: Session

    def __init__(self, dial: Dial, reconnect: float, loaded: object | None) -> None:
        """Open a session, which begins where the state `loaded` was taken. Raises as `connect`."""
        self._reconnect = reconnect
        self._error: weakref.ref[PenstockError] | None = None
        self.shares = dial.who.shares
        self.world_size = dial.who.world_size or 1
        self.by_dataset = False
        self.unread = [0]
        try:
            self._open(dial, loaded)
        except BaseException:
            dial.stop()
            raise

    def _open(self, dial: Dial, loaded: object | None, replaces: bool = False) -> None:
        asked = time.monotonic()
        start: Position | None = None
        consumed = 0
        if loaded is not None:
            if self.shares:
                raise ValueError("a group's stream has no state, so none can be loaded: leave out group= or state=")
            start, consumed = state.loaded(loaded)

        def begin(info: FeedInfo) -> Position | None:
            nonlocal start
            start = start and state.fitting(start, info, "the state was taken from")
            return None if start is None or state.is_start(start) else start

        notes = Notes()
        way = dial.first(notes, begin, replaces)
        self.info, self.cut = way.info, way.cut
        self.cardinality: int | float | None = way.info.batches
        if way.info.endless:
            self.cardinality = math.inf
        elif dial.who.shares:
            self.cardinality = None
        elif self.cardinality is not None:
            self.cardinality = (self.cardinality + (self.world_size - 1) * dial.who.pad) // self.world_size
        self.session = Session(dial, way, notes, asked, self._reconnect, start, consumed)

    def load(self, loaded: object) -> None:
        """Begin where the state `loaded` was taken, over another session. Raises as `Connection.load_state_dict`."""
        old = self.session
        if old.error is not None:
            raise self._raised(old.error)
        if old.closed:
            raise StreamClosed("the connection was closed, so no state can be loaded into it", feed=self.info.name)
        if old.begun:
            raise ValueError(
                "this connection has been read already: load a state into a new connection, before its first batch"
            )
        dial = old.taken_over()
        try:
            self._open(dial, loaded, replaces=True)
        except BaseException:
            old.kept(dial)
            raise
        old.close()

    def state(self, consumed: int | None) -> dict[str, Any]:
        """The state behind `consumed` batches. Raises as `Connection.state_dict`."""
        if self.shares:
            raise ValueError(
                "a group's stream has no state: which of its consumers gets a batch is up to chance. For a stream that "
                "can be gone on with give each consumer rank= and world_size="
            )
        if consumed is None and self.by_dataset:
            raise ValueError(
                "state_dict() needs `consumed` where a tf.data.Dataset reads the connection, as TensorFlow takes "
                "batches ahead: give the number of batches that the training loop consumed since the stream's very "
                "beginning, with those of earlier runs"
            )
        return state.dumped(*self.session.place(consumed, self.unread[0]))

    def __del__(self) -> None:
        if hasattr(self, "session"):
            self.session.close_soon()

    @property
    def error(self) -> PenstockError | None:
        """The error by which the stream failed, or None: the same object as long as somebody holds it.

        It is held weakly. Once raised it holds the frames that it came through, and these the reader: a cycle, which
        would keep the session and a private daemon until a garbage collection.
        """
        kept = self._error() if self._error is not None else None
        if kept is None and self.session.error is not None:
            kept = copy.copy(self.session.error)
            self._error = weakref.ref(kept)
        return kept

    def begin(self) -> int:
        """Begin the next epoch and return its number.

        Raises:
            EndOfStream: the feed has no further epoch.
            StreamClosed: the connection was closed.
            PenstockError: the stream failed.
        """
        try:
            epoch = self.session.begin(self.unread[0])
            self.unread = [0]
            return epoch
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
        self._unread = [0]

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        for batch in self._slab:
            self._unread[0] -= 1
            return batch
        self._slab = iter(())  # lets go of the slab before the wait for the next
        if self._over:
            raise StopIteration
        if self._epoch is None:
            self._epoch = self._reader.begin()
        item = self._reader.take(self._epoch)
        while isinstance(item, End):
            if not self._reader.session.nothing_left(self._epoch):
                self._over = True
                raise StopIteration
            self._epoch = self._reader.begin()
            item = self._reader.take(self._epoch)
        self._unread = self._reader.unread = [item.slab.batches - 1]
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
