"""ZeroMQ over TCP: the handshake of every session, and the transport of those that are not on the daemon's host.

A slab comes as its message and then in chunks, each received straight into the slab's aligned buffer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from penstock_proto import VERSION, ConnectionLost, ProtocolError, Unreachable
from penstock_proto.codec import encode, from_server
from penstock_proto.messages import (
    Chunk,
    ClientMessage,
    Failed,
    Hello,
    Open,
    Opened,
    Ping,
    Pong,
    Resume,
    ServerMessage,
    Slab,
    Welcome,
)

from .address import Address
from .cut import Cut
from .memory import Pool
from .notes import Notes
from .stream import Received

CREDIT = 16
CREDIT_BYTES = 64 << 20
MAX_CHUNK = 1 << 20
PING_AFTER = 5.0
LOST_AFTER = 30.0
"""Seconds without a byte after which the daemon is given up; a Ping after 5 s asks it for one."""
STEP = 0.1
"""Seconds after which a wait for the daemon's answer looks around."""
_LINGER_MS = 500
_CONNECT_MS = 3000
"""Milliseconds after which a connection that nobody answers, or that is open and silent, is tried anew: the link may be
back."""


class _Broke(Exception):
    """The connection broke before the answer came."""


class _Arriving:
    """A slab of which not all has come: its slot in our memory, and the region of that which is being filled."""

    __slots__ = ("_regions", "at", "received", "slot", "stop")

    def __init__(self, received: Received) -> None:
        slab = received.slab
        self.received = received
        self.slot = np.asarray(received.root)
        self._regions = iter(received.layout.regions(slab.first, slab.batches))
        self.at, self.stop = next(self._regions)

    def whole_with(self, nbytes: int) -> bool:
        """So many bytes more have come. Whether that was all."""
        self.at += nbytes
        if self.at < self.stop:
            return False
        region = next(self._regions, None)
        if region is None:
            return True
        self.at, self.stop = region
        return False


