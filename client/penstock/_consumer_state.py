"""The consumer's half of a session as plain state: what was asked for, came, was handed over, and was let go.

All that changes this state is here. Nothing here knows a socket, a thread, a lock or a clock: messages come in as
values, and what is to be sent comes out as values. The session (_session.py) calls it under its lock.

An epoch is open from `begin` to its end, to `leave`, or to the next `begin`. Slabs wait in a queue while their epoch is
open; one that comes for an epoch that is not open any more is void, which counts as handed. Slabs are handed in the
order of their sequence numbers, so one count says which were. After a failure what came before it is still handed.

A stream outlives its connection: `cut` drops what was not handed, `joined` begins again behind what was, over another
connection, whose slabs count from 0.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from penstock_proto import EndOfStream, IncompleteEpoch, PenstockError, ProtocolError, StateMismatch, StreamClosed
from penstock_proto.layout import SlotLayout
from penstock_proto.messages import Ack, Begin, Begun, End, FeedInfo, Had, LaneEnded, Leave, Passed, Slab
from penstock_proto.position import Position

from ._memory import Root
from ._progress import Before, EpochCheck, Progress

MAX_RELEASED = 4096
UNTOLD = 64
"""Slabs of a group that are remembered: more than are ever under way, that is, handed over without the daemon's word
that it knows."""


@dataclass(frozen=True, slots=True)
class Received:
    """A slab that is here: its message, the layout of its slot, and the root of the slot's memory."""

    slab: Slab
    layout: SlotLayout
    root: Root


class Refused(Exception):
    """Nothing can be read: `error` says why, and is to be raised as a copy, or by who lives as long as its traceback.

    An error that was raised holds its traceback, and so the frames and the batches of whoever read. The stream, which
    the receiver thread holds, keeps none that was.
    """

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error)
        self.error = error


