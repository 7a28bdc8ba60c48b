"""An open session at work: the receiver thread, the wait for slabs, their hand-off, and the release of their slots.

What is decided stands in _consumer_state.py; the transports are _local_transport.py and _tcp_transport.py. One lock
guards the stream and what is to be sent; no wait, no copy of a slab and no receiving happens under it.

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

from . import _process_hooks, _repeats, _state_dict
from ._connecting import Connector, Link, LostSession
from ._consumer_state import ConsumerState, Received
from ._counters import Counters
from ._mailbox import Mailbox
from ._memory import Pool
from ._reconnecting import GivenUp, Reconnector

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
    """What a session needs of _local_transport.py and _tcp_transport.py."""

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
    """One session. It lives until `close` (or `mailbox.closing`) and the death of the last array over a slot."""

    def __init__(
        self,
        connector: Connector,
        link: Link,
        mailbox: Mailbox,
        asked: float,
        reconnect: float,
        start: Position | None = None,
        consumed: int = 0,
    ) -> None:
        """Work over `link`, which `connector` found.

        Args:
            connector: finds another link. It is the session's from now on, with the private daemon.
            link: the open link, which begins at `start`.
            mailbox: the one that the link was opened with.
            asked: the time (monotonic) when the user asked for the connection.
            reconnect: seconds for which another way is looked for after a loss.
            start: the position at which the stream begins, None for epoch 0.
            consumed: batches before it.
        """
        self.url = str(connector)
        self.mailbox = mailbox
        self._state = ConsumerState(link.info, start, consumed, link.epoch if connector.identity.shares else None)
        self._token = link.session
        self._transport: Transport | None = link.transport
        self._name = link.transport.name
        self._lost_links: list[tuple[Transport, set[int]]] = []
        self._connector = connector
        self._replaced = False
        self._reconnector = Reconnector(mailbox, reconnect)
        self._missing: tuple[int, ...] = ()
        self._ready = threading.Condition()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._pool = Pool(keep=2)
        self._ending = False
        self._turned = time.monotonic()
        self._apart = 0.0
        self._closed = threading.Event()
        self._counters = Counters(asked)
        fresh = start is None and not connector.identity.shares and _repeats.may_repeat(link.info)
        self._reads = _repeats.registry.opened(connector.url if fresh else None, goes_on=start is not None)
        self._thread = threading.Thread(target=self._run, name="penstock-receiver", daemon=True)
        _process_hooks.register(self)
        self._thread.start()

    # --- the consumer, on any thread ---

    @property
    def error(self) -> PenstockError | None:
        """Why the stream failed, or None. It is not to be raised itself: see `Refused`."""
        return self._state.error

    @property
    def begun(self) -> bool:
        """Whether it was read."""
        return self._counters.begun

    @property
    def consumed(self) -> int:
        """Batches that were handed over since the stream's very beginning, in earlier runs too."""
        return self._state.progress.consumed

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._state.closed is not None

    def taken_over(self) -> Connector:
        """The way to the daemon, for another session in place of this one. From now on this one does not end the
        daemon, nor connect again when its connection breaks: that would take the place of the other."""
        connector, self._connector = self._connector, self._connector.without_daemon()
        self._replaced = True
        return connector

    def kept(self, connector: Connector) -> None:
        """No other session could be opened: this one stays as it was."""
        self._connector, self._replaced = connector, False

    def begin(self, unread: int = 0) -> int:
        """Begin the next epoch and return its number. Raises as `ConsumerState.begin`."""
        with self._ready:
            self._note()
            messages = self._state.begin(unread)
            self._counters.begins(unread)
            self._send(*messages)
            self._ready.notify_all()
            epoch = self._state.epoch
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
        """As `ConsumerState.nothing_left`."""
        return self._state.nothing_left(epoch)

    def take(self, epoch: int, timeout: float) -> Received | End | None:
        """The next slab of `epoch`, handed over with this call; its End; or None after `timeout` seconds without one.

        Over TCP the daemon is told of it at once. On the daemon's host the ledger says so, and one message tells with
        the next call (else within 0.1 s, or 1 s where no slot is held) that it was handed and, mostly, released.

        Raises as `ConsumerState.take`.
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
            state = self._state
            transport.mark(state.handed)
            quota = transport.quota
            copy = quota is not None and len(state.aliased) >= quota
            if copy:
                self._release()
                copy = len(state.aliased) >= (quota or 0)
            if quota is not None:
                state.aliased.add(item.slab.seq)  # also while it is copied: that keeps the connection
            self._counters.hands(item.slab, copy)
            if not transport.sends_anywhere:
                self._send()
        if copy:
            item = self._copied(item)  # with which the slot is released
            self.mailbox.wake()
        return item

    def _next(self, epoch: int) -> Received | End | None:
        transport = self._transport
        return self._state.take(epoch, hold=transport is None or transport.silent())

    def _wait(self, epoch: int, timeout: float) -> Received | End | None:
        began = time.monotonic()
        self._counters.waits(began)
        try:
            item = None
            while item is None and (left := began + timeout - time.monotonic()) > 0:
                self._send()  # the daemon may lack just the slots that were released
                self._ready.wait(min(left, SOON if self._state.aliased else STEP))
                item = self._next(epoch)
        finally:
            now = time.monotonic()
            self._counters.waited(began, now)
            if self._transport is not None and (seconds := self._counters.slow(now)) is not None:
                self._warn(seconds)
        return item

    def _warn(self, seconds: float) -> None:
        identity = self._connector.identity
        others = ", or another rank, for which all wait" if identity.world_size > 1 else ""
        others = ", or has another consumer of the group the epoch's last batches?" if identity.shares else others + "?"
        why = f"is the generator slow{others} `penstock status {self.url}` shows its workers"
        if self._missing:
            goes = "goes on" if self._counters.reconnects else "begins"
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

        Raises as `Progress.position`.
        """
        with self._ready:
            progress = self._state.progress
            count = progress.consumed - unread if consumed is None else consumed
            return progress.position(count), count

    def ends_epoch(self, consumed: int) -> bool:
        """As `Progress.ends_epoch`."""
        with self._ready:
            return self._state.progress.ends_epoch(consumed)

    def leave_soon(self, epoch: int) -> None:
        """Leave `epoch`; safe in a finalizer."""
        self.mailbox.left.append(epoch)
        self.mailbox.wake()

    def close_soon(self) -> None:
        """Close the session; safe in a finalizer."""
        self.mailbox.closing = True
        self.mailbox.wake()

    def close(self) -> None:
        """Close the session: iterations end with StreamClosed, and nothing is left but slots under living arrays."""
        self._reads.ends(self._counters.batches >= _repeats.MANY)
        with self._ready:
            self._state.close(StreamClosed(f"the connection to {self.url} was closed", feed=self._state.info.name))
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
        for transport in (self._transport, *(lost for lost, _ in self._lost_links)):
            if transport is not None:
                transport.forget()
        self.mailbox.wakeup = None
        self._ending = True
        self._closed.set()
        self._state.close(
            StreamClosed(
                f"the connection to {self.url} belongs to process {os.getppid()}, of which this one is a fork: "
                "connect anew here",
                feed=self._state.info.name,
            )
        )

    def stats(self, unread: int) -> dict[str, Any]:
        """See `Connection.stats`. Of the last slab `unread` batches were not read yet."""
        with self._ready:
            self._release()
            return {
                "feed": self._state.info.name,
                "transport": self._name,
                "epoch": self._state.epoch,
                **self._counters.stats(unread),
                "aliased": len(self._state.aliased) + sum(len(held) for _, held in self._lost_links),
            }

    # --- both, with the lock held ---

    def _release(self) -> None:
        if self._transport is not None:
            for seq in self._transport.released():
                self._state.released(seq)

    def _note(self) -> None:
        while self.mailbox.left:
            epoch = self.mailbox.left.popleft()
            if epoch == self._state.epoch:
                self._reads.ends(self._counters.batches >= _repeats.MANY)
            self._send(*self._state.leave(epoch))

    def _send(self, *messages: Message) -> None:
        """Put `messages` and what is to be acknowledged on their way. Where there is none, the next begins anew."""
        if self._transport is None:
            return
        self._outbox.extend(encode(message) for message in messages)
        if self._transport.sends_anywhere:
            self._flush()
        else:
            self.mailbox.wake()

    def _flush(self) -> None:
        transport = self._transport
        if transport is None:
            return
        self._release()
        while True:
            if not self._outbox:
                if self._state.closed is not None and not self._ending:
                    return  # Bye comes first: it says what of all that is void from now on had been handed over
                ack = self._state.ack()
                if ack is None:
                    return
                self._outbox.append(encode(ack))
            if not transport.send(self._outbox[0]):
                return
            self._outbox.popleft()

    def _holds(self) -> bool:
        """Whether arrays lie over slots."""
        return bool(self._state.aliased or self._lost_links)

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
            _process_hooks.unregister(self)
            self._reads.ends(self._counters.batches >= _repeats.MANY)
            with self._ready:
                for transport in (self._transport, *(lost for lost, _ in self._lost_links)):
                    if transport is not None:
                        transport.close()
                self._lost_links.clear()
            self.mailbox.wakeup = None
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
            self.mailbox.closing = True  # but the connection stays while arrays lie over its slots
        with self._ready:
            self._note()
            self._close_lost_links()
            self._give_up_on_ranks()
            ending = self.mailbox.closing and not self._ending
            if ending:
                self._ending = True
                self._outbox.append(encode(Bye(self._state.given if self._state.closed else self._state.handed)))
            self._flush()
        if ending:
            self._stop_daemon()

    def _give_up_on_ranks(self) -> None:
        """Wait no longer than for a connection until all ranks are back after a loss. With the lock."""
        if self._missing and (cause := self._reconnector.overdue) is not None:
            self._state.lost(
                ConnectionLost(
                    f"{cause.message}. In {self._reconnector.seconds:g} s not all were there again: "
                    f"{self._who_is_missing()} missing. End all ranks, and start the job again",
                    feed=self._state.info.name,
                )
            )
            self._ready.notify_all()
            self.mailbox.closing = True

    def _who_is_missing(self) -> str:
        """`rank 1 of 4 is`, `ranks 1, 3 of 4 are`."""
        ranks = ", ".join(map(str, self._missing[:20])) + (", ..." if len(self._missing) > 20 else "")
        words = ("rank", "is") if len(self._missing) == 1 else ("ranks", "are")
        return f"{words[0]} {ranks} of {self._connector.identity.world_size} {words[1]}"

    def _apply(self, message: ServerMessage | Received) -> None:
        if isinstance(message, Received):
            self._state.came(message)
            if self._reconnector.over() and self._reconnector.connections > 1:
                logger.warning("%s: connected again after %.1f s", self.url, self._reconnector.lasted)
        elif isinstance(message, LaneEnded | Passed):
            self._state.passed(message)
        elif isinstance(message, Begun):
            self._state.listed(message)
        elif isinstance(message, End):
            self._state.ended(message)
            self._flush()
        elif isinstance(message, Failed):
            self._failed(message.error.error())
        elif isinstance(message, Missing):
            if any(rank >= self._connector.identity.world_size for rank in message.ranks):
                raise ProtocolError(f"the daemon sent {message}; there are {self._connector.identity.world_size} ranks")
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
            self._state.fail(error)
        finally:
            del error  # it holds this frame, which would hold it, and the session

    def _stop_daemon(self) -> None:
        self._connector.stop()
        self._closed.set()

    def _lost(self, error: PenstockError) -> None:
        error = copy.copy(error)  # what was raised holds the frames that it came through, and these the session
        error.feed = error.feed or self._state.info.name
        with self._ready:
            self._state.lost(error)
            self._ready.notify_all()

    # --- another connection, by the receiver thread ---

    def _may_reconnect(self) -> bool:
        state, daemon = self._state, self._connector.daemon
        if self._ending or self._replaced or state.error is not None or state.closed is not None:
            return False
        return self._reconnector.seconds > 0 and not (daemon is not None and daemon.stopping)

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
                self._lost_links.append((self._transport, self._state.disconnected()))
            self._transport = None
            self._missing = ()
            self._outbox.clear()
            self._close_lost_links()
            self._ready.notify_all()
        if self._reconnector.lost(cause):
            logger.warning(
                "%s: %s. Trying for %g s to connect again; the stream then goes on where it was",
                self.url,
                cause.message,
                self._reconnector.seconds,
            )
        elif self._reconnector.connections == 1:
            logger.warning("%s: that connection broke before data came: %s. Still trying", self.url, cause.message)
        try:
            link, place = self._found()
        except GivenUp:
            with self._ready:
                self._ending = True
            return False
        except PenstockError as error:
            self._lost(error)
            return False
        with self._ready:
            self._transport, self._name, self._token = link.transport, link.transport.name, link.session
            self.url = str(self._connector)
            self._counters.reconnected()
            self._turned = time.monotonic()
            self._send(*self._state.joined(place, link.epoch))
            self._ready.notify_all()
        if self._reconnector.connections == 1:  # of more it is said when data comes
            logger.warning("%s: connected again after %.1f s", self.url, self._reconnector.lasted)
        return True

    def _found(self) -> tuple[Link, Position]:
        """Another way, and the position from which it begins. Raises as `Reconnector`."""
        places: list[Position] = []

        def start(info: FeedInfo) -> Position | None:
            _state_dict.for_feed(Position(self._state.info, 0), info, "the stream that was lost began with")
            with self._ready:
                self._note()
                places.append(self._state.place())
            return None if _state_dict.is_start(places[-1]) else places[-1]

        def last() -> LostSession:
            return self._token, self._state.given, tuple(self._state.untold)

        def idle() -> None:
            with self._ready:
                self._close_lost_links()

        return self._reconnector(self._connector, start, last, idle), places[-1]

    def _close_lost_links(self) -> None:
        """Let go of the connections that were lost, where no array lies over their slots any more. With the lock."""
        for transport, held in self._lost_links:
            held.difference_update(transport.released())
            if not held:
                transport.close()
        self._lost_links = [(transport, held) for transport, held in self._lost_links if held]
