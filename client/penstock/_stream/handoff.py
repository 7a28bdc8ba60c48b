"""Hands slabs to the consumer, and releases their slots.

The receiver thread (receiver.py) puts messages in; consumers take slabs out, on any thread. consumer_state.py holds
the state of the stream and makes the decisions.

One lock, `_lock`, guards everything here. Public methods take it, private methods expect it, and properties read one
value without it. No thread waits under it (except on the condition itself), copies a slab under it, or receives under
it. Messages are sent under it if the transport allows any thread to send: a send never blocks. Only the receiver thread
replaces the transport.

While the connection is lost there is no transport, and consumers wait.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import structs

from penstock_proto import ConnectionLost, IncompleteEpoch, PenstockError, ProtocolError, StreamClosed
from penstock_proto.batches.position import Position
from penstock_proto.messages import End, Had, Message, MissingRanks, Opened, Pong, ServerMessage

from .._state import repeats
from .._state.build_reads import Again, BuildReads
from .._state.consumer_state import ConsumerState, Received
from .._state.counters import Counters
from .._state.hand_overs import HandOvers
from .._state.mailbox import Mailbox
from .._state.memory import Pool
from .._transport.transport import LostTransports, Transport
from .connecting import Link, Named
from .outbox import Outbox
from .renewed_error import renewed
from .slow_waits import Missing

STEP = 0.1
"""Longest wait in seconds before a waiting consumer checks for other events."""
SOON = 0.005
"""Seconds within which the daemon learns of a released slot while the consumer waits for data."""


class HandOff:
    """The hand-off of one stream, over one connection after another.

    Attributes:
        url: the URL of the feed.
        keys: the client's keys, or None.
        mailbox: the requests that finalizers leave for the receiver thread.
        transport: the transport of the current connection, or None while there is none.
        missing: the ranks that the stream waits for.
        hand_overs: records when each batch was handed over, or None if nobody measures that.
        work: if this process makes the stream itself: makes batches until one is there, or for the given number of
            seconds. The consumer's thread calls it instead of waiting, without the lock.
    """

    work: Callable[[float], None] | None = None

    def __init__(
        self,
        link: Link,
        mailbox: Mailbox,
        connector: Named,
        asked: float,
        start: Position | None = None,
        consumed: int = 0,
    ) -> None:
        """Hand over the stream that arrives over `link`.

        Args:
            link: the first connection, whose stream begins at `start`.
            mailbox: the mailbox that the link was opened with.
            connector: opened the link.
            asked: the time (monotonic) when the user asked for the connection.
            start: the position at which the stream begins, None for epoch 0.
            consumed: batches before that position.
        """
        identity = connector.identity
        self.url = str(connector)
        self.keys = connector.keys
        self.mailbox = mailbox
        self.transport: Transport | None = link.transport
        self.missing = Missing(identity)
        self._name = link.transport.name
        self._lock = threading.RLock()  # not the condition's own `with`, within which a signal may lose the lock
        self._ready = threading.Condition(self._lock)
        shared_from = link.epoch if identity.shares else None
        self._state = ConsumerState(link.info, start, consumed, shared_from, identity.world_size or 1)
        self._lost = LostTransports()
        self._outbox = Outbox(self._state)
        self._again = Again()
        self._begun = False
        self._settled = False
        """Whether the consumer waits for the receiver thread: then a signal may interrupt it."""
        self._in_doubt = False
        """Whether a signal interrupted the consumer elsewhere, so that another connection is needed."""
        self._begun_for_nobody = False
        """Whether an epoch has begun, but a signal interrupted the consumer before it learned that."""
        self._pool = Pool(keep=2)
        self._counters = Counters(asked)
        self._consumed_before = consumed
        self.hand_overs: HandOvers | None = None
        fresh = start is None and not identity.shares and repeats.may_repeat(link.info)
        self._reads = repeats.registry.register(connector.url if fresh else None, goes_on=start is not None)

    # --- consumers, on any thread ---

    @property
    def error(self) -> PenstockError | None:
        """The error that ended the stream, or None. Raise a copy of it: see `Refused`."""
        return self._state.error

    @property
    def begun(self) -> bool:
        """Whether an epoch was begun, other than to build a model."""
        return self._begun

    @property
    def consumed(self) -> int:
        """Batches handed over since the very beginning of the stream, including earlier runs."""
        with self._lock:
            return self._state.progress.consumed - self._again.batches

    @property
    def handed_over(self) -> int:
        """All batches handed over since the very beginning of the stream, including earlier runs."""
        return self._state.progress.consumed

    @property
    def waited(self) -> tuple[float, float]:
        """Seconds that consumers have waited for data, and in how many of these the data was coming."""
        return self._counters.waited_seconds

    @property
    def closed(self) -> bool:
        """Whether the stream was closed."""
        return self._state.closed is not None

    def begin(self, unread: int = 0, build: BuildReads | None = None) -> int:
        """Begin the next epoch and return its number. Raises as `ConsumerState.begin`.

        `build`: where to keep what this iteration reads, if Keras reads it only to build a model. The next iteration
        then begins the same epoch, and is handed over the same batches.
        """
        before, self._settled = self._state.epoch, False
        try:
            return self._begin(unread, build)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._begin_interrupted(before)
            raise

    def _begin(self, unread: int, build: BuildReads | None) -> int:
        with self._lock:
            if self._begun_for_nobody:
                self._begun_for_nobody = False
                return self._state.epoch
            self._leave_dropped_epochs()
            self._state.check_readable()
            self._begun = self._begun or build is None
            again = self._again.begin(build, self.url)
            if self.hand_overs is not None and build is None:
                self.hand_overs.on_epoch_begun()
            if again:
                return self._state.epoch
            messages = self._state.begin(unread)
            self._counters.begin(unread)
            self._send(*messages)
            if self._state.passed_by is not None:
                self.mailbox.wake()
            self._ready.notify_all()
            epoch = self._state.epoch
        self._reads.begin(self.url)
        return epoch

    def go_on(self, build: BuildReads) -> bool:
        """As `Again.go_on`: this iteration then counts like any other."""
        with self._lock:
            goes_on = self._again.go_on(build)
            self._begun = self._begun or goes_on
            return goes_on

    def nothing_left(self, epoch: int) -> bool:
        """As `ConsumerState.nothing_left`."""
        return self._state.nothing_left(epoch)

    def take(self, epoch: int, timeout: float, build: BuildReads | None = None) -> Received | End | None:
        """Hand over the next slab of `epoch`; or return its End, or None after `timeout` seconds without either.

        Over TCP the client tells the daemon at once. On the daemon's host the ledger records the hand-over. Then one
        message at the next call (else within 0.1 s, or 1 s if no slot is held) reports that the slab was handed over
        and, in most cases, released.

        `build`: that of `begin`.

        Raises as `ConsumerState.take`.
        """
        self._settled = False
        with self._lock:
            self._check_newest(epoch, build)
            item, copy = self._again.next(), False
            if item is None:
                item, copy = self._take(epoch, timeout, build)
            if build is not None and item is not None and not (isinstance(item, End) and self.nothing_left(epoch)):
                build.keep(item)
            if isinstance(item, End) and self.hand_overs is not None and build is None:
                self.hand_overs.on_epoch_ended()
        if not isinstance(item, Received):
            return item
        began, whole = item.began, item.whole
        if copy or build is not None:
            try:
                item = self._copied(item)  # drops the original, which releases the slot
            except PenstockError as error:  # the batch counts as handed over, so the stream cannot go on without it
                self.lose(renewed(error))
                raise
            self.mailbox.wake()
        if self.hand_overs is not None and build is None:
            self.hand_overs.on_handed(item.slab.batches, began, whole, time.monotonic())
        return item

    def interrupted(self, epoch: int, consumed: int) -> None:
        """Go on as if only `consumed` batches had been handed over: a signal has interrupted the consumer of `epoch`
        within `take`, or while it read the slab. If another epoch has begun, its batches stay handed over.

        It may have interrupted anything, such as a message that was sent and still counts as unsent. So the stream goes
        on over another connection, unless the consumer only waited.
        """
        with self._lock:
            state = self._state
            if self._settled and state.progress.consumed == consumed:
                return
            if not state.shared and epoch == state.epoch:
                state.go_back(consumed)
                self._counters.take_back(self._counters.batches - (consumed - self._consumed_before))
            self._doubt()

    def _begin_interrupted(self, before: int) -> None:
        with self._lock:
            if self._state.epoch > before:
                self._begun_for_nobody = True
                self._state.begin_anyway()
            self._doubt()

    def _doubt(self) -> None:
        """Ask the receiver thread for another connection. Until then nothing is sent, handed over or taken in."""
        self._outbox.clear()
        if self.transport is not None and self.readable:
            self._in_doubt = True
            self._state.passed_by = ConnectionLost("a signal interrupted the reader")
            self.mailbox.wake()

    def position(self, consumed: int | None, unread: int) -> tuple[Position, int]:
        """Return the position after `consumed` batches, and this count. None: all handed over, except `unread`.

        Raises as `Progress.position`.
        """
        with self._lock:
            progress = self._state.progress
            count = progress.consumed - self._unread(unread) if consumed is None else consumed
            return progress.position(count), count

    def ends_epoch(self, consumed: int) -> bool:
        """As `Progress.ends_epoch`."""
        with self._lock:
            return self._state.progress.ends_epoch(consumed)

    def stats(self, unread: int) -> dict[str, Any]:
        """Return the figures for `Connection.stats`. `unread` batches of the last slab were not read yet."""
        with self._lock:
            self._release()
            return {
                "feed": self._state.info.name,
                "transport": self._name,
                "epoch": self._state.epoch,
                **self._counters.stats(self._unread(unread)),
                "aliased": len(self._state.aliased) + len(self._lost),
            }

    def close(self) -> None:
        """End iterations with StreamClosed."""
        self._stop_reading()
        with self._lock:
            self._state.close(StreamClosed(f"the connection to {self.url} was closed", feed=self._state.info.name))
            self._again.clear()
            self._ready.notify_all()

    def forget(self) -> None:
        """In a forked child: leave the stream and its connections to the parent."""
        self._lock = threading.RLock()
        self._ready = threading.Condition(self._lock)
        self._lost.forget()
        if self.transport is not None:
            self.transport.forget()
        self._state.close(
            StreamClosed(
                f"the connection to {self.url} belongs to process {os.getppid()}, which this process was forked from: "
                "connect again here",
                feed=self._state.info.name,
            )
        )

    # --- the receiver thread ---

    @property
    def readable(self) -> bool:
        """Whether the stream has neither failed nor been closed."""
        return self._state.error is None and self._state.closed is None

    @property
    def holds_slots(self) -> bool:
        """Whether arrays lie over slots."""
        return bool(self._state.aliased or self._lost)

    @property
    def has_news(self) -> bool:
        """Whether a consumer that waits has something to take: a slab, the epoch's End or an error."""
        with self._lock:
            return self._state.has_news

    @property
    def passed_by(self) -> PenstockError | None:
        """As `ConsumerState.passed_by`."""
        return self._state.passed_by

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room to be sent."""
        return bool(self._outbox)

    @property
    def handed(self) -> tuple[int, tuple[Had, ...]]:
        """How many slabs of the lost connection were handed over, and, in a group, the latest of them."""
        return self._state.handed_before, tuple(self._state.untold)

    def queue(self, received: Received) -> None:
        """Queue a slab. Raises as `ConsumerState.queue`."""
        received.whole = time.monotonic()
        received.began = received.began or received.whole
        with self._lock:
            if not self._in_doubt:
                self._state.queue(received)
            self._ready.notify_all()

    def apply(self, message: ServerMessage) -> None:
        """Apply a message that concerns the stream.

        Raises:
            ProtocolError: the daemon must not send it now.
        """
        with self._lock:
            if self._in_doubt:
                return
            if self._state.apply(message):
                if isinstance(message, End):
                    self._flush()
            elif isinstance(message, MissingRanks):
                self.missing.on_missing_ranks(message)
            elif isinstance(message, Opened):
                if self.transport is not None:
                    self.transport.limit(message.quota)
            elif not isinstance(message, Pong):
                raise ProtocolError(f"the daemon sent {type(message).__name__} in an open session")
            self._ready.notify_all()

    def fail(self, error: PenstockError) -> None:
        """End the stream with `error`, after the slabs that came before it."""
        with self._lock:
            self._state.fail(error)
            self._ready.notify_all()

    def lose(self, error: PenstockError) -> None:
        """End the stream with `error` now: another consumer may own the slots of queued slabs."""
        with self._lock:
            self._state.fail_now(error)
            self._ready.notify_all()

    def lose_too_long(self, epoch: int, batches: int) -> IncompleteEpoch:
        """End the stream, because an epoch has more than `batches`, which the feed promises. Return the error.

        Only a consumer that never asks for more than that needs this. To others the daemon says it at the epoch's end.
        """
        error = IncompleteEpoch(
            f"epoch {epoch} has more than the {batches} batches that the feed promises: its generator yields more than "
            "`samples=` of the feed says, or its source has more than its length",
            feed=self._state.info.name,
        )
        self.lose(error)
        return error

    def tend(self, last: bool) -> None:
        """Leave dropped epochs, close lost connections, and send due messages. `last`: send Close too, since nobody
        reads on."""
        with self._lock:
            self._leave_dropped_epochs()
            self._lost.close_unused()
            if last:
                self._outbox.add_close()
            self._flush()

    def disconnect(self) -> None:
        """Let consumers wait for another connection. The lost one stays open while arrays lie over its slots."""
        with self._lock:
            if self.transport is not None:
                self._lost.add(self.transport, self._state.on_disconnected())
            self.transport, self._in_doubt = None, False
            self.missing.clear()
            self._outbox.clear()
            self._ready.notify_all()

    def restart_position(self) -> Position:
        """Return the position at which another connection must begin."""
        with self._lock:
            self._leave_dropped_epochs()
            return self._state.place()

    def close_lost_transports(self) -> None:
        """Close lost connections whose slots no array uses any longer."""
        with self._lock:
            self._lost.close_unused()

    def connect(self, link: Link, position: Position, url: str, *, lost: bool = True) -> None:
        """Continue over another connection, which begins at `position`. `lost`: the one before was lost, not replaced
        because the job moved to another stream."""
        with self._lock:
            self.transport, self._name, self.url = link.transport, link.transport.name, url
            if lost:
                self._counters.count_reconnection()
            self._send(*self._state.go_on_at(position, link.epoch))
            self._ready.notify_all()

    def shut(self) -> None:
        """Close all connections: no array lies over a slot any longer, or the receiver thread failed."""
        self._stop_reading()
        with self._lock:
            self._lost.close()
            if self.transport is not None:
                self.transport.close()

    # --- both, with the lock ---

    def _take(self, epoch: int, timeout: float, build: BuildReads | None) -> tuple[Received | End | None, bool]:
        """Take the next item from the stream. Return it, and whether it must be copied."""
        transport = self.transport
        if transport is not None and transport.sends_anywhere:
            self._send()
        item = self._next(epoch)
        if item is None:
            item = self._wait(epoch, timeout, build)
        transport = self.transport
        if not isinstance(item, Received) or transport is None:
            if isinstance(item, End):
                self._reads.end(whole=True)
            return item, False
        state = self._state
        transport.mark(state.handed)
        quota = transport.quota
        copy = quota is not None and len(state.aliased) >= quota
        if copy:
            self._release()
            copy = len(state.aliased) >= (quota or 0)
        copy = copy or item.slab.scattered  # TensorFlow can take batches in place only if they lie together
        if quota is not None:
            state.aliased.add(item.slab.seq)  # during a copy too: this keeps the connection open
        self._counters.count_handed_over(item, copy or item.copied)
        if not transport.sends_anywhere:
            self._send()
        return item, copy

    def _copied(self, item: Received) -> Received:
        """Return a slab with copies of its batches, at the first places of private memory.

        Raises:
            MemoryBound: there is no memory for it.
        """
        slab = item.slab
        private = self._pool.take(item.layout.nbytes)
        item.layout.copy(np.asarray(item.root), np.asarray(private), slab.first, slab.batches, slab.stride)
        return Received(structs.replace(slab, first=0, stride=1), item.layout, private)

    def _check_newest(self, epoch: int, build: BuildReads | None) -> None:
        """Raise Refused if a newer iteration has begun in the same epoch."""
        if build is not self._again.reads and self._state.closed is None:
            raise self._state.superseded(epoch)

    def _unread(self, unread: int) -> int:
        """Return how many batches that were taken from the stream the consumer has not read, or will read again, if it
        has not read `unread` batches of the latest slab."""
        return self._again.batches + (unread if self._again.reads is None else 0)

    def _next(self, epoch: int) -> Received | End | None:
        transport = self.transport
        return self._state.take(epoch, hold=transport is None or self._in_doubt or transport.silent())

    def _wait(self, epoch: int, timeout: float, build: BuildReads | None) -> Received | End | None:
        began = time.monotonic()
        self._counters.waiting(began)
        try:
            item = None
            while item is None and (left := began + timeout - time.monotonic()) > 0:
                self._send()  # the daemon may need exactly the slots that were released
                if self.work is None:
                    self._settled = True
                    self._ready.wait(min(left, SOON if self._state.aliased else STEP))
                    self._settled = False
                else:
                    self._work(self.work, left)
                self._check_newest(epoch, build)
                item = self._next(epoch)
        finally:
            now = time.monotonic()
            self._counters.count_wait(began, now)
            here = self.work is not None  # then the user can see a slow generator, or a breakpoint
            if self.transport is not None and not here and (seconds := self._counters.slow(now)) is not None:
                self.missing.warn_of_wait(self.url, seconds, reconnected=self._counters.reconnects > 0)
        return item

    def _work(self, work: Callable[[float], None], seconds: float) -> None:
        self._lock.release()
        try:
            work(seconds)
        finally:
            self._lock.acquire()

    def _release(self) -> None:
        if self.transport is not None:
            for seq in self.transport.take_released():
                self._state.release(seq)

    def _leave_dropped_epochs(self) -> None:
        while self.mailbox.left:
            epoch = self.mailbox.left.popleft()
            if epoch == self._state.epoch:
                self._stop_reading()
            self._send(*self._state.leave(epoch))

    def _stop_reading(self) -> None:
        self._reads.end(self._counters.batches >= repeats.MANY)

    def _send(self, *messages: Message) -> None:
        """Send `messages`, then the acknowledgement that is due. Without a connection send nothing, because the next
        one begins from the state."""
        if self.transport is None or self._in_doubt:
            return
        self._outbox.add(messages)
        if self.transport.sends_anywhere:
            self._flush()
        else:
            self.mailbox.wake()

    def _flush(self) -> None:
        transport = self.transport
        if transport is None or self._in_doubt:
            return
        self._release()
        transport.tell(self._state.handed)
        self._outbox.send(transport)
