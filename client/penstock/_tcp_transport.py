"""ZeroMQ over TCP: the handshake of every session, and the transport of sessions from other hosts.

A slab arrives as its message and then in chunks, each received straight into the slab's aligned buffer (_zmtp.py).
With keys libzmq receives and decrypts them, and they are copied there (penstock_proto/libzmq.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock_proto import VERSION, ConnectionLost, KeyRefused, ProtocolError, Unreachable
from penstock_proto.codec import MAX_CHUNK, MAX_MESSAGE, encode, from_server
from penstock_proto.keys import ClientKeys, needs_key
from penstock_proto.messages import (
    Chunk,
    ClientMessage,
    Failed,
    Hello,
    Open,
    Opened,
    Ping,
    Pong,
    PositionPart,
    ServerMessage,
    Slab,
    Welcome,
)
from penstock_proto.zmtp import Silent

from ._address import Address
from ._consumer_state import Received
from ._mailbox import Mailbox
from ._memory import Pool
from ._slab_views import SlabViews
from ._zmtp import Dealer, connected

if TYPE_CHECKING:
    from penstock_proto.libzmq import LibzmqDealer

CREDIT = 16
CREDIT_BYTES = 64 << 20
PING_AFTER = 5.0
LOST_AFTER = 30.0
"""Seconds without a byte after which the connection counts as lost. A Ping after 5 s asks the daemon for one."""
STEP = 0.1
"""Longest wait in seconds for the daemon's answer before other events are checked."""
_LINGER = 0.5
_CONNECT = 3.0
"""Seconds after which a connection attempt that nobody answers is repeated: the network may be back."""
_AGAIN = 0.1
"""Seconds between two attempts."""


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
    """A ZeroMQ connection to a daemon: `hello`, `open`, then the session. One thread at a time may use it."""

    name = "tcp"
    sends_anywhere = False
    quota = None
    """Nothing is aliased: every slab lies in private memory."""

    def __init__(self, address: Address, mailbox: Mailbox, keys: ClientKeys | None = None) -> None:
        self._address = address
        self._mailbox = mailbox
        self._keys = keys
        self._dealer: Dealer | LibzmqDealer | None = None
        self._views: SlabViews | None = None
        self._pool = Pool(keep=CREDIT)
        self._filling: memoryview | None = None
        self._more = False
        self._slab: _Arriving | None = None
        self._chunk: Chunk | None = None
        self._said = self._heard = self._pinged = time.monotonic()

    def hello(self, timeout: float, watch: Callable[[], None] | None = None) -> Welcome:
        """Introduce this client and ask for the feed.

        Args:
            timeout: seconds that the daemon has to answer.
            watch: called regularly while waiting; it may raise to stop. With `watch` a connection that breaks is an
                error; without it, the client connects and asks again.

        Raises:
            Unreachable: no daemon answered within `timeout` seconds.
            KeyRefused: the daemon requires a key, does not know this one, or uses none.
            ConnectionLost: with `watch`, the connection broke.
            PenstockError: the daemon refused: no such feed, another version.
        """
        deadline = time.monotonic() + timeout
        where = f"{self._address.endpoint}, tried for {timeout:g} s"
        hello = Hello(VERSION, self._address.feed, f"{socket.gethostname()}:{os.getpid()}")
        answer: ServerMessage | None = None
        asked = False
        while answer is None:
            try:
                self._dealer = self._connected(deadline, watch)
                self._filling = None  # left from a connection that broke
                asked = True
                answer = self._ask(hello, deadline, watch)
            except Silent:
                raise Unreachable(self._unanswered(where)) from None
            except OSError as error:
                if not asked:
                    raise Unreachable(self._unheard(where, error)) from None
                if watch is not None:
                    raise self._broke_again() from None
                if time.monotonic() + _AGAIN > deadline:
                    raise Unreachable(self._unanswered(where)) from None
                time.sleep(_AGAIN)
            except KeyRefused as error:
                raise KeyRefused(f"{self._address.endpoint}: {error}") from None
            except ProtocolError as error:
                if asked:
                    raise
                said = f"{self._address.endpoint} is not a Penstock daemon: {error}"
                raise Unreachable(said) from None
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the daemon at {where} answered Hello with {type(answer).__name__}")
        return answer

    def _connected(self, deadline: float, watch: Callable[[], None] | None) -> Dealer | LibzmqDealer:
        """Return a connection; try until `deadline`."""
        if self._dealer is not None:  # which broke
            self._dealer.close(0)
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return dealer_to(self._address, self._keys, min(left, _CONNECT), watch or (lambda: None))
            except OSError:
                if left <= _AGAIN:
                    raise
            if watch is not None:
                watch()
            time.sleep(_AGAIN)

    def _unanswered(self, where: str) -> str:
        return (
            f"something at {where} accepts connections but does not answer: is it a Penstock daemon, and does it "
            f"respond to `penstock status {self._address.endpoint}`?"
        )

    def _unheard(self, where: str, error: OSError) -> str:
        advice = (
            "is it running (`penstock serve` prints its address when it is ready), does it bind an address that this "
            "machine can reach (127.0.0.1 serves its own host only), and does a firewall allow the port?"
        )
        if isinstance(error, socket.gaierror):
            advice = f"the host name is unknown ({error})"
        if isinstance(error, ConnectionResetError):
            return f"{where}: connections are closed at once: the daemon may have too many; see its log"
        return f"no daemon listens at {where}: {advice}"

    def open(
        self,
        welcome: Welcome,
        views: SlabViews,
        timeout: float,
        opening: Callable[..., Open],
        start: Sequence[bytes] = (),
        watch: Callable[[], None] | None = None,
    ) -> int:
        """Open the session's stream on this connection, at the position in the pieces of `start`.

        Returns:
            The first epoch that can begin.

        Raises:
            ConnectionLost: the connection broke since `hello`.
            PenstockError: the daemon refused, or did not answer for `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        try:
            for piece in start:
                self._say(PositionPart(welcome.session, piece), deadline)
            answer = self._ask(opening(welcome.session, b"", CREDIT, CREDIT_BYTES, 0), deadline, watch)
        except Silent:
            raise Unreachable(
                f"the daemon at {self._address.endpoint} did not open the session in {timeout:g} s"
            ) from None
        except OSError:
            raise self._broke_again() from None
        if not isinstance(answer, Opened):
            raise ProtocolError(f"the daemon answered Open with {type(answer).__name__}")
        self._views = views
        self._said = self._heard = self._pinged = time.monotonic()
        return answer.epoch

    def _ask(self, message: ClientMessage, deadline: float, watch: Callable[[], None] | None) -> ServerMessage:
        """Send `message` and return the answer.

        Raises:
            Silent: no answer came before `deadline`.
            OSError: the connection broke.
            PenstockError: the daemon answered with this error.
        """
        self._say(message, deadline)
        while (data := self._frame()) is None:
            self._there.wait(STEP)
            if watch is not None:
                watch()
            if time.monotonic() > deadline:
                raise Silent
        answer = from_server(data)
        if isinstance(answer, Failed):
            raise answer.error.error()
        return answer

    def _say(self, message: ClientMessage, deadline: float) -> None:
        while not self._there.send(encode(message)):
            self._there.wait(STEP)
            if time.monotonic() > deadline:
                raise Silent

    def _broke_again(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to the daemon at {self._address.endpoint} broke again")

    @property
    def _there(self) -> Dealer | LibzmqDealer:
        assert self._dealer is not None  # `hello` was called
        return self._dealer

    def limit(self, quota: int) -> None:
        """Do nothing: slabs lie in private memory, which the daemon does not limit."""

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait at most `timeout` seconds for data, a wakeup, or (with `for_room`) room to send.

        Raises:
            ConnectionLost: the daemon was silent for too long.
        """
        if self.silent():  # even if data has arrived now: the daemon ends sessions of clients that were silent as long
            raise ConnectionLost(
                f"the daemon at {self._address.endpoint} was silent for {LOST_AFTER:g} s: it hangs, the network is "
                "down, or this process stood still"
            )
        wakeup = self._mailbox.wakeup
        came, woken = self._there.wait_beside(None if wakeup is None else wakeup.fileno(), timeout, for_room)
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
                data = self._frame()
                if data is None:
                    return None
                message = from_server(data)
                if type(message) is Chunk:
                    self._check(message)
                    self._chunk = message
                elif self._more:
                    raise ProtocolError(f"the daemon sent an extra frame after {message}")
                elif type(message) is Slab:
                    self._begin(message)
                elif type(message) is not Pong:
                    return message
            return None
        except OSError as error:
            raise ConnectionLost(
                f"the connection to the daemon at {self._address.endpoint} broke: the daemon was killed, or the "
                f"network failed ({error})"
            ) from None

    def _frame(self) -> memoryview | None:
        """Return the next frame if all of it has arrived, else None."""
        dealer = self._there
        if self._filling is None:
            frame = dealer.begin()
            if frame is None:
                return None
            nbytes, self._more = frame
            if nbytes > MAX_MESSAGE:
                raise ProtocolError(f"the daemon sent a message of {nbytes} bytes; the limit is {MAX_MESSAGE}")
            self._filling = memoryview(bytearray(nbytes))
        data = self._filling
        while dealer.left:
            if not dealer.read_into(data[len(data) - dealer.left :]):
                return None
        self._filling = None
        return data

    def _begin(self, slab: Slab) -> None:
        if self._slab is not None or self._views is None:
            before = self._slab and self._slab.received.slab.seq
            raise ProtocolError(f"slab {slab.seq} came before slab {before} was complete")
        layout = self._views.layout(slab)
        self._slab = _Arriving(Received(slab, layout, self._pool.take(layout.nbytes), time.monotonic()))

    def _check(self, chunk: Chunk) -> None:
        if self._slab is None:
            raise ProtocolError(f"{chunk} came before its slab")
        seq, at = self._slab.received.slab.seq, self._slab.at
        if (chunk.seq, chunk.start) != (seq, at) or not self._more:
            raise ProtocolError(f"{chunk} came, but slab {seq} from byte {at} was due")

    def _landed(self, chunk: Chunk) -> bool:
        """Receive the bytes of a chunk into the slab. Return whether all have arrived."""
        dealer, arriving = self._there, self._slab
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
        if not self._there.send(data):
            return False
        self._said = time.monotonic()
        return True

    def mark(self, handed: int) -> None:
        """Do nothing: the daemon shares no memory with this client."""

    def close(self) -> None:
        """Close the connection, after half a second at most to send what is due."""
        if self._dealer is None:
            return
        if not isinstance(self._dealer, Dealer):
            self._settle(self._dealer)
        self._dealer.close(_LINGER)

    def _settle(self, dealer: LibzmqDealer) -> None:
        """Wait until the daemon has read everything: it answers a Ping after all that came before. (libzmq would close
        the connection with unread bytes, which resets it, and the daemon would lose what it has not read.)"""
        deadline = time.monotonic() + _LINGER
        with contextlib.suppress(OSError, ProtocolError):
            if not dealer.send(encode(Ping())):
                return
            while (data := dealer.message(deadline - time.monotonic())) is not None:
                if isinstance(from_server(data), Pong | Failed):
                    return

    def forget(self) -> None:
        """In a forked child: leave the connection to the parent."""
        if self._dealer is not None:
            self._dealer.forget()


def dealer_to(
    address: Address, keys: ClientKeys | None, timeout: float, watch: Callable[[], None]
) -> Dealer | LibzmqDealer:
    """Connect to a daemon once. For `timeout`, `watch` and errors, see `libzmq.dealer`."""
    host, port = address.host.strip("[]"), address.port
    if keys is not None:
        from penstock_proto import libzmq

        return libzmq.dealer(keys, host, port, timeout, watch)
    try:
        return connected(host, port, timeout, watch)
    except KeyRefused:
        raise KeyRefused(needs_key("the daemon")) from None
