"""The consumer's half of a session as plain state: what was asked for, came, was handed over, and was let go.

All that changes this state is here. Nothing here knows a socket, a thread, a lock or a clock: messages come in as
values, and what is to be sent comes out as values. The session (session.py) calls it under its lock.

An epoch is open from `begin` to its end, to `leave`, or to the next `begin`. Slabs wait in a queue while their epoch is
open; one that comes for an epoch that is not open any more is void, which counts as handed. Slabs are handed in the
order of their sequence numbers, so one count says which were. After a failure what came before it is still handed.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from penstock_proto import EndOfStream, IncompleteEpoch, PenstockError, ProtocolError, StreamClosed
from penstock_proto.layout import BatchLayout
from penstock_proto.messages import Ack, Begin, End, FeedInfo, Leave, Slab

from .memory import Root

MAX_RELEASED = 4096


@dataclass(frozen=True, slots=True)
class Received:
    """A slab that is here: its message, the layout of its batches, and the root of its memory."""

    slab: Slab
    layout: BatchLayout
    root: Root


class Refused(Exception):
    """Nothing can be read: `error` says why, and is to be raised as a copy, or by who lives as long as its traceback.

    An error that was raised holds its traceback, and so the frames and the batches of whoever read. The stream, which
    the receiver thread holds, keeps none that was.
    """

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error)
        self.error = error


class Stream:
    """The state of one session.

    Attributes:
        epoch: the newest epoch that was begun, -1 before the first.
        handed: how many slabs are done with, the void ones among them.
        aliased: sequence numbers of handed slabs whose slot some array still lies over (same host only).
        error: why the stream failed, or None; it stays.
        closed: why nobody may read on although nothing failed, or None.
    """

    def __init__(self, info: FeedInfo) -> None:
        self.info = info
        self.epoch = -1
        self.handed = 0
        self.aliased: set[int] = set()
        self.error: PenstockError | None = None
        self.closed: StreamClosed | None = None
        self._open = False
        self._end: End | None = None
        self._queue: collections.deque[Received] = collections.deque()
        self._came = 0
        self._epoch_came = [0, 0, 0]
        self._ended = 0
        self._released: list[int] = []
        self._acked = (0, 0)

    # --- the consumer ---

    def begin(self) -> list[Begin | Leave]:
        """Begin the next epoch; the one that is open is left. Returns what is to be sent.

        Raises:
            Refused: with EndOfStream if the feed has no further epoch, else because the stream failed or was closed.
        """
        self._check()
        if self.info.epochs is not None and self.epoch + 1 >= self.info.epochs:
            text = f"all {self.info.epochs} epochs of the feed were read (it was made with epochs={self.info.epochs}): "
            raise Refused(EndOfStream(text + "connect anew to read it from the start", feed=self.info.name))
        out: list[Begin | Leave] = [*self.leave(self.epoch)]
        self.epoch += 1
        self._open, self._end, self._epoch_came = True, None, [0, 0, 0]
        return [*out, Begin(self.epoch)]

    def take(self, epoch: int) -> Received | End | None:
        """The next slab of `epoch`, which is handed with that; its End; or None while nothing is here.

        Raises:
            Refused: with StreamClosed if the connection was closed or a newer iteration has begun, else because the
                stream failed, and all slabs before that were handed.
        """
        if self.closed is not None:
            raise Refused(self.closed)
        if epoch != self.epoch:
            text = (
                f"this iteration (epoch {epoch}) is over, because a newer one on the same connection took its stream: "
                "one connection has one stream, so use one connection for each iterator that is to live beside others"
            )
            raise Refused(StreamClosed(text, feed=self.info.name))
        if self._queue:
            received = self._queue.popleft()
            self.handed += 1
            return received
        if self._end is not None:
            self._open = False
            return self._end
        self._check()
        return None

    def leave(self, epoch: int) -> list[Leave]:
        """Leave `epoch`: what has come of it and was not handed is void. Returns what is to be sent."""
        if epoch != self.epoch or not self._open:
            return []
        self._open = False
        ended, self._end = self._end, None
        self._void()
        return [] if ended is not None else [Leave(epoch)]

    def close(self, reason: StreamClosed) -> None:
        """Nobody reads on: whatever has come or comes is void."""
        self.closed = self.closed or reason
        self._open = False
        self._void()

    def released(self, seq: int) -> None:
        """The last array over the slot of slab `seq` is gone."""
        self.aliased.discard(seq)
        self._released.append(seq)

    # --- the daemon ---

    def came(self, received: Received) -> None:
        """A slab came.

        Raises:
            ProtocolError: it is not the one that was to come.
        """
        slab = received.slab
        if slab.seq != self._came or slab.epoch > self.epoch:
            raise ProtocolError(
                f"the daemon sent slab {slab.seq} of epoch {slab.epoch}; "
                f"to come was slab {self._came} of epoch {self.epoch}"
            )
        self._came += 1
        if slab.epoch < self.epoch or not self._open or self.error is not None:
            self.handed += 1
            return
        for i, more in enumerate((1, slab.batches, slab.rows)):
            self._epoch_came[i] += more
        self._queue.append(received)

    def ended(self, end: End) -> None:
        """An epoch's End came. An epoch that is not all there fails the stream with IncompleteEpoch."""
        self._ended += 1
        if end.epoch != self.epoch or not self._open or self.error is not None:
            return
        slabs, batches, rows = self._epoch_came
        if (slabs, batches, rows) != (end.slabs, end.batches, end.rows):
            self.fail(
                IncompleteEpoch(
                    f"epoch {end.epoch} came as {slabs} slabs, {batches} batches and {rows} rows, but the daemon "
                    f"counted {end.slabs}, {end.batches} and {end.rows}: please report this as a bug",
                    feed=self.info.name,
                )
            )
        elif self.info.batches is not None and batches != self.info.batches:
            self.fail(
                IncompleteEpoch(
                    f"epoch {end.epoch} had {batches} batches and {rows} rows, but the feed promises "
                    f"{self.info.batches} batches: `samples=` of the feed, or the length of its source, is not what "
                    "its generator yields",
                    feed=self.info.name,
                )
            )
        else:
            self._end = end

    def fail(self, error: PenstockError) -> None:
        """The stream failed; the first reason stays. Slabs that came before are still handed."""
        self.error = self.error or error

    def lost(self, error: PenstockError) -> None:
        """As `fail`, but the slots of slabs that were not handed may be somebody else's by now."""
        self.fail(error)
        self._queue.clear()

    def ack(self) -> Ack | None:
        """What the daemon has not been told yet, or None; the caller sends it."""
        news = (self.handed, self._ended)
        if news == self._acked and not self._released:
            return None
        self._acked = news
        released, self._released = self._released[:MAX_RELEASED], self._released[MAX_RELEASED:]
        return Ack(self.handed, tuple(released), self._ended)

    def _void(self) -> None:
        self.handed += len(self._queue)
        self._queue.clear()

    def _check(self) -> None:
        if self.closed is not None:
            raise Refused(self.closed)
        if self.error is not None:
            raise Refused(self.error)
