"""One encrypted TCP connection of a consumer, bounded as a plain one is.

The daemon accepts the connection itself. It passes the bytes that cross the network, unread, between the connection and
a DEALER of libzmq that serves this connection alone. libzmq shakes hands, decrypts and encrypts:

    client == TCP == this peer == unix connection == libzmq's DEALER -- messages -- this peer

So the daemon still chooses the peer's id, and bounds connections, handshakes, silence and unread answers, none of which
libzmq does for a listening socket. A session stays bound to one connection: when either ends, so does the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from penstock_proto import ProtocolError, zmtp
from penstock_proto.codec import MAX_MESSAGE
from penstock_proto.libzmq import UNDECIPHERED

from ..keys import ClientKey
from .client_greeting import ClientGreeting
from .curve import Curve

HANDSHAKE = 10
"""Seconds that a handshake may take."""
PATIENCE = 30
"""Seconds of silence after which the connection is closed."""

_EVENTS, _BUSY = 16, 0.001
"""Messages of a peer that are handled in one step of the loop, and seconds, before the other peers."""
_UNREAD = 256 * 1024
"""Bytes of answers that a peer may leave unread before the daemon stops reading from it."""
_QUEUED = 64 << 20
"""Bytes of messages, without the bytes of slabs, that may wait for a peer."""
_OVERHEAD = 256
"""Bytes that a queued message costs in addition to its own."""
_LAST_WORDS = 2
"""Seconds that a dropped peer has to read what waits for it."""
_WITHOUT_MESSAGE = 1 << 20
"""Bytes that a peer may send without completing a message. No message is larger than 128 KiB, but libzmq would collect
any number of frames."""
_UNADMITTED = 16 * 1024
"""Bytes that a peer may send before it is admitted."""

_read = memoryview(bytearray(256 * 1024))
"""Where bytes arrive. They are passed on before anything else happens, so all peers share it."""


class _Queued(NamedTuple):
    message: bytes
    body: memoryview | None
    cost: int
    answer: int
    """The same number if the peer asked for the message, otherwise 0."""


class CurvePeer:
    """A connection.

    Args:
        connection: a non-blocking socket, which the peer owns from now on.
        curve: makes libzmq's end.
        on_ready: called once, when the client is admitted.
        on_message: called with each message of one frame, and with b"" for any other.
        on_end: called once, from the loop, when the connection has ended; with the reason if the peer broke the rules.

    Attributes:
        key: the client's key; None until it is admitted.

    Raises:
        OSError: there are no descriptors left.
    """

    PIECE = 120 * 1024
    """Bytes of a slab that are sent at once. libzmq allocates memory for each piece, at both ends. For 128 KiB or more
    malloc would map new pages each time, which costs a trainer nearly twice the CPU."""

    def __init__(
        self,
        connection: socket.socket,
        curve: Curve,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.key: ClientKey | None = None
        self._curve = curve
        self._tcp = connection
        self._on_ready = on_ready
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._address = "{}:{}".format(*connection.getpeername()[:2])
        self._dealer, self._pipe, self._id = curve.connected(self._address, self._admit)
        self._fd: int = int(self._dealer.get(zmq.FD))
        self._queue: deque[_Queued] = deque()
        self._cost = self._answers = 0
        self._up = self._down = b""  # ciphertext that the next connection has no room for
        self._greeting = ClientGreeting()
        self._without_message = 0
        self._open = True
        self._goes_on = False
        self._broken = False  # the client has gone; its last messages may still be in libzmq
        self._deciphered = False  # all that came from libzmq
        self._dropped = 0  # seconds left to send what waits
        self._finishing = False
        self._silence = 0
        self._watched: set[tuple[int, bool]] = set()
        self._refused = False
        self._loop.add_reader(self._fd, self._soon)
        self._watch()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._queue or self._down)

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._open

    def send(self, message: bytes, body: memoryview | None = None, *, answer: bool = False) -> bool:
        """Queue a message. Return False if the peer is gone.

        Args:
            message: its first frame.
            body: its second, if it has two. It must not change before it is sent or the peer is gone.
            answer: whether the peer asked for it. The daemon stops reading from a peer that leaves too much of this
                unread.
        """
        if not self._open or self._broken or self._dropped:
            return False
        cost = len(message) + _OVERHEAD
        self._queue.append(_Queued(message, body, cost, cost * answer))
        self._cost += cost
        self._answers += cost * answer
        if self._cost > _QUEUED:
            self.close("it reads nothing, and too much waits for it")
            return False
        self._soon()
        return True

    def tick(self) -> None:
        """Count a second."""
        self._silence += 1
        if self._dropped:
            self._dropped -= 1
            if not self._dropped:
                self.close()
        elif self._silence > (PATIENCE if self.key else HANDSHAKE):
            self.close()

    def close(self, why: str = "") -> None:
        """Close the connection. `on_end` is called in the loop's next step."""
        if self._open:
            self._open = False
            self._watch()
            self._close_dealer(0)
            self._tcp.close()
            self._pipe.close()
            self._curve.forget(self._id)
            self._queue.clear()
            self._up = self._down = b""
            self._loop.call_soon(self._on_end, why)

    def drop(self) -> None:
        """Stop reading, and close the connection when what waits has been sent, or after 2 seconds."""
        if self._open and not self._dropped:
            self._dropped = _LAST_WORDS
            self._soon()

    def finish(self) -> tuple[int, int] | None:
        """Send some of what waits. When all is sent, shut down that direction, and read until the peer closes its end.

        Returns:
            What to wait for before it is called again, a descriptor and the events of poll(2); None when all is done.
        """
        try:
            if not self._finishing:
                while not self._dealer.closed and self._give():
                    pass
                if not self._queue:
                    self._close_dealer(_LAST_WORDS)
                if self._down:
                    self._down = self._down[self._tcp.send(self._down) :]
                elif not self._deciphered:
                    self._down = bytes(_read[: self._pipe.recv_into(_read)])
                    self._deciphered = not self._down
                else:
                    self._finishing = True
                    self._tcp.shutdown(socket.SHUT_WR)
            elif not self._tcp.recv_into(_read):
                return None
        except BlockingIOError:
            pass
        except OSError:
            return None
        if self._down:
            return self._tcp.fileno(), select.POLLOUT
        return (self._tcp if self._finishing or self._deciphered else self._pipe).fileno(), select.POLLIN

    # --- messages ---

    def _soon(self) -> None:
        """Look after libzmq in the loop's next step. Its descriptor says only once that something has changed."""
        if not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        if self._open:
            self._exchange()
            self._watch()

    def _exchange(self) -> None:
        """Give and take messages, within the bounds of one step, before the other peers."""
        until = time.monotonic() + _BUSY
        for _ in range(_EVENTS):
            if self._dealer.closed or not (self._give() | self._take()):
                self._close_if_over()
                return
            if not self._open:
                return
            if time.monotonic() > until:
                break
        self._soon()

    def _give(self) -> bool:
        """Give libzmq the next message, if there is one and it has room. Return whether it did."""
        if not self._queue or not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLOUT:
            if self._dropped and not self._queue:
                self._close_dealer(_LAST_WORDS)
            return False
        message, body, cost, answer = self._queue[0]
        try:
            self._dealer.send(message, zmq.NOBLOCK if body is None else zmq.NOBLOCK | zmq.SNDMORE)
            if body is not None:
                self._dealer.send(body, zmq.NOBLOCK)
        except zmq.Again:  # the client has gone in the meantime
            return False
        self._queue.popleft()
        self._cost -= cost
        self._answers -= answer
        return True

    def _take(self) -> bool:
        """Take a message, if libzmq has one. Return whether it did."""
        if self._dropped or self._answers > _UNREAD or not self._has_message:
            return False
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._without_message = 0
        self._on_message(frames[0] if len(frames) == 1 and len(frames[0]) <= MAX_MESSAGE else b"")
        return True

    @property
    def _has_message(self) -> bool:
        return not self._dealer.closed and bool(int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN)

    def _close_dealer(self, linger: int) -> None:
        """Have libzmq send what it was given, for `linger` seconds at most, and then close its end of the pipe."""
        if not self._dealer.closed:
            self._loop.remove_reader(self._fd)
            self._dealer.close(linger=1000 * linger)

    def _admit(self, key: ClientKey | None) -> None:
        """The client has proved that this is its key; None: it may not connect."""
        if key is None:
            self._refused = True
            return
        self.key, self._silence = key, 0
        self._on_ready()

    # --- ciphertext ---

    def _from_client(self) -> None:
        try:
            count = self._tcp.recv_into(_read)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._client_is_gone()
        else:
            self._silence = 0 if self.key else self._silence
            self._without_message += count
            try:
                self._up = self._greeting.passes(bytes(_read[:count]))
            except ProtocolError as error:
                self.close(error.message)
                return
            if self._greeting.plain and not self._refused:
                self._refused = True
                text = "refused a client at %s: it has no keys"
                self._curve.log.warning(text, self._address, event="key_refused")
            self._to_libzmq()
            if self._without_message > (_WITHOUT_MESSAGE if self.key else _UNADMITTED) and not self._has_message:
                self.close("a message of too many frames or bytes" if self.key else "too many bytes before its key")
        self._watch()

    def _to_libzmq(self) -> None:
        try:
            self._up = self._up[self._pipe.send(self._up) :]
        except BlockingIOError:
            pass
        except OSError:  # it has closed its end
            self._up = b""
        if self._broken and not self._up:
            self._hang_up()
        self._watch()

    def _from_libzmq(self) -> None:
        try:
            count = self._pipe.recv_into(_read)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            self._down = bytes(_read[:count])
            self._to_client()
            return
        self._deciphered = True
        if not self.key and not self._refused and not self._broken:
            self._down = self._undeciphered()
            self._to_client()
        self._close_if_over()
        self._watch()

    def _to_client(self) -> None:
        try:
            sent = 0 if self._broken else self._tcp.send(self._down)
            self._down = self._down[sent:]
            if sent and self._answers > _UNREAD:  # it reads its answers: a sign of life
                self._silence = 0
        except BlockingIOError:
            pass
        except OSError:
            self._client_is_gone()
        self._close_if_over()
        self._watch()

    def _client_is_gone(self) -> None:
        """Nothing can be sent any longer. Its last messages may still be in libzmq."""
        if not self._broken:
            self._broken = True
            self._queue.clear()
            self._cost = self._answers = 0
            self._down = b""
            if not self._up:
                self._hang_up()
            self._soon()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_WR)

    def _undeciphered(self) -> bytes:
        """Return what is said to a client whose handshake libzmq cannot decipher, and log why."""
        self._curve.log.warning(
            "refused a client at %s: its handshake cannot be deciphered; it was given another daemon's key, or repeats "
            "what another client has said",
            self._address,
            event="key_refused",
        )
        code = str(UNDECIPHERED).encode()
        return zmtp.command(b"ERROR", bytes((len(code),)) + code)

    def _close_if_over(self) -> None:
        if self._deciphered and not self._down and not (self._open and self._has_message):
            fault = self.key is not None and not (self._broken or self._dropped)
            self.close("a message that is too large, or cannot be deciphered" if fault else "")

    def _watch(self) -> None:
        """Watch the descriptors on which there is something to do now."""
        wanted: dict[tuple[int, bool], Callable[[], None]] = {}
        if self._open:
            tcp, pipe = self._tcp.fileno(), self._pipe.fileno()
            if not (self._up or self._broken or self._dropped or self._answers > _UNREAD):
                wanted[tcp, False] = self._from_client
            if self._down:
                wanted[tcp, True] = self._to_client
            elif not self._deciphered:
                wanted[pipe, False] = self._from_libzmq
            if self._up:
                wanted[pipe, True] = self._to_libzmq
        for fd, writes in self._watched - wanted.keys():
            (self._loop.remove_writer if writes else self._loop.remove_reader)(fd)
        for fd, writes in wanted.keys() - self._watched:
            (self._loop.add_writer if writes else self._loop.add_reader)(fd, wanted[fd, writes])
        self._watched = set(wanted)
