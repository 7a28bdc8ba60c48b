"""An open session at work: the receiver thread, the wait for slabs, their hand-off, and the release of their slots.

What is decided stands in stream.py; the two transports are local.py and tcp.py. One lock guards the stream and what is
to be sent; no wait, no copy of a slab and no receiving happens under it.

When the connection is lost the receiver thread gets another, which begins behind the last slab that was handed. Until
then there is no transport: readers wait. A transport that was lost stays open until the last array over its slots is
gone, as the daemon that has the other end may still live.
"""

from __future__ import annotations

import collections
import copy
import logging
import os
import threading
import time
from typing import Any, Protocol

import numpy as np

from penstock_proto import (
    ConnectionLost,
    DaemonStopped,
    PenstockError,
    ProtocolError,
    StreamClosed,
)
from penstock_proto.codec import encode
from penstock_proto.messages import (
    Begun,
    Bye,
    End,
    Failed,
    FeedInfo,
    LaneEnded,
    Message,
    Missing,
    Opened,
    Passed,
    Pong,
    ServerMessage,
)
from penstock_proto.position import Position

from . import lifetimes, repeats, state
from .dial import Dial, Last, Way
from .memory import Pool
from .notes import Notes
from .redial import GivenUp, Redial
from .stream import Received, Stream
from .tally import Tally

STEP = 0.1
"""Seconds after which a wait looks around, and within which a released slot is reported."""
SOON = 0.005
"""Seconds within which a released slot is reported while the consumer waits for data."""
IDLE = 1.0
STOOD = 5.0
"""Seconds between two turns of the receiver thread after which this process stood still. Turns are a second apart."""
_CLOSE = 1.0

logger = logging.getLogger("penstock")


class Transport(Protocol):
    """What a session needs of local.py and tcp.py."""

    @property
    def name(self) -> str:
        """`local` or `tcp`."""

    @property
    def sends_anywhere(self) -> bool:
        """Whether `send` may be called on any thread, and not on the receiver's alone."""

    @property
    def quota(self) -> int | None:
        """How many handed slabs may stay aliased, or None if slabs lie in memory of this process."""

    def wait(self, timeout: float, for_room: bool) -> None: ...
    def limit(self, quota: int) -> None: ...
    def silent(self) -> bool: ...
    def receive(self) -> ServerMessage | Received | None: ...
    def released(self) -> list[int]: ...
    def send(self, data: bytes) -> bool: ...
    def mark(self, handed: int) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...


