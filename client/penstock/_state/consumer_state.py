"""The state of a stream on the consumer's side: what it requested, received, handed over and released.

Only this code changes the state. It uses no socket, thread, lock or clock: it takes received messages as arguments, and
returns the messages to send. The hand-off (handoff.py) calls it under its lock.

An epoch is open from `begin` until its end, `leave`, or the next `begin`. Slabs wait in a queue while their epoch is
open. A slab of an epoch that is no longer open is void, which counts as handed over. Slabs are handed over in the order
of their sequence numbers, so a single count says which ones were.

A failure has its place in the stream, too: it comes after the slabs that came before it. `take` raises it there, and
from then on the stream has failed. If the epoch is left before that, nobody reaches the failure, and the stream goes on
with the next epoch. The daemon's session has failed, so this needs another connection. (A job of ranks shares its
session's stream, so a failure ends it at once.)

A stream outlives its connection. `on_disconnected` drops everything that was not handed over, a failure included. Then
`go_on_at` continues after the last slab that was, over another connection, which counts its slabs from 0.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass

from penstock_proto import (
    EndOfStream,
    FeedError,
    IncompleteEpoch,
    MemoryBound,
    PenstockError,
    ProtocolError,
    StateMismatch,
    StreamClosed,
)
from penstock_proto.batches.layout import SlotLayout
from penstock_proto.batches.position import Position
from penstock_proto.messages import (
    Ack,
    Begin,
    Begun,
    End,
    FeedInfo,
    Had,
    LaneEnded,
    Leave,
    PoolBegun,
    SentElsewhere,
    ServerMessage,
    Slab,
)

from .epoch_bounds import EpochBounds
from .memory import Root
from .progress import Before, EpochCheck, Progress

MAX_RELEASED = 4096
UNTOLD = 64
"""How many slabs of a group to remember: more than can be handed over before the daemon confirms it."""


@dataclass(slots=True)
class Received:
    """A slab that arrived: its message, the layout of its slot, and the root of the slot's memory.

    `began` and `whole` are the times (monotonic) when its first byte and its last byte came. `copied`: it was copied
    out of shared memory, because the consumer already holds much of that.
    """

    slab: Slab
    layout: SlotLayout
    root: Root
    began: float = 0.0
    whole: float = 0.0
    copied: bool = False


class Refused(Exception):
    """The stream cannot be read. Raise a copy of `error`, which says why.

    A raised error holds its traceback, and so the frames and batches of its reader. The receiver thread holds the
    stream, so the stream must not keep an error that was raised.
    """

    def __init__(self, error: PenstockError) -> None:
        super().__init__(error)
        self.error = error


class ConsumerState:
    """The state of one stream.

    Attributes:
        epoch: the newest epoch that was begun; before the first, its predecessor (-1).
        handed: how many slabs of the connection were handed over or are void.
        aliased: sequence numbers of slabs that were handed over and whose slots arrays still lie over (same host only).
        waiting: the slabs that wait to be handed over, each with the messages before it.
        error: the error that ended the stream, or None; it never changes again.
        passed_by: the failure of an epoch that was left before the failure was reached, or None: another connection is
            needed.
        closed: the error to raise once the stream was closed without a failure, or None.
        given: the value of `handed` when the stream was closed, before the slabs that nobody read became void.
        handed_before: how many slabs of the lost connection were handed over, without those that became void when the
            daemon perhaps did not hear of it: in a group they go to others.
        progress: the position after what was handed over.
        untold: in a group: the latest slabs that were handed over. The daemon may not know about them yet.
    """

    def __init__(
        self,
        info: FeedInfo,
        start: Position | None = None,
        consumed: int = 0,
        shared_from: int | None = None,
        ranks: int = 1,
    ) -> None:
        """Begin at `start` (None: epoch 0), after `consumed` batches; or, in a group, with epoch `shared_from`. `ranks`
        read the stream together; 1 without ranks."""
        self.info = info
        self.epoch = start.epoch - 1 if start else (shared_from or 0) - 1
        self.shared = shared_from is not None
        self._shared_from = shared_from or 0
        self.given = 0
        self.handed = 0
        self.handed_before = 0
        self.aliased: set[int] = set()
        self.error: PenstockError | None = None
        self.passed_by: PenstockError | None = None
        self.closed: StreamClosed | None = None
        self.progress = Progress(info, start, consumed)
        self.untold: collections.deque[Had] = collections.deque(maxlen=UNTOLD)
        self._start = start
        self._rest_of = start.epoch if start and (start.batches or start.skip) else None
        self._digest = (start.epoch, start.digest) if start and start.digest else None
        self._open = False
        self._end: End | None = None
        self.waiting: collections.deque[tuple[Received, Before]] = collections.deque()
        self._before: list[LaneEnded | PoolBegun | SentElsewhere] = []
        self._came = 0
        self._ranks = ranks
        self._epoch_check = EpochCheck()
        self._bounds = EpochBounds(info, ranks=ranks, shares=self.shared)
        self._ended = 0
        self._alone = shared_from is None and ranks == 1
        self._failure: PenstockError | None = None
        """The failure of the open epoch that `take` has not reached yet."""
        self._left_at: int | None = None
        """The value of `handed` when an epoch was left, until the daemon answers the next Begin: it has heard of it."""
        self._released: list[int] = []
        self._acked = (0, 0)

    # --- the consumer ---

    def begin(self, unread: int = 0) -> list[Begin | Leave]:
        """Begin the next epoch and leave the open one. Return the messages to send.

        Args:
            unread: how many batches of the latest slab were not read.

        Raises:
            Refused: with EndOfStream if the feed has no further epoch; or the stream failed or was closed.
        """
        self.check_readable()
        if self.info.epochs is not None and max(self.epoch + 1, self._shared_from) >= self.info.epochs:
            text = f"all {self.info.epochs} epochs of the feed were read (it has epochs={self.info.epochs}): "
            raise Refused(EndOfStream(text + "connect again to read it from the start", feed=self.info.name))
        out: list[Begin | Leave] = [*self.leave(self.epoch)]
        self.epoch = max(self.epoch + 1, self._shared_from)
        self.progress.begin(self.epoch, unread)
        self._start_session(self._start if self._start and self._start.epoch == self.epoch else None)
        return [*out, Begin(self.epoch)] if self.passed_by is None else []

    def take(self, epoch: int, hold: bool = False) -> Received | End | None:
        """Hand over the next slab of `epoch`; or return its End, or None if nothing has arrived.

        With `hold` no slab is handed over.

        Raises:
            Refused: with StreamClosed if the connection was closed or a newer iteration has begun; or the stream
                failed, and all slabs before the failure were handed over.
        """
        if self.closed is not None:
            raise Refused(self.closed)
        if epoch != self.epoch:
            raise self.superseded(epoch)
        if self.waiting:
            if hold:
                return None
            received, before = self.waiting[0]
            self.progress.on_handed(received.slab, before)  # first, so that `go_back` knows of it after a signal
            self.waiting.popleft()
            self.handed += 1
            if self.shared:
                slab = received.slab
                self.untold.append(Had(slab.epoch, slab.lane, slab.index, slab.batches))
            self._rest_of = None
            return received
        if self._end is not None:
            self._open = False
            self.progress.on_epoch_ended(epoch)
            return self._end
        self.error = self.error or self._failure
        self.check_readable()
        return None

    @property
    def has_news(self) -> bool:
        """Whether `take` has something for the reader of the open epoch."""
        return bool(self.waiting or self._end or self._failure or self.error or self.closed)

    def go_back(self, consumed: int) -> None:
        """Forget that more than `consumed` batches were handed over: a signal interrupted the reader, who has no more
        than that. They come again over another connection, so drop the others that came over this one."""
        if self.progress.consumed > consumed:
            self.progress = Progress(self.info, self.progress.position(consumed), consumed)
            self._end = None
        elif self.waiting:
            self._end = None
        self.waiting.clear()

    def begin_anyway(self) -> None:
        """Complete `begin` of the newest epoch, within which a signal interrupted the reader."""
        if not self._open:
            self.progress.begin(self.epoch)
            self._start_session(None)

    def superseded(self, epoch: int) -> Refused:
        """Return the error of an iteration of `epoch` after a newer iteration has begun."""
        text = (
            f"this iteration (epoch {epoch}) ended, because a newer one on the same connection took its stream: a "
            "connection has one stream, so give iterators that are used at the same time a connection each"
        )
        return Refused(StreamClosed(text, feed=self.info.name))

    def nothing_left(self, epoch: int) -> bool:
        """Return whether the stream resumed within `epoch`, which has ended, and found nothing left of it."""
        return self._rest_of == epoch

    def leave(self, epoch: int) -> list[Leave]:
        """Leave `epoch`: slabs of it that were not handed over become void. Return the messages to send."""
        if epoch != self.epoch or not self._open:
            return []
        self._open = False
        ended, self._end = self._end, None
        handed = self.handed
        if ended is None and self._left_at is None:
            self._left_at = handed
        self._void()
        self.passed_by, self._failure = self.passed_by or self._failure, None
        return [] if ended is not None or self.passed_by is not None else [Leave(epoch, handed)]

    def close(self, reason: StreamClosed) -> None:
        """Close the stream. Slabs that were not handed over become void, and so do those that still arrive."""
        if self.closed is None:
            self.closed, self.given = reason, self.handed
        self._open = False
        self._void()

    def release(self, seq: int) -> None:
        """Release the slot of slab `seq`: the last array over it is gone.

        Ignore a slab that was refused, or that came after a failure: it was never handed over, so the client does not
        hold its slot.
        """
        self.aliased.discard(seq)
        if seq < self.handed:
            self._released.append(seq)

    # --- the daemon ---

    def apply(self, message: ServerMessage) -> bool:
        """Apply a message about epochs and lanes. Return False, and do nothing, if it is about something else.

        Raises:
            ProtocolError: the daemon must not send it now.
        """
        if isinstance(message, LaneEnded | PoolBegun | SentElsewhere):
            self.on_passed(message)
        elif isinstance(message, Begun):
            self.on_listed(message)
        elif isinstance(message, End):
            self.end_epoch(message)
        else:
            return False
        return True

    def on_listed(self, begun: Begun) -> None:
        """Note the digest of an epoch's splits. The stream fails with StateMismatch if a different one was known.

        Raises:
            ProtocolError: nobody asked for the epoch.
        """
        self._check_epoch(begun)
        if begun.epoch != self.epoch:
            return
        if self._open:
            self._left_at = None
        if self._digest is not None and self._digest[0] == begun.epoch and self._digest[1] != begun.digest:
            return self.fail(
                StateMismatch(
                    f"the list of splits of epoch {begun.epoch} has changed: its SHA-256 was "
                    f"{self._digest[1].hex()[:16]} and is {begun.digest.hex()[:16]}. The stream can only continue "
                    "with the same splits in the same order: restore them, or begin a new stream",
                    feed=self.info.name,
                )
            )
        self._digest = (begun.epoch, begun.digest)
        self.progress.on_listed(begun.epoch, begun.digest)

    def queue(self, received: Received) -> None:
        """Queue a slab.

        Raises:
            ProtocolError: another slab was due, or this one cannot be.
        """
        slab = received.slab
        if slab.seq != self._came or slab.epoch > self.epoch:
            raise ProtocolError(
                f"the daemon sent slab {slab.seq} of epoch {slab.epoch}, but "
                f"slab {self._came} of epoch {self.epoch} was due"
            )
        self._check_open(slab)
        self._came += 1
        if not self.reads(slab.epoch):
            self.handed += 1
            return
        self._left_at = None
        self._bounds.on_slab(slab)
        self._epoch_check.on_batches(slab)
        before, self._before = tuple(self._before), []
        self.waiting.append((received, before))

    def on_passed(self, message: SentElsewhere | LaneEnded | PoolBegun) -> None:
        """Note that other consumers got batches, that a lane ended, or that a pool begins.

        Raises:
            ProtocolError: the epoch's End has come, or the daemon must not send this.
        """
        self._check_open(message)
        if self.reads(message.epoch):
            self._bounds.on_message(message)
            if isinstance(message, SentElsewhere):
                self._epoch_check.on_batches(message)
            elif isinstance(message, PoolBegun):
                self._epoch_check.on_pool(message)
            else:
                self._epoch_check.on_lane_ended(message)
            self._before.append(message)

    def end_epoch(self, end: End) -> None:
        """End an epoch. The stream fails with IncompleteEpoch if part of the epoch is missing.

        Raises:
            ProtocolError: the epoch has ended already, or nobody asked for it.
        """
        self._check_open(end)
        self._ended += 1
        if not self.reads(end.epoch):
            return
        fault = self._epoch_check.fault(end)
        if fault is not None:
            fault = f"epoch {end.epoch} {fault}: please report this as a bug"
        elif not self.shared and self.info.batches is not None and end.batches != self.info.batches:
            fault = (
                f"epoch {end.epoch} had {end.batches} batches and {end.rows} rows, but the feed promises "
                f"{self.info.batches} batches: `samples=` of the feed, or the length of its source, differs from "
                "what its generator yields"
            )
        if fault is None:
            self._end = end
        else:
            self.fail(IncompleteEpoch(fault, feed=self.info.name))

    def fail(self, error: PenstockError) -> None:
        """Fail with `error`, unless the stream has failed already. Slabs that came before are still handed over.

        If the stream is this consumer's alone, an error of the feed belongs to an epoch. If that epoch was left, the
        stream goes on without it.
        """
        if not self._alone or not isinstance(error, FeedError | MemoryBound):
            self.error = self.error or error
        elif self._left_at is not None:
            # Perhaps the daemon had not heard yet that the epoch was left. Otherwise the same error comes again.
            self.passed_by = self.passed_by or error
        elif self._open:
            self._failure = self._failure or error
        else:
            self.error = self.error or error

    def fail_now(self, error: PenstockError) -> None:
        """Fail with `error` now, and drop the queue: other consumers may own the slots of slabs that were not handed
        over. If the stream has failed already, or would have failed next, that error stays."""
        self.error = self.error or (None if self.waiting else self._failure) or error
        self.passed_by = None
        self._open = False
        self.waiting.clear()

    def on_disconnected(self) -> set[int]:
        """Drop everything that belongs to the lost connection. Return its `aliased`."""
        if self.waiting:
            self._end = None
        self.waiting.clear()
        self._failure = self.passed_by = None
        handed = self.handed if self._left_at is None else self._left_at
        self.handed_before, self.given = (handed if self.closed is None else min(handed, self.given)), 0
        self._left_at = None
        self._came = self.handed = self._ended = 0
        self._acked = (0, 0)
        self._released = []
        aliased, self.aliased = self.aliased, set()
        return aliased

    def place(self) -> Position:
        """Return the position at which another connection must begin. (A group's stream needs none.)"""
        if self.shared:
            return Position(self.info, 0)
        if self._open and self._end is None:
            return self.progress.newest()
        if self._start is not None and self._start.epoch > self.epoch:
            return self._start
        return Position(self.info, self.epoch + 1)

    def go_on_at(self, place: Position, first: int) -> list[Begin]:
        """Continue over a connection that begins at `place`, or in epoch `first` of a group's stream. Return the
        messages to send."""
        self.untold.clear()  # the daemon opened the session, so it knows of them
        if self.shared:
            self._shared_from = first
        if not self._open or self._end is not None:
            return []
        if self.epoch < self._shared_from:  # it ended for the others meanwhile, so all of it was handed over
            self._end = End(self.epoch, 0, 0, 0)
            return []
        self._start_session(place if place.epoch == self.epoch and not self.shared else None)
        if place.digest and place.epoch == self.epoch:
            self._digest = (place.epoch, place.digest)
        return [Begin(self.epoch)]

    def ack(self) -> Ack | None:
        """Return the acknowledgement that is due, or None. The caller sends it."""
        news = (self.handed, self._ended)
        if news == self._acked and not self._released:
            return None
        self._acked = news
        released, self._released = self._released[:MAX_RELEASED], self._released[MAX_RELEASED:]
        return Ack(self.handed, tuple(released), self._ended)

    def _start_session(self, place: Position | None) -> None:
        self._open, self._end = True, None
        self._epoch_check = EpochCheck(place)
        self._bounds = EpochBounds(self.info, place, ranks=self._ranks, shares=self.shared)
        self._before = []

    def reads(self, epoch: int) -> bool:
        """Whether slabs of this epoch are still wanted: the reader may come to them."""
        return epoch == self.epoch and self._open and self.error is None and self._failure is None

    def _check_epoch(self, message: Begun | Slab | LaneEnded | PoolBegun | SentElsewhere | End) -> None:
        """Raise ProtocolError for an epoch that nobody asked for."""
        if message.epoch > self.epoch:
            raise ProtocolError(
                f"the daemon sent {type(message).__name__} of epoch {message.epoch}, but the client asked for epoch "
                f"{self.epoch}"
            )

    def _check_open(self, message: Slab | LaneEnded | PoolBegun | SentElsewhere | End) -> None:
        """Raise ProtocolError for an epoch that nobody asked for, or whose End has come."""
        self._check_epoch(message)
        if self._end is not None and self.reads(message.epoch):
            raise ProtocolError(f"the daemon sent {type(message).__name__} of epoch {message.epoch} after its End")

    def _void(self) -> None:
        self.handed += len(self.waiting)
        self.waiting.clear()

    def check_readable(self) -> None:
        """Raise Refused if the stream was closed or has failed."""
        if self.closed is not None:
            raise Refused(self.closed)
        if self.error is not None:
            raise Refused(self.error)