class ConsumerState:
    """The state of one session.

    Attributes:
        epoch: the newest epoch that was begun; before the first, the one before it (-1).
        handed: how many slabs of the connection are done with, the void ones among them.
        aliased: sequence numbers of handed slabs whose slot some array still lies over (same host only).
        error: why the stream failed, or None; it stays.
        closed: why nobody may read on although nothing failed, or None.
        given: how many slabs of the connection had been handed when it was closed, or cut the last time.
        track: the position behind what was handed.
        untold: in a group: the slabs that were handed last, and that a daemon may not know of.
    """

    def __init__(
        self, info: FeedInfo, start: Position | None = None, consumed: int = 0, shared_from: int | None = None
    ) -> None:
        """Begin at `start` (None: epoch 0), behind `consumed` batches; or share a group's stream from that epoch on."""
        self.info = info
        self.epoch = start.epoch - 1 if start else (shared_from or 0) - 1
        self.shared = shared_from is not None
        self._shared_from = shared_from or 0
        self.given = 0
        self.handed = 0
        self.aliased: set[int] = set()
        self.error: PenstockError | None = None
        self.closed: StreamClosed | None = None
        self.progress = Progress(info, start, consumed)
        self.untold: collections.deque[Had] = collections.deque(maxlen=UNTOLD)
        self._start = start
        self._rest_of = start.epoch if start and (start.batches or start.skip) else None
        self._digest = (start.epoch, start.digest) if start and start.digest else None
        self._open = False
        self._end: End | None = None
        self._queue: collections.deque[tuple[Received, Before]] = collections.deque()
        self._before: list[LaneEnded | Passed] = []
        self._came = 0
        self._epoch_check = EpochCheck()
        self._ended = 0
        self._released: list[int] = []
        self._acked = (0, 0)

    # --- the consumer ---

    def begin(self, unread: int = 0) -> list[Begin | Leave]:
        """Begin the next epoch; the one that is open is left. Returns what is to be sent.

        Args:
            unread: how many batches of the last slab that was taken were not read.

        Raises:
            Refused: with EndOfStream if the feed has no further epoch, else because the stream failed or was closed.
        """
        self._check_readable()
        if self.info.epochs is not None and max(self.epoch + 1, self._shared_from) >= self.info.epochs:
            text = f"all {self.info.epochs} epochs of the feed were read (it was made with epochs={self.info.epochs}): "
            raise Refused(EndOfStream(text + "connect anew to read it from the start", feed=self.info.name))
        out: list[Begin | Leave] = [*self.leave(self.epoch)]
        self.epoch = max(self.epoch + 1, self._shared_from)
        self.progress.begin(self.epoch, unread)
        self._opened(self._start if self._start and self._start.epoch == self.epoch else None)
        return [*out, Begin(self.epoch)]

    def take(self, epoch: int, hold: bool = False) -> Received | End | None:
        """The next slab of `epoch`, which is handed with that; its End; or None while nothing is here.

        With `hold` no slab is handed.

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
            if hold:
                return None
            received, before = self._queue.popleft()
            self.handed += 1
            self.progress.handed(received.slab, before)
            if self.shared:
                slab = received.slab
                self.untold.append(Had(slab.epoch, slab.lane, slab.index, slab.batches))
            self._rest_of = None
            return received
        if self._end is not None:
            self._open = False
            self.progress.ended(epoch)
            return self._end
        self._check_readable()
        return None

    def nothing_left(self, epoch: int) -> bool:
        """Whether the stream began within `epoch`, which has ended, and nothing of it was left."""
        return self._rest_of == epoch

    def leave(self, epoch: int) -> list[Leave]:
        """Leave `epoch`: what has come of it and was not handed is void. Returns what is to be sent."""
        if epoch != self.epoch or not self._open:
            return []
        self._open = False
        ended, self._end = self._end, None
        handed = self.handed
        self._void()
        return [] if ended is not None else [Leave(epoch, handed)]

    def close(self, reason: StreamClosed) -> None:
        """Nobody reads on: whatever has come or comes is void."""
        if self.closed is None:
            self.closed, self.given = reason, self.handed
        self._open = False
        self._void()

    def released(self, seq: int) -> None:
        """The last array over the slot of slab `seq` is gone. One that was refused, or came behind a failure, was never
        handed, and so is not the client's to give back."""
        self.aliased.discard(seq)
        if seq < self.handed:
            self._released.append(seq)

    # --- the daemon ---

    def listed(self, begun: Begun) -> None:
        """The splits of an epoch are known. Others than those of the position, or than were told before, fail the
        stream with StateMismatch. Raises ProtocolError for an epoch that was not asked for."""
        self._check_epoch(begun)
        if begun.epoch != self.epoch:
            return
        if self._digest is not None and self._digest[0] == begun.epoch and self._digest[1] != begun.digest:
            return self.fail(
                StateMismatch(
                    f"the list of splits of epoch {begun.epoch} is another one now: its SHA-256 was "
                    f"{self._digest[1].hex()[:16]} and is {begun.digest.hex()[:16]}. The stream can only go on with "
                    "the same splits in the same order: bring them back, or begin anew",
                    feed=self.info.name,
                )
            )
        self._digest = (begun.epoch, begun.digest)
        self.progress.listed(begun.epoch, begun.digest)

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
        self._check_open(slab)
        self._came += 1
        if not self._reads(slab.epoch):
            self.handed += 1
            return
        self._epoch_check.came(slab)
        before, self._before = tuple(self._before), []
        self._queue.append((received, before))

    def passed(self, message: Passed | LaneEnded) -> None:
        """Batches were passed over, or a lane ended. Raises ProtocolError where nothing more of the epoch may come."""
        self._check_open(message)
        if self._reads(message.epoch):
            if isinstance(message, Passed):
                self._epoch_check.came(message)
            else:
                self._epoch_check.ended(message)
            self._before.append(message)

    def ended(self, end: End) -> None:
        """An epoch's End came. An epoch that is not all there fails the stream with IncompleteEpoch.

        Raises:
            ProtocolError: it came before, or the epoch was not asked for.
        """
        self._check_open(end)
        self._ended += 1
        if not self._reads(end.epoch):
            return
        fault = self._epoch_check.fault(end)
        if fault is not None:
            fault = f"epoch {end.epoch} {fault}: please report this as a bug"
        elif not self.shared and self.info.batches is not None and end.batches != self.info.batches:
            fault = (
                f"epoch {end.epoch} had {end.batches} batches and {end.rows} rows, but the feed promises "
                f"{self.info.batches} batches: `samples=` of the feed, or the length of its source, is not what "
                "its generator yields"
            )
        if fault is None:
            self._end = end
        else:
            self.fail(IncompleteEpoch(fault, feed=self.info.name))

    def fail(self, error: PenstockError) -> None:
        """The stream failed; the first reason stays. Slabs that came before are still handed."""
        self.error = self.error or error

    def lost(self, error: PenstockError) -> None:
        """As `fail`, but the slots of slabs that were not handed may be somebody else's by now."""
        self.fail(error)
        self._queue.clear()

    def disconnected(self) -> set[int]:
        """The connection is gone. Returns what `aliased` was: those slots, and their numbers, were its own."""
        if self._queue:
            self._end = None
        self._queue.clear()
        self.given = self.handed
        self._came = self.handed = self._ended = 0
        self._acked = (0, 0)
        self._released = []
        aliased, self.aliased = self.aliased, set()
        return aliased

    def place(self) -> Position:
        """From where another connection has to begin. (A group's stream goes on without being told.)"""
        if self.shared:
            return Position(self.info, 0)
        if self._open and self._end is None:
            return self.progress.newest()
        if self._start is not None and self._start.epoch > self.epoch:
            return self._start
        return Position(self.info, self.epoch + 1)

    def joined(self, place: Position, first: int) -> list[Begin]:
        """Another connection begins at `place`, or in epoch `first` of a group's stream. Returns what is to be sent."""
        self.untold.clear()  # the daemon has said that the session is open, and so that it knows
        if self.shared:
            self._shared_from = first
        if not self._open or self._end is not None:
            return []
        if self.epoch < self._shared_from:  # it ended for the others meanwhile, so all of it was handed over
            self._end = End(self.epoch, 0, 0, 0)
            return []
        self._opened(place if place.epoch == self.epoch and not self.shared else None)
        if place.digest and place.epoch == self.epoch:
            self._digest = (place.epoch, place.digest)
        return [Begin(self.epoch)]

    def ack(self) -> Ack | None:
        """What the daemon has not been told yet, or None; the caller sends it."""
        news = (self.handed, self._ended)
        if news == self._acked and not self._released:
            return None
        self._acked = news
        released, self._released = self._released[:MAX_RELEASED], self._released[MAX_RELEASED:]
        return Ack(self.handed, tuple(released), self._ended)

    def _opened(self, place: Position | None) -> None:
        self._open, self._end = True, None
        self._epoch_check = EpochCheck(place)
        self._before = []

    def _reads(self, epoch: int) -> bool:
        return epoch == self.epoch and self._open and self.error is None

    def _check_epoch(self, message: Begun | Slab | LaneEnded | Passed | End) -> None:
        """Nothing comes of an epoch that was not asked for."""
        if message.epoch > self.epoch:
            raise ProtocolError(
                f"the daemon sent {type(message).__name__} of epoch {message.epoch}; epoch {self.epoch} was asked for"
            )

    def _check_open(self, message: Slab | LaneEnded | Passed | End) -> None:
        """Nor of one whose End came."""
        self._check_epoch(message)
        if self._end is not None and self._reads(message.epoch):
            raise ProtocolError(f"the daemon sent {type(message).__name__} of epoch {message.epoch} behind its End")

    def _void(self) -> None:
        self.handed += len(self._queue)
        self._queue.clear()

    def _check_readable(self) -> None:
        if self.closed is not None:
            raise Refused(self.closed)
        if self.error is not None:
            raise Refused(self.error)
