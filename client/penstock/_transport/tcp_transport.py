"""The transport of sessions over TCP.

A slab arrives as its message and then in chunks, each received straight into the slab's aligned buffer
(penstock_proto/transport/zmtp_dealer.py). With keys, libzmq receives and decrypts the chunks, which are then copied
there (penstock_proto/transport/libzmq.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from penstock_proto import ConnectionLost, ProtocolError, Unreachable
from penstock_proto.messages import (
    Chunk,
    ClientMessage,
    Failed,
    HostAt,
    Open,
    Opened,
    Ping,
    Pong,
    PositionPart,
    ServerMessage,
    Slab,
    Welcome,
)
from penstock_proto.transport.codec import encode, from_server
from penstock_proto.transport.zmtp import Silent

from .._state.consumer_state import Received
from .._state.credit import Credit
from .._state.deadline import Deadline
from .._state.epoch_bounds import MAX_BETWEEN
from .._state.mailbox import Mailbox
from .._state.memory import Pool
from .arriving import Arriving, Landing
from .from_hosts.fetching import Fetches
from .slab_views import SlabViews
from .tcp_connection import TcpConnection

_LOOK = 0.05
"""Longest wait in seconds while something waits to be sent to a host."""
CREDIT = 16
CREDIT_BYTES = 64 << 20
PING_AFTER = 5.0
MAX_IDLE = 4096
"""Most messages in a row that say nothing of the stream, without a wait for more."""
LOST_AFTER = 30.0
"""Seconds without a byte after which the connection counts as lost. A Ping after 5 s asks the daemon for one."""


class TcpTransport:
    """A session's stream over a TCP connection. One thread at a time may use it.

    Attributes:
        epoch: the first epoch that can begin.
        heard_at: when something came from the daemon last.
    """

    name = "tcp"
    sends_anywhere = False
    quota = None
    """The daemon's slots are not aliased: slabs lie in private memory, or in memory that a host lends."""

    def __init__(
        self,
        connection: TcpConnection,
        welcome: Welcome,
        views: SlabViews,
        mailbox: Mailbox,
        until: Deadline,
        opening: Callable[..., Open],
        start: Sequence[bytes] = (),
        watch: Callable[[], None] | None = None,
        *,
        shares: bool,
    ) -> None:
        """Open the session's stream on this connection, at the position in the pieces of `start`. `shares`: others read
        the stream too, in a group or as ranks.

        Raises:
            ConnectionLost: the connection broke since `hello`.
            PenstockError: the daemon refused, or did not answer before `until`.
        """
        self._connection = connection
        self._dealer = connection.dealer
        self._views = views
        self._mailbox = mailbox
        self._pool = Pool(keep=CREDIT)
        self._arriving: dict[int, Arriving] = {}
        """The slabs whose bytes come from the daemon, by number."""
        self._due: deque[tuple[Arriving | ServerMessage, int]] = deque()
        """Slabs and messages in the order of the stream, from the first unfinished slab on, and the messages' bytes."""
        self._due_nbytes = 0
        self._landing = Landing()
        self._idle = 0
        self._unsaid: deque[bytes] = deque()
        self._fetches = Fetches(connection.keys, connection.trusted, self._say, mailbox.wake)
        try:
            for piece in start:
                connection.say(PositionPart(welcome.session, piece), until.at)
            asked = opening(welcome.session, b"", CREDIT, CREDIT_BYTES, 0)
            answer = connection.ask(structs.replace(asked, fetches=True), until.at, watch)
        except Silent:
            raise Unreachable(
                f"the daemon at {connection.endpoint} did not open the session in {until.seconds:g} s"
            ) from None
        except OSError:
            raise connection.broke_again() from None
        if not isinstance(answer, Opened):
            raise ProtocolError(f"the daemon answered Open with {type(answer).__name__}")
        self.opened = answer
        self._credit = Credit.granted(answer, CREDIT, CREDIT_BYTES, shares=shares)
        self._said = self.heard_at = self._pinged = time.monotonic()

    def limit(self, quota: int) -> None:
        """Do nothing: slabs do not lie in the daemon's memory."""

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait at most `timeout` seconds for data, a wakeup, or (with `for_room`) room to send.

        Raises:
            ConnectionLost: the daemon was silent for too long.
        """
        if self.silent():  # even if data has just come: after an equally long silence the daemon ends the session
            raise ConnectionLost(
                f"the daemon at {self._connection.endpoint} was silent for {LOST_AFTER:g} s: it hangs, the network is "
                "down, or this process stood still"
            )
        self._say_what_waits()
        wakeup = self._mailbox.wakeup
        others = [] if wakeup is None else [wakeup.fileno()]
        if self._fetches:
            others += self._fetches.prepare()
            timeout = min(timeout, _LOOK) if self._fetches.unsent else timeout
            timeout = 0.0 if self._fetches.pending else timeout
        came, ready = self._dealer.wait_beside(others, timeout, for_room or bool(self._unsaid))
        if wakeup is not None and wakeup.fileno() in ready:
            wakeup.clear()
        now = time.monotonic()
        if came:
            self.heard_at = now
        if now - min(self._said, max(self.heard_at, self._pinged)) >= PING_AFTER:  # each side must hear from the other
            self.send(encode(Ping()))
            self._pinged = now

    def silent(self) -> bool:
        """Return whether the daemon was silent for so long that it may have ended the session."""
        return time.monotonic() - self.heard_at > LOST_AFTER

    def take_released(self) -> Iterator[int]:
        """Yield nothing: no slot is aliased."""
        return iter(())

    def receive(self) -> ServerMessage | Received | None:
        """Return the next slab or message, or None if none has arrived.

        Raises:
            ConnectionLost: the connection broke.
            ProtocolError: the daemon sent something that it must not send.
        """
        try:
            self._idle = 0
            while (due := self._next()) is None and self._read():
                pass
            if due is None and self._fetches:
                for slab in self._fetches.read():
                    self._arriving[slab.received.slab.seq] = slab
                due = self._next()
            return due
        except OSError as error:
            raise ConnectionLost(
                f"the connection to the daemon at {self._connection.endpoint} broke: the daemon was killed, or the "
                f"network failed ({error})"
            ) from None

    def _next(self) -> ServerMessage | Received | None:
        """Return the next message or slab in order, or None if it has not arrived."""
        if not self._due:
            return None
        first, nbytes = self._due[0]
        if not isinstance(first, Arriving):
            self._due.popleft()
            self._due_nbytes -= nbytes
            return first
        if not first.is_whole:
            return None
        self._due.popleft()
        return first.received

    def _read(self) -> bool:
        """Receive the next message of the daemon, or a part of a slab. Return whether more may have come."""
        if self._landing:
            slab = self._landing.go_on(self._dealer)
            if slab is not None:
                del self._arriving[slab.received.slab.seq]
            return not self._landing
        data = self._connection.frame()
        if data is None:
            return False
        message = from_server(data)
        if type(message) is Chunk:
            slab = self._arriving.get(message.seq)
            if slab is None:
                raise ProtocolError(f"{message} came, and no bytes of this slab were due")
            self._landing.begin(message, slab, self._connection.more)
        elif self._connection.more:
            raise ProtocolError(f"the daemon sent an extra frame after {message}")
        elif type(message) is Slab:
            self._begin(message)
        elif type(message) is HostAt or type(message) is Pong:
            self._idle += 1
            if self._idle > MAX_IDLE:
                raise ProtocolError(f"the daemon sent {MAX_IDLE} messages in a row that say nothing of the stream")
            if type(message) is HostAt:
                self._fetches.host_at(message)
        else:
            if type(message) is Failed:
                self._drop_unfinished()
            self._due.append((message, len(data)))
            self._due_nbytes += len(data)
            if self._due_nbytes > MAX_BETWEEN:
                raise ProtocolError(f"the daemon sent more than {MAX_BETWEEN} bytes of messages before a slab's bytes")
        return True

    def _drop_unfinished(self) -> None:
        """Drop the first unfinished slab and everything after it: the stream has failed, so missing bytes will not
        come."""
        while not all(item.is_whole for item, _ in self._due if isinstance(item, Arriving)):
            self._due_nbytes -= self._due.pop()[1]

    def _begin(self, slab: Slab) -> None:
        layout = self._views.layout(slab)
        self._credit.on_slab(slab)
        arriving = Arriving(Received(slab, layout, self._pool.take(layout.nbytes), time.monotonic()))
        self._due.append((arriving, 0))
        if slab.kept is None or not self._fetches.fetch(arriving):
            self._arriving[slab.seq] = arriving

    def _say(self, message: ClientMessage) -> None:
        """Send a message now, or when there is room."""
        self._unsaid.append(encode(message))
        self._say_what_waits()

    def _say_what_waits(self) -> None:
        while self._unsaid and self.send(self._unsaid[0]):
            self._unsaid.popleft()

    def send(self, data: bytes) -> bool:
        """Send one message if there is room. Return whether it was sent."""
        if not self._dealer.send(data):
            return False
        self._said = time.monotonic()
        return True

    def tell(self, handed: int) -> None:
        """Note that the daemon is about to learn that the first `handed` slabs were handed over. Any thread."""
        self._credit.tell(handed)

    def mark(self, handed: int) -> None:
        """Do nothing: the daemon shares no memory with this client."""

    def close(self) -> None:
        """Close the connection. Messages that are due have up to half a second to be sent."""
        self._fetches.close()
        self._connection.close()

    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""
        self._fetches.forget()
        self._connection.forget()