class TcpTransport:
    """A ZeroMQ connection to a daemon: `hello`, `open`, then the session. One thread at a time may use it."""

    name = "tcp"
    sends_anywhere = False
    quota = None
    """Nothing is aliased: every slab lies in memory of this process."""

    def __init__(self, address: Address, notes: Notes) -> None:
        self._address = address
        self._notes = notes
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _CONNECT_MS)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_CHUNK)
        self._socket.setsockopt(zmq.IPV6, int(address.host.startswith("[")))
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address.endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        if notes.bell is not None:
            self._poller.register(notes.bell, zmq.POLLIN)
        self._cut: Cut | None = None
        self._pool = Pool(keep=CREDIT)
        self._slab: _Arriving | None = None
        self._said = self._heard = self._pinged = time.monotonic()

    def hello(self, timeout: float, watch: Callable[[], None] | None = None) -> Welcome:
        """Introduce this client and ask for the feed.

        Args:
            timeout: seconds that the daemon has to answer.
            watch: called now and then while waiting; it may raise to break off. With it a connection that breaks
                meanwhile is given up, else the socket connects again and the daemon is asked again.

        Raises:
            Unreachable: nobody answered within `timeout` seconds.
            ConnectionLost: with `watch`, the connection broke.
            PenstockError: the daemon's refusal: no such feed, another version.
        """
        deadline = time.monotonic() + timeout
        where = f"{self._address.endpoint}, tried for {timeout:g} s"
        hello = Hello(VERSION, self._address.feed, f"{socket.gethostname()}:{os.getpid()}")
        answer: ServerMessage | None = None
        asked = False
        while answer is None:
            try:
                if not self._await(zmq.POLLOUT, deadline, watch):
                    raise TimeoutError
                self._forget_breaks()
                asked = True
                answer = self._ask(hello, deadline, watch)
            except _Broke:
                if watch is not None:
                    raise self._broke_again() from None
            except TimeoutError:
                raise Unreachable(self._unanswered(where) if asked else self._unheard(where)) from None
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"the daemon at {where} answered Hello with {type(answer).__name__}")
        return answer

    def _unanswered(self, where: str) -> str:
        return (
            f"something accepts connections at {where}, but does not answer: is it a Penstock daemon, and alive? "
            f"`penstock status {self._address.endpoint}` asks it"
        )

    def _unheard(self, where: str) -> str:
        mend = (
            "is it running (`penstock serve` prints its address when it is ready), does it bind an address that this "
            "machine reaches (127.0.0.1 serves its own host only), and does a firewall let the port through?"
        )
        try:
            socket.getaddrinfo(self._address.host.strip("[]"), self._address.port)
        except OSError as error:
            mend = f"the host's name is not known ({error})"
        return f"no daemon listens at {where}: {mend}"

    def open(
        self,
        welcome: Welcome,
        cut: Cut,
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
        try:
            for piece in start:
                self._say(Resume(welcome.session, piece))
            message = opening(welcome.session, b"", CREDIT, CREDIT_BYTES, 0)
            answer = self._ask(message, time.monotonic() + timeout, watch)
        except _Broke:
            raise self._broke_again() from None
        except TimeoutError:
            raise Unreachable(
                f"the daemon at {self._address.endpoint} did not open the session in {timeout:g} s"
            ) from None
        if not isinstance(answer, Opened):
            raise ProtocolError(f"the daemon answered Open with {type(answer).__name__}")
        self._cut = cut
        self._said = self._heard = self._pinged = time.monotonic()
        return answer.epoch

    def _await(self, event: int, deadline: float, watch: Callable[[], None] | None) -> bool:
        """Wait until the socket is ready; returns False at `deadline`.

        Raises:
            _Broke: the connection over which the answer was to come is gone.
        """
        while True:
            left = deadline - time.monotonic()
            if self._socket.poll(int(1000 * max(0.0, min(left, STEP))), event):
                return True
            if left <= 0:
                return False
            if watch is not None:
                watch()
            if event == zmq.POLLIN and self._monitor.poll(0) and not self._socket.poll(0):
                raise _Broke

    def _ask(self, message: ClientMessage, deadline: float, watch: Callable[[], None] | None) -> ServerMessage:
        self._say(message)
        if not self._await(zmq.POLLIN, deadline, watch):
            raise TimeoutError
        answer = from_server(self._socket.recv())
        if isinstance(answer, Failed):
            error = answer.error.error()
            if isinstance(error, ProtocolError) and self._monitor.poll(0):  # it knows us on the connection that broke
                raise _Broke
            raise error
        return answer

    def _say(self, message: ClientMessage) -> None:
        if not self.send(encode(message)):  # there is room for all that comes before the session
            raise _Broke

    def _forget_breaks(self) -> None:
        while self._monitor.poll(0):
            self._monitor.recv_multipart()

    def _broke_again(self) -> ConnectionLost:
        return ConnectionLost(f"the connection to the daemon at {self._address.endpoint} broke again")

    def limit(self, quota: int) -> None:
        """Slabs lie in memory of this process: their number is no affair of the daemon's."""

    def wait(self, timeout: float, for_room: bool) -> None:
        """Wait until something came, the bell rang, or there is room to send (if wanted); at most `timeout` seconds.

        Raises:
            ConnectionLost: no sign of life for too long.
        """
        if self.silent():  # also where data is here now: the daemon has let go of who was silent for as long
            raise ConnectionLost(
                f"the daemon at {self._address.endpoint} was silent for {LOST_AFTER:g} s: it hangs, the network is "
                "cut, or this process stood still"
            )
        self._poller.register(self._socket, zmq.POLLIN | (zmq.POLLOUT if for_room else 0))
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._notes.bell is not None and self._notes.bell.fileno() in ready:
            self._notes.bell.clear()
        now = time.monotonic()
        if ready.get(self._socket, 0) & zmq.POLLIN:
            self._heard = now
        if now - min(self._said, max(self._heard, self._pinged)) >= PING_AFTER:  # each side must hear of the other
            self.send(encode(Ping()))
            self._pinged = now

    def silent(self) -> bool:
        """Whether nothing was heard of the daemon for so long that it may have given the session's data away."""
        return time.monotonic() - self._heard > LOST_AFTER

    def released(self) -> list[int]:
        """None: no slot is aliased."""
        return []

    def receive(self) -> ServerMessage | Received | None:
        """The next slab or message, or None if none is here.

        Raises:
            ConnectionLost: the connection broke.
            ProtocolError: the daemon sent what it must not.
        """
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                if self._monitor.poll(0) and not self._socket.poll(0):
                    raise ConnectionLost(
                        f"the connection to the daemon at {self._address.endpoint} broke: it was killed, or the "
                        "network was cut"
                    ) from None
                return None
            message = from_server(data)
            if type(message) is Chunk:
                received = self._chunk(message)
                if received is not None:
                    return received
            elif self._socket.getsockopt(zmq.RCVMORE):
                raise ProtocolError(f"a frame too many after {message}")
            elif type(message) is Slab:
                self._begin(message)
            elif type(message) is not Pong:
                return message

    def _begin(self, slab: Slab) -> None:
        if self._slab is not None or self._cut is None:
            before = self._slab and self._slab.received.slab.seq
            raise ProtocolError(f"slab {slab.seq} came before slab {before} was whole")
        layout = self._cut.layout(slab)
        self._slab = _Arriving(Received(slab, layout, self._pool.take(layout.nbytes)))

    def _chunk(self, chunk: Chunk) -> Received | None:
        arriving = self._slab
        if arriving is None:
            raise ProtocolError(f"{chunk} came before its slab")
        seq, at = arriving.received.slab.seq, arriving.at
        if (chunk.seq, chunk.start) != (seq, at) or not self._socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"{chunk} came; to come was slab {seq} from byte {at}")
        room = arriving.slot[at : min(at + MAX_CHUNK, arriving.stop)]
        nbytes = self._socket.recv_into(room.data)
        if not 0 < nbytes <= room.nbytes or self._socket.getsockopt(zmq.RCVMORE):
            raise ProtocolError(f"{chunk} has {nbytes} bytes, and slab {seq} room for {room.nbytes}")
        if not arriving.whole_with(nbytes):
            return None
        self._slab = None
        return arriving.received

    def send(self, data: bytes) -> bool:
        """Send one message, if there is room; returns whether it was sent."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._said = time.monotonic()
        return True

    def mark(self, handed: int) -> None:
        """Nothing: the daemon shares no memory with this client."""

    def close(self) -> None:
        """Close the connection; what is still to be sent has half a second."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()

    def forget(self) -> None:
        """Nothing: pyzmq leaves a parent's sockets alone."""
