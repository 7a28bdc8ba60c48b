"""One encrypted TCP connection of a consumer, bounded like a plain one.

The daemon accepts the connection itself. It passes the network bytes, unread, between the connection and a libzmq
DEALER that serves this connection alone. libzmq shakes hands, decrypts and encrypts:

    client == TCP == this peer == unix connection == libzmq's DEALER -- messages -- this peer

So the daemon still chooses the peer's id, and bounds connections, handshakes, silence and unread answers. libzmq does
none of this for a listening socket. A session stays bound to one connection: when either ends, so does the other.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

import zmq

from penstock_proto import ProtocolError
from penstock_proto.transport import zmtp
from penstock_proto.transport.codec import MAX_MESSAGE
from penstock_proto.transport.libzmq import UNDECIPHERED

from .client_greeting import ClientGreeting
from .curve import Curve
from .incoming import Place
from .keys import ClientKey
from .network_peer import BUSY, LAST_WORDS, MESSAGES, UNREAD, NetworkPeer
from .outgoing import OutgoingMessages

_WITHOUT_MESSAGE = 1 << 20
"""Bytes that a peer may send without completing a message. No message is larger than 128 KiB, but libzmq would collect
any number of frames."""
_UNADMITTED = 16 * 1024
"""Bytes that a peer may send before it is admitted."""

_read = memoryview(bytearray(256 * 1024))
"""The buffer for received bytes. They are passed on before anything else happens, so all peers share it."""


class CurvePeer(NetworkPeer):
    """A connection with encryption.

    Args:
        curve: makes libzmq's end. The others are as for `NetworkPeer`.

    Raises:
        OSError: no descriptors are left.
    """

    PIECE = 120 * 1024
    """libzmq allocates memory for each piece, at both ends. For 128 KiB or more malloc would map new pages each time,
    which costs a trainer nearly twice the CPU."""
    _outgoing: OutgoingMessages

    def __init__(
        self,
        connection: socket.socket,
        curve: Curve,
        on_ready: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(connection, OutgoingMessages(), on_ready, on_message, on_end)
        self._curve = curve
        self._place: Place | None = None
        self._client = "{}:{}".format(*connection.getpeername()[:2])
        self._dealer, self._pipe, self._id = curve.connected(self._client, self._admit)
        self._fd: int = int(self._dealer.get(zmq.FD))
        self._up = self._down = b""  # bytes to libzmq, and to the client, that wait for room
        self._greeting = ClientGreeting()
        self._without_message = 0
        self._deciphered = False  # nothing more comes from libzmq: it has closed its end
        self._watched: set[tuple[int, bool]] = set()
        self._refused = False
        self._loop.add_reader(self._fd, self._soon)
        self._watch()

    @property
    def unsent(self) -> bool:
        """Whether bytes wait until the connection takes them."""
        return bool(self._outgoing or self._down)

    def receive_into(self, place: Place) -> None:
        """Take messages of two frames, as `NetworkPeer` says."""
        self._place = place

    def finish(self) -> tuple[int, int] | None:
        """Send some of what waits, as `NetworkPeer` says."""
        try:
            if not self._finishing:
                while not self._dealer.closed and self._give():
                    pass
                if not self._outgoing:
                    self._close_dealer(LAST_WORDS)
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

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._fd)
        self._watch()

    def _release(self) -> None:
        self._watch()
        self._close_dealer(0)
        self._tcp.close()
        self._pipe.close()
        self._curve.forget(self._id)
        self._up = self._down = b""

    def _go_on(self) -> None:
        """Exchange messages with libzmq. Its descriptor reports a change only once."""
        self._goes_on = False
        if self._open and not self._dropped:
            self._exchange()
            self._watch()

    def _exchange(self) -> None:
        """Send and receive messages, within the bounds of one step of the loop."""
        until = time.monotonic() + BUSY
        for _ in range(MESSAGES):
            if not (self._give() | self._take()):
                self._close_if_over()
                return
            if not self._open or self._dropped:
                return
            if time.monotonic() > until:
                break
        self._soon()

    def _give(self) -> bool:
        """Give libzmq the next message, if there is one and libzmq has room. Return whether libzmq took one."""
        if not self._outgoing or not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLOUT:
            return False
        message, body, *_ = self._outgoing.first
        try:
            self._dealer.send(message, zmq.NOBLOCK if body is None else zmq.NOBLOCK | zmq.SNDMORE)
            if body is not None:
                self._dealer.send(body, zmq.NOBLOCK)
        except zmq.Again:  # the client has gone in the meantime
            return False
        self._outgoing.sent()
        return True

    def _take(self) -> bool:
        """Receive a message, if libzmq has one. Return whether one came."""
        if self._outgoing.answers > UNREAD or not self._has_message:
            return False
        try:
            frames = self._dealer.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._without_message = 0
        if self._place is not None and len(frames) == 2:
            self._put(self._place, *frames)
            return True
        self._on_message(frames[0] if len(frames) == 1 and len(frames[0]) <= MAX_MESSAGE else b"")
        return True

    def _put(self, place: Place, first: bytes, second: bytes) -> None:
        """Put the second frame of a message where it belongs."""
        try:
            target = place(first)
            if len(target) != len(second):
                raise ProtocolError(f"a second frame of {len(second)} bytes, expected {len(target)}")
        except ProtocolError as error:
            self.close(error.message)
        else:
            target[:] = second

    @property
    def _has_message(self) -> bool:
        return bool(int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN)

    def _close_dealer(self, linger: int) -> None:
        """Close the DEALER. libzmq first sends its messages for up to `linger` seconds, then closes its end of the
        pipe."""
        if not self._dealer.closed:
            self._loop.remove_reader(self._fd)
            self._dealer.close(linger=1000 * linger)

    def _admit(self, key: ClientKey | None) -> None:
        """Admit a client that has proved to own `key`. None: the client may not connect."""
        if key is None:
            self._refused = True
            return
        self.key = key
        self._shaken()

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
                self._curve.log.warning(text, self._client, event="key_refused")
            self._to_libzmq()
            if self._without_message > (_WITHOUT_MESSAGE if self.key else _UNADMITTED) and not self._has_message:
                self.close("a message of too many frames or bytes" if self.key else "too many bytes before its key")
        self._watch()

    def _to_libzmq(self) -> None:
        try:
            self._up = self._up[self._pipe.send(self._up) :]
        except BlockingIOError:
            pass
        except OSError:  # libzmq has closed its end
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
        if self._broken:
            self._down = b""  # a broken connection always looks writable, but takes nothing
        try:
            sent = self._tcp.send(self._down) if self._down else 0
            self._down = self._down[sent:]
            if sent and self._outgoing.answers > UNREAD:  # the client reads its answers, so it is alive
                self._silence = 0
        except BlockingIOError:
            pass
        except OSError:
            self._client_is_gone()
        self._close_if_over()
        self._watch()

    def _client_is_gone(self) -> None:
        """Handle a broken connection: nothing can be sent any longer, but libzmq may still hold the client's last
        messages."""
        if not self._broken:
            self._broken = True
            self._outgoing.clear()
            self._down = b""
            if not self._up:
                self._hang_up()
            self._soon()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.shutdown(socket.SHUT_WR)

    def _undeciphered(self) -> bytes:
        """Return the error for a client whose handshake libzmq cannot decipher, and log it."""
        self._curve.log.warning(
            "refused a client at %s: its handshake cannot be deciphered; it was given another daemon's key, or replays "
            "another client's handshake",
            self._client,
            event="key_refused",
        )
        code = str(UNDECIPHERED).encode()
        return zmtp.command(b"ERROR", bytes((len(code),)) + code)

    def _close_if_over(self) -> None:
        if self._deciphered and not self._down and not (self._open and self._has_message):
            fault = self.key is not None and not self._broken
            self.close("a message that is too large, or cannot be deciphered" if fault else "")

    def _watch(self) -> None:
        """Watch exactly the descriptors that have something to do now."""
        wanted: dict[tuple[int, bool], Callable[[], None]] = {}
        if self._open and not self._dropped:
            tcp, pipe = self._tcp.fileno(), self._pipe.fileno()
            if not (self._up or self._broken or self._outgoing.answers > UNREAD):
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
