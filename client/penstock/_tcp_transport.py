"""The transport of sessions over TCP.

A slab arrives as its message and then in chunks, each received straight into the slab's aligned buffer (_zmtp.py).
With keys libzmq receives and decrypts them, and they are copied there (penstock_proto/libzmq.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock_proto import ConnectionLost, ProtocolError, Unreachable
from penstock_proto.codec import MAX_CHUNK, encode, from_server
from penstock_proto.messages import Chunk, Open, Opened, Ping, Pong, PositionPart, ServerMessage, Slab, Welcome
from penstock_proto.zmtp import Silent

from ._consumer_state import Received
from ._mailbox import Mailbox
from ._memory import Pool
from ._slab_views import SlabViews
from ._tcp_connection import TcpConnection

CREDIT = 16
CREDIT_BYTES = 64 << 20
PING_AFTER = 5.0
LOST_AFTER = 30.0
"""Seconds without a byte after which the connection counts as lost. A Ping after 5 s asks the daemon for one."""


class _Arriving:
    """A slab that has arrived in part: its slot in our memory, and the region of the slot that is being filled."""

    __slots__ = ("_regions", "at", "received", "slot", "stop")

    def __init__(self, received: Received) -> None:
        slab = received.slab
        self.received = received
        self.slot = np.asarray(received.root).data
        self._regions = iter(received.layout.regions(slab.first, slab.batches))
        self.at, self.stop = next(self._regions)

    def whole(self) -> bool:
        """Return whether the slab has arrived. If a region is full, go on with the next."""
        if self.at < self.stop:
            return False
        self.at, self.stop = next(self._regions, (self.at, self.stop))
        return self.at == self.stop


class TcpTransport:
    """A session's stream over a TCP connection. One thread at a time may use it.

    Attributes:
        epoch: the first epoch that can begin.
    """

    name = "tcp"
    sends_anywhere = False
    quota = None
    """Nothing is aliased: every slab lies in private memory."""

    def __init__(
        self,
        connection: TcpConnection,
        welcome: Welcome,
        views: SlabViews,
        mailbox: Mailbox,
        timeout: float,
        opening: Callable[..., Open],
        start: Sequence[bytes] = (),
        watch: Callable[[], None] | None = None,
    ) -> None:
        """Open the session's stream on this connection, at the position in the pieces of `start`.

        Raises:
            ConnectionLost: the connection broke since `hello`.
            PenstockError: the daemon refused, or did not answer for `timeout` seconds.
        """
        self._connection = connection
        self._dealer = connection.dealer
        self._views = views
        self._mailbox = mailbox
        self._pool = Pool(keep=CREDIT)
        self._slab: _Arriving | None = None
        self._chunk: Chunk | None = None
        deadline = time.monotonic() + timeout
        try:
            for piece in start:
                connection.say(PositionPart(welcome.session, piece), deadline)
            answer = connection.ask(opening(welcome.session, b"", CREDIT, CREDIT_BYTES, 0), deadline, watch)
        except Silent:
            raise Unreachable(
                f"the daemon at {connection.endpoint} did not open the session in {timeout:g} s"
            ) from None
        except OSError:
            raise connection.broke_again() from None
        if not isinstance(answer, Opened):
            raise ProtocolError(f"the daemon answered Open with {type(answer).__name__}")
        self.epoch = answer.epoch
        self._said = self._heard = self._pinged = time.monotonic()

    def limit(self, quota: int) -> None:
        """Do nothing: slabs lie in private memory, which the daemon does not limit."""

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait at most `timeout` seconds for data, a wakeup, or (with `for_room`) room to send.

        Raises:
            ConnectionLost: the daemon was silent for too long.
        """
        if self.silent():  # even if data has arrived now: the daemon ends sessions of clients that were silent as long
            raise ConnectionLost(
                f"the daemon at {self._connection.endpoint} was silent for {LOST_AFTER:g} s: it hangs, the network is "
                "down, or this process stood still"
            )
        wakeup = self._mailbox.wakeup
        came, woken = self._dealer.wait_beside(None if wakeup is None else wakeup.fileno(), timeout, for_room)
        if wakeup is not None and woken:
            wakeup.clear()
        now = time.monotonic()
        if came:
            self._heard = now
        if now - min(self._said, max(self._heard, self._pinged)) >= PING_AFTER:  # each side must hear of the other
            self.send(encode(Ping()))
            self._pinged = now

    def silent(self) -> bool:
        """Return whether the daemon was silent for so long that it may have ended the session."""
        return time.monotonic() - self._heard > LOST_AFTER

    def released(self) -> list[int]:
        """Return an empty list: no slot is aliased."""
        return []

    def receive(self) -> ServerMessage | Received | None:
        """Return the next slab or message, or None if none has arrived.

        Raises:
            ConnectionLost: the connection broke.
            ProtocolError: the daemon sent something that it must not send.
        """
        try:
            while self._chunk is None or self._landed(self._chunk):
                if self._chunk is not None:
                    self._chunk = None
                    if self._slab is not None and self._slab.whole():
                        received, self._slab = self._slab.received, None
                        return received
                data = self._connection.frame()
                if data is None:
                    return None
                message = from_server(data)
                if type(message) is Chunk:
                    self._check(message)
                    self._chunk = message
                elif self._connection.more:
                    raise ProtocolError(f"the daemon sent an extra frame after {message}")
                elif type(message) is Slab:
                    self._begin(message)
                elif type(message) is not Pong:
                    return message
            return None
        except OSError as error:
            raise ConnectionLost(
                f"the connection to the daemon at {self._connection.endpoint} broke: the daemon was killed, or the "
                f"network failed ({error})"
            ) from None

    def _begin(self, slab: Slab) -> None:
        if self._slab is not None:
            before = self._slab.received.slab.seq
            raise ProtocolError(f"slab {slab.seq} came before slab {before} was complete")
        layout = self._views.layout(slab)
        self._slab = _Arriving(Received(slab, layout, self._pool.take(layout.nbytes), time.monotonic()))

    def _check(self, chunk: Chunk) -> None:
        if self._slab is None:
            raise ProtocolError(f"{chunk} came before its slab")
        seq, at = self._slab.received.slab.seq, self._slab.at
        if (chunk.seq, chunk.start) != (seq, at) or not self._connection.more:
            raise ProtocolError(f"{chunk} came, but slab {seq} from byte {at} was due")

    def _landed(self, chunk: Chunk) -> bool:
        """Receive the bytes of a chunk into the slab. Return whether all have arrived."""
        dealer, arriving = self._dealer, self._slab
        assert arriving is not None
        if not dealer.left:
            frame = dealer.begin()
            if frame is None:
                return False
            nbytes, more = frame
            room = min(MAX_CHUNK, arriving.stop - arriving.at)
            if more or not 0 < nbytes <= room:
                raise ProtocolError(f"{chunk} has {nbytes} bytes, but its slab has room for {room}")
        while dealer.left:
            count = dealer.read_into(arriving.slot[arriving.at : arriving.stop])
            if not count:
                return False
            arriving.at += count
        return True

    def send(self, data: bytes) -> bool:
        """Send one message if there is room. Return whether it was sent."""
        if not self._dealer.send(data):
            return False
        self._said = time.monotonic()
        return True

    def mark(self, handed: int) -> None:
        """Do nothing: the daemon shares no memory with this client."""

    def close(self) -> None:
        """Close the connection, after half a second at most to send what is due."""
        self._connection.close()

    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""
        self._connection.forget()