class Session:
    """One session. It lives until `close` (or `notes.closing`) and the death of the last array over a slot."""

    def __init__(
        self,
        dial: Dial,
        way: Way,
        notes: Notes,
        asked: float,
        reconnect: float,
        start: Position | None = None,
        consumed: int = 0,
    ) -> None:
        """Work over `way`, which `dial` found.

        Args:
            dial: finds another way. It is the session's from now on, with the private daemon.
            way: the open way, which begins at `start`.
            notes: those that the way was opened with.
            asked: the time (monotonic) when the user asked for the connection.
            reconnect: seconds for which another way is looked for after a loss.
            start: the position at which the stream begins, None for epoch 0.
            consumed: batches before it.
        """
        self.url = str(dial)
        self.notes = notes
        self._stream = Stream(way.info, start, consumed, way.epoch if dial.who.shares else None)
        self._token = way.session
        self._transport: Transport | None = way.transport
        self._name = way.transport.name
        self._lost_ways: list[tuple[Transport, set[int]]] = []
        self._dial = dial
        self._replaced = False
        self._redial = Redial(notes, reconnect)
        self._missing: tuple[int, ...] = ()
        self._ready = threading.Condition()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._pool = Pool(keep=2)
        self._ending = False
        self._turned = time.monotonic()
        self._apart = 0.0
        self._closed = threading.Event()
        self._tally = Tally(asked)
        fresh = start is None and not dial.who.shares and repeats.may_repeat(way.info)
        self._reads = repeats.streams.opened(dial.url if fresh else None, goes_on=start is not None)
        self._thread = threading.Thread(target=self._run, name="penstock-receiver", daemon=True)
        lifetimes.register(self)
        self._thread.start()

    # --- the consumer, on any thread ---

    @property
    def error(self) -> PenstockError | None:
        """Why the stream failed, or None. It is not to be raised itself: see `Refused`."""
        return self._stream.error

    @property
    def begun(self) -> bool:
        """Whether it was read."""
        return self._tally.begun

    @property
    def consumed(self) -> int:
        """Batches that were handed over since the stream's very beginning, in earlier runs too."""
        return self._stream.track.consumed

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._stream.closed is not None

    def taken_over(self) -> Dial:
        """The way to the daemon, for another session in place of this one. From now on this one does not end the
        daemon, nor connect again when its connection breaks: that would take the place of the other."""
        dial, self._dial = self._dial, self._dial.without_daemon()
        self._replaced = True
        return dial

    def kept(self, dial: Dial) -> None:
        """No other session could be opened: this one stays as it was."""
        self._dial, self._replaced = dial, False

    def begin(self, unread: int = 0) -> int:
        """Begin the next epoch and return its number. Raises as `Stream.begin`."""
        with self._ready:
            self._note()
            messages = self._stream.begin(unread)
            self._tally.begins(unread)
            self._send(*messages)
            self._ready.notify_all()
            epoch = self._stream.epoch
        if self._reads.begins():
            logger.warning(
                "%s: epoch 0 of this feed is read again, from a new connection, and gives the same batches as the %d "
                "times before. Make the dataset (or connection) once, and iterate it once for each epoch; or go on "
                "where the last one was: connect(state=...)",
                self.url,
                self._reads.before,
            )
        return epoch

    def nothing_left(self, epoch: int) -> bool:
        """As `Stream.nothing_left`."""
        return self._stream.nothing_left(epoch)

    def take(self, epoch: int, timeout: float) -> Received | End | None:
        """The next slab of `epoch`, handed over with this call; its End; or None after `timeout` seconds without one.

        Over TCP the daemon is told of it at once. On the daemon's host the ledger says so, and one message tells with
        the next call (else within 0.1 s, or 1 s where no slot is held) that it was handed and, mostly, released.

        Raises as `Stream.take`.
        """
        with self._ready:
            transport = self._transport
            if transport is not None and transport.sends_anywhere:
                self._send()
            item = self._next(epoch)
            if item is None:
                item = self._wait(epoch, timeout)
            transport = self._transport
            if not isinstance(item, Received) or transport is None:
                if isinstance(item, End):
                    self._reads.ends(whole=True)
                return item
            stream = self._stream
            transport.mark(stream.handed)
            quota = transport.quota
            copy = quota is not None and len(stream.aliased) >= quota
            if copy:
                self._release()
                copy = len(stream.aliased) >= (quota or 0)
            if quota is not None:
                stream.aliased.add(item.slab.seq)  # also while it is copied: that keeps the connection
            self._tally.hands(item.slab, copy)
            if not transport.sends_anywhere:
                self._send()
        if copy:
            item = self._copied(item)  # with which the slot is released
            self.notes.ring()
        return item

    def _next(self, epoch: int) -> Received | End | None:
        transport = self._transport
        return self._stream.take(epoch, hold=transport is None or transport.silent())

    def _wait(self, epoch: int, timeout: float) -> Received | End | None:
        began = time.monotonic()
        self._tally.waits(began)
        try:
            item = None
            while item is None and (left := began + timeout - time.monotonic()) > 0:
                self._send()  # the daemon may lack just the slots that were released
                self._ready.wait(min(left, SOON if self._stream.aliased else STEP))
                item = self._next(epoch)
        finally:
            now = time.monotonic()
            self._tally.waited(began, now)
            if self._transport is not None and (seconds := self._tally.slow(now)) is not None:
                self._warn(seconds)
        return item

    def _warn(self, seconds: float) -> None:
        who = self._dial.who
        others = ", or another rank, for which all wait" if who.world_size > 1 else ""
        others = ", or has another consumer of the group the epoch's last batches?" if who.shares else others + "?"
        why = f"is the generator slow{others} `penstock status {self.url}` shows its workers"
        if self._missing:
            goes = "goes on" if self._tally.reconnects else "begins"
            why = f"{self._who_is_missing()} not there, and the stream {goes} when all are"
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
        logger.warning("%s: no data for %.0f s, since %s; %s", self.url, seconds, since, why)

    def _copied(self, item: Received) -> Received:
        private = self._pool.take(item.layout.nbytes)
        source, target = np.asarray(item.root), np.asarray(private)
        for start, stop in item.layout.regions(item.slab.first, item.slab.batches):
            np.copyto(target[start:stop], source[start:stop])
        return Received(item.slab, item.layout, private)

    def place(self, consumed: int | None, unread: int) -> tuple[Position, int]:
        """The position behind `consumed` batches (None: all that were handed over but `unread`), and how many.

        Raises as `Track.position`.
        """
        with self._ready:
            track = self._stream.track
            count = track.consumed - unread if consumed is None else consumed
            return track.position(count), count

    def ends_epoch(self, consumed: int) -> bool:
        """As `Track.ends_epoch`."""
        with self._ready:
            return self._stream.track.ends_epoch(consumed)

    def leave_soon(self, epoch: int) -> None:
        """Leave `epoch`; safe in a finalizer."""
        self.notes.left.append(epoch)
        self.notes.ring()

    def close_soon(self) -> None:
        """Close the session; safe in a finalizer."""
        self.notes.closing = True
        self.notes.ring()

    def close(self) -> None:
        """Close the session: iterations end with StreamClosed, and nothing is left but slots under living arrays."""
        self._reads.ends(self._tally.batches >= repeats.MANY)
        with self._ready:
            self._stream.close(StreamClosed(f"the connection to {self.url} was closed", feed=self._stream.info.name))
            self._ready.notify_all()
        self.close_soon()
        if threading.current_thread() is not self._thread:
            self._closed.wait(2 * _CLOSE)
            if not self._holds():
                self._thread.join(_CLOSE)

    at_exit = close

    def forget(self) -> None:
        """In a forked child: the session is the parent's."""
        self._ready = threading.Condition()
        for transport in (self._transport, *(lost for lost, _ in self._lost_ways)):
            if transport is not None:
                transport.forget()
        self.notes.bell = None
        self._ending = True
        self._closed.set()
        self._stream.close(
            StreamClosed(
                f"the connection to {self.url} belongs to process {os.getppid()}, of which this one is a fork: "
                "connect anew here",
                feed=self._stream.info.name,
            )
        )

    def stats(self, unread: int) -> dict[str, Any]:
        """See `Connection.stats`. Of the last slab `unread` batches were not read yet."""
        with self._ready:
            self._release()
            return {
                "feed": self._stream.info.name,
                "transport": self._name,
                "epoch": self._stream.epoch,
                **self._tally.stats(unread),
                "aliased": len(self._stream.aliased) + sum(len(held) for _, held in self._lost_ways),
            }

    # --- both, with the lock held ---

    def _release(self) -> None:
        if self._transport is not None:
            for seq in self._transport.released():
                self._stream.released(seq)

    def _note(self) -> None:
        while self.notes.left:
            epoch = self.notes.left.popleft()
            if epoch == self._stream.epoch:
                self._reads.ends(self._tally.batches >= repeats.MANY)
            self._send(*self._stream.leave(epoch))

    def _send(self, *messages: Message) -> None:
        """Put `messages` and what is to be acknowledged on their way. Where there is none, the next begins anew."""
        if self._transport is None:
            return
        self._outbox.extend(encode(message) for message in messages)
        if self._transport.sends_anywhere:
            self._flush()
        else:
            self.notes.ring()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        self._release()
        while True:
            if not self._outbox:
                if self._stream.closed is not None and not self._ending:
                    return  # Bye comes first: it says what of all that is void from now on had been handed over
                ack = self._stream.ack()
                if ack is None:
                    return
                self._outbox.append(encode(ack))
            if not transport.send(self._outbox[0]):
                return
            self._outbox.popleft()

    def _holds(self) -> bool:
        """Whether arrays lie over slots."""
        return bool(self._stream.aliased or self._lost_ways)

    # --- the receiver thread ---

    def _run(self) -> None:
        try:
            while not self._over():
                try:
                    self._turn()
                except (ConnectionLost, DaemonStopped) as error:
                    if not self._regained(error):
                        break
        except Exception as error:  # a bug here must not look like a slow daemon
            logger.exception("the receiver thread of %s failed", self.url)
            self._lost(PenstockError(f"the client failed: {error!r}; please report this as a bug"))
        finally:
            lifetimes.unregister(self)
            self._reads.ends(self._tally.batches >= repeats.MANY)
            with self._ready:
                for transport in (self._transport, *(lost for lost, _ in self._lost_ways)):
                    if transport is not None:
                        transport.close()
                self._lost_ways.clear()
            self.notes.bell = None
            self._stop_daemon()

    def _over(self) -> bool:
        return self._ending and not self._holds()

    def _turn(self) -> None:
        transport = self._transport
        assert transport is not None
        now = time.monotonic()
        self._apart, self._turned = now - self._turned, now
        transport.wait(STEP if self._holds() or self._outbox else IDLE, bool(self._outbox))
        try:
            while (message := transport.receive()) is not None:
                with self._ready:
                    self._apply(message)
                    self._ready.notify_all()
                del message
        except ProtocolError as error:
            self._lost(error)
            self.notes.closing = True  # but the connection stays while arrays lie over its slots
        with self._ready:
            self._note()
            self._close_lost_ways()
            self._give_up_on_ranks()
            ending = self.notes.closing and not self._ending
            if ending:
                self._ending = True
                self._outbox.append(encode(Bye(self._stream.given if self._stream.closed else self._stream.handed)))
            self._flush()
        if ending:
            self._stop_daemon()

    def _give_up_on_ranks(self) -> None:
        """Wait no longer than for a connection until all ranks are back after a loss. With the lock."""
        if self._missing and (cause := self._redial.overdue) is not None:
            self._stream.lost(
                ConnectionLost(
                    f"{cause.message}. In {self._redial.seconds:g} s not all were there again: "
                    f"{self._who_is_missing()} missing. End all ranks, and start the job again",
                    feed=self._stream.info.name,
                )
            )
            self._ready.notify_all()
            self.notes.closing = True

    def _who_is_missing(self) -> str:
        """`rank 1 of 4 is`, `ranks 1, 3 of 4 are`."""
        ranks = ", ".join(map(str, self._missing[:20])) + (", ..." if len(self._missing) > 20 else "")
        words = ("rank", "is") if len(self._missing) == 1 else ("ranks", "are")
        return f"{words[0]} {ranks} of {self._dial.who.world_size} {words[1]}"

    def _apply(self, message: ServerMessage | Received) -> None:
        if isinstance(message, Received):
            self._stream.came(message)
            if self._redial.over() and self._redial.connections > 1:
                logger.warning("%s: connected again after %.1f s", self.url, self._redial.lasted)
        elif isinstance(message, LaneEnded | Passed):
            self._stream.passed(message)
        elif isinstance(message, Begun):
            self._stream.listed(message)
        elif isinstance(message, End):
            self._stream.ended(message)
            self._flush()
        elif isinstance(message, Failed):
            self._failed(message.error.error())
        elif isinstance(message, Missing):
            if any(rank >= self._dial.who.world_size for rank in message.ranks):
                raise ProtocolError(f"the daemon sent {message}; there are {self._dial.who.world_size} ranks")
            self._missing = message.ranks
        elif isinstance(message, Opened):
            if self._transport is not None:
                self._transport.limit(message.quota)
        elif not isinstance(message, Pong):
            raise ProtocolError(f"the daemon sent {type(message).__name__} in an open session")

    def _failed(self, error: PenstockError) -> None:
        try:
            if isinstance(error, ConnectionLost | DaemonStopped) and self._may_reconnect():
                raise error
            self._stream.fail(error)
        finally:
            del error  # it holds this frame, which would hold it, and the session

    def _stop_daemon(self) -> None:
        self._dial.stop()
        self._closed.set()

    def _lost(self, error: PenstockError) -> None:
        error = copy.copy(error)  # what was raised holds the frames that it came through, and these the session
        error.feed = error.feed or self._stream.info.name
        with self._ready:
            self._stream.lost(error)
            self._ready.notify_all()

    # --- another connection, by the receiver thread ---

    def _may_reconnect(self) -> bool:
        stream, daemon = self._stream, self._dial.daemon
        if self._ending or self._replaced or stream.error is not None or stream.closed is not None:
            return False
        return self._redial.seconds > 0 and not (daemon is not None and daemon.stopping)

    def _regained(self, cause: PenstockError) -> bool:
        """Get another connection after a loss; whether there is one. If not, the stream has failed, or is closed."""
        if self._transport is not None and self._transport.silent() and self._apart > STOOD:
            cause = ConnectionLost(
                f"this process stood still for {self._apart:.0f} s, so the daemon has let go of its session"
            )
        if not self._may_reconnect():
            self._lost(cause)
            return False
        with self._ready:
            if self._transport is not None:
                self._lost_ways.append((self._transport, self._stream.cut()))
            self._transport = None
            self._missing = ()
            self._outbox.clear()
            self._close_lost_ways()
            self._ready.notify_all()
        if self._redial.lost(cause):
            logger.warning(
                "%s: %s. Trying for %g s to connect again; the stream then goes on where it was",
                self.url,
                cause.message,
                self._redial.seconds,
            )
        elif self._redial.connections == 1:
            logger.warning("%s: that connection broke before data came: %s. Still trying", self.url, cause.message)
        try:
            way, place = self._found()
        except GivenUp:
            with self._ready:
                self._ending = True
            return False
        except PenstockError as error:
            self._lost(error)
            return False
        with self._ready:
            self._transport, self._name, self._token = way.transport, way.transport.name, way.session
            self.url = str(self._dial)
            self._tally.reconnected()
            self._turned = time.monotonic()
            self._send(*self._stream.joined(place, way.epoch))
            self._ready.notify_all()
        if self._redial.connections == 1:  # of more it is said when data comes
            logger.warning("%s: connected again after %.1f s", self.url, self._redial.lasted)
        return True

    def _found(self) -> tuple[Way, Position]:
        """Another way, and the position from which it begins. Raises as `Redial`."""
        places: list[Position] = []

        def start(info: FeedInfo) -> Position | None:
            state.fitting(Position(self._stream.info, 0), info, "the stream that was lost began with")
            with self._ready:
                self._note()
                places.append(self._stream.place())
            return None if state.is_start(places[-1]) else places[-1]

        def last() -> Last:
            return self._token, self._stream.given, tuple(self._stream.untold)

        def idle() -> None:
            with self._ready:
                self._close_lost_ways()

        return self._redial(self._dial, start, last, idle), places[-1]

    def _close_lost_ways(self) -> None:
        """Let go of the connections that were lost, where no array lies over their slots any more. With the lock."""
        for transport, held in self._lost_ways:
            held.difference_update(transport.released())
            if not held:
                transport.close()
        self._lost_ways = [(transport, held) for transport, held in self._lost_ways if held]
