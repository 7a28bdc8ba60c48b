"""An open session at work: the receiver thread, the wait for slabs, their hand-off, and the release of their slots.

What is decided stands in stream.py; the two transports are local.py and tcp.py. One lock guards the stream and what is
to be sent; no wait, no copy of a slab and no receiving happens under it.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from typing import Any, Protocol

import numpy as np

from penstock_proto import ConnectionLost, PenstockError, ProtocolError, StreamClosed
from penstock_proto.codec import encode
from penstock_proto.messages import Bye, End, Failed, FeedInfo, Message, Opened, Pong, ServerMessage

from . import lifetimes
from .memory import Pool
from .notes import Notes
from .stream import Received, Stream

STEP = 0.1
"""Seconds after which a wait looks around, and within which a released slot is reported."""
SOON = 0.005
"""Seconds within which a released slot is reported while the consumer waits for data."""
IDLE = 1.0
SLOW = 10.0
"""Seconds of waiting for data after which the log says so."""
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
    def receive(self) -> ServerMessage | Received | None: ...
    def send(self, data: bytes) -> bool: ...
    def mark(self, handed: int) -> None: ...
    def close(self) -> None: ...
    def forget(self) -> None: ...


class Daemon(Protocol):
    """A private daemon that ends with the session."""

    def stop(self) -> None: ...


class Session:
    """One session. It lives until `close` (or `notes.closing`) and the death of the last array over a slot."""

    def __init__(
        self, url: str, info: FeedInfo, transport: Transport, notes: Notes, daemon: Daemon | None, asked: float
    ) -> None:
        """`asked`: the time (monotonic) when the user asked for the connection."""
        self.url = url
        self.notes = notes
        self._stream = Stream(info)
        self._transport = transport
        self._daemon = daemon
        self._ready = threading.Condition()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._pool = Pool(keep=2)
        self._ending = False
        self._closed = threading.Event()
        self._connecting = time.monotonic() - asked
        self._begun: float | None = None
        self._first: float | None = None
        self._waiting_since: float | None = None
        self._warned = False
        self._counts = {"slabs": 0, "batches": 0, "rows": 0, "bytes": 0, "copies": 0}
        self._waited = 0.0
        self._thread = threading.Thread(target=self._run, name="penstock-receiver", daemon=True)
        lifetimes.register(self)
        self._thread.start()

    # --- the consumer, on any thread ---

    @property
    def error(self) -> PenstockError | None:
        """Why the stream failed, or None. It is not to be raised itself: see `Refused`."""
        return self._stream.error

    def begin(self) -> int:
        """Begin the next epoch and return its number. Raises as `Stream.begin`."""
        with self._ready:
            self._note()
            messages = self._stream.begin()
            self._waiting_since = None
            self._begun = self._begun or time.monotonic()
            self._send(*messages)
            self._ready.notify_all()
            return self._stream.epoch

    def take(self, epoch: int, timeout: float) -> Received | End | None:
        """The next slab of `epoch`, handed over with this call; its End; or None after `timeout` seconds without one.

        Raises as `Stream.take`.
        """
        with self._ready:
            item = self._stream.take(epoch)
            if item is None:
                item = self._wait(epoch, timeout)
            if not isinstance(item, Received):
                return item
            stream, transport = self._stream, self._transport
            transport.mark(stream.handed)
            quota = transport.quota
            copy = quota is not None and len(stream.aliased) >= quota
            if copy:
                self._release()
                copy = len(stream.aliased) >= (quota or 0)
            if quota is not None and not copy:
                stream.aliased.add(item.slab.seq)
            self._count(item, copy)
            self._send()
        if copy:
            item = self._copied(item)  # with which the slot is released
            self.notes.ring()
        return item

    def _wait(self, epoch: int, timeout: float) -> Received | End | None:
        began = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = began
        try:
            item = None
            while item is None and (left := began + timeout - time.monotonic()) > 0:
                self._send()  # the daemon may lack just the slots that were released
                self._ready.wait(min(left, SOON if self._stream.aliased else STEP))
                item = self._stream.take(epoch)
        finally:
            now = time.monotonic()
            self._waited += now - began
            if now - self._waiting_since > SLOW and not self._warned:
                self._warned = True
                logger.warning(
                    "%s: no data for %.0f s, since %s; is the generator slow? `penstock status %s` shows its workers",
                    self.url,
                    now - self._waiting_since,
                    time.strftime("%H:%M:%S", time.localtime(time.time() - (now - self._waiting_since))),
                    self.url,
                )
        return item

    def _count(self, item: Received, copy: bool) -> None:
        self._waiting_since, self._warned = None, False
        if self._first is None:
            self._first = time.monotonic()
        counts, slab = self._counts, item.slab
        counts["slabs"] += 1
        counts["batches"] += slab.batches
        counts["rows"] += slab.rows
        counts["bytes"] += slab.nbytes
        counts["copies"] += copy

    def _copied(self, item: Received) -> Received:
        private = self._pool.take(item.slab.nbytes)
        np.copyto(np.asarray(private), np.asarray(item.root))
        return Received(item.slab, item.layout, private)

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
        with self._ready:
            self._stream.close(StreamClosed(f"the connection to {self.url} was closed", feed=self._stream.info.name))
            self._ready.notify_all()
        self.close_soon()
        if threading.current_thread() is not self._thread:
            self._closed.wait(2 * _CLOSE)
            if not self._stream.aliased:
                self._thread.join(_CLOSE)

    at_exit = close

    def forget(self) -> None:
        """In a forked child: the session is the parent's."""
        self._ready = threading.Condition()
        self._transport.forget()
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

    def stats(self) -> dict[str, Any]:
        """See `Connection.stats`."""
        with self._ready:
            now = time.monotonic()
            first = None
            if self._first is not None and self._begun is not None:
                first = self._connecting + self._first - self._begun
            return {
                "feed": self._stream.info.name,
                "transport": self._transport.name,
                "epoch": self._stream.epoch,
                **self._counts,
                "aliased": len(self._stream.aliased),
                "wait_seconds": self._waited,
                "first_batch_seconds": first,
                "seconds": 0.0 if self._first is None else now - self._first,
            }

    # --- both, with the lock held ---

    def _release(self) -> None:
        for seq in self.notes.take_released():
            self._stream.released(seq)

    def _note(self) -> None:
        while self.notes.left:
            self._send(*self._stream.leave(self.notes.left.popleft()))

    def _send(self, *messages: Message) -> None:
        """Put `messages` and what is to be acknowledged on their way."""
        self._outbox.extend(encode(message) for message in messages)
        if self._transport.sends_anywhere:
            self._flush()
        else:
            self.notes.ring()

    def _flush(self) -> None:
        self._release()
        while True:
            if not self._outbox:
                ack = self._stream.ack()
                if ack is None:
                    return
                self._outbox.append(encode(ack))
            if not self._transport.send(self._outbox[0]):
                return
            self._outbox.popleft()

    # --- the receiver thread ---

    def _run(self) -> None:
        try:
            while not self._over():
                self._turn()
        except ConnectionLost as error:
            self._lost(error)
        except Exception as error:  # a bug here must not look like a slow daemon
            logger.exception("the receiver thread of %s failed", self.url)
            self._lost(PenstockError(f"the client failed: {error!r}; please report this as a bug"))
        finally:
            lifetimes.unregister(self)
            with self._ready:
                self._transport.close()
            self.notes.bell = None
            self._stop_daemon()

    def _over(self) -> bool:
        return self._ending and not self._stream.aliased

    def _turn(self) -> None:
        self._transport.wait(STEP if self._stream.aliased or self._outbox else IDLE, bool(self._outbox))
        try:
            while (message := self._transport.receive()) is not None:
                with self._ready:
                    self._apply(message)
                    self._ready.notify_all()
                del message
        except ProtocolError as error:
            self._lost(error)
            self.notes.closing = True  # but the connection stays while arrays lie over its slots
        with self._ready:
            self._note()
            ending = self.notes.closing and not self._ending
            if ending:
                self._ending = True
                self._outbox.append(encode(Bye()))
            self._flush()
        if ending:
            self._stop_daemon()

    def _apply(self, message: ServerMessage | Received) -> None:
        if isinstance(message, Received):
            self._stream.came(message)
        elif isinstance(message, End):
            self._stream.ended(message)
            self._flush()
        elif isinstance(message, Failed):
            self._stream.fail(message.error.error())
        elif isinstance(message, Opened):
            self._transport.limit(message.quota)
        elif not isinstance(message, Pong):
            raise ProtocolError(f"the daemon sent {type(message).__name__} in an open session")

    def _stop_daemon(self) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.stop()
        self._closed.set()

    def _lost(self, error: PenstockError) -> None:
        error.feed = error.feed or self._stream.info.name
        with self._ready:
            self._stream.lost(error)
            self._ready.notify_all()
