"""A host's connection to the head, with or without keys."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

from penstock_proto import KeyRefused, ProtocolError, Unreachable
from penstock_proto.security.keys import ClientKeys, needs_key
from penstock_proto.security.trusted_users import check_peer, users
from penstock_proto.transport import libzmq, zmtp

from ..net.curve_peer import CurvePeer
from ..net.incoming import Place
from ..net.outgoing import OutgoingMessages
from ..net.tcp_peer import TcpPeer

CONNECTING = 5.0
"""Seconds that the head may take to answer."""

_CLOSED = "closed"

Done = Callable[[], None]


class ToHead(Protocol):
    """An open connection. Messages wait in it until the network takes them."""

    PIECE: int
    """Maximum number of bytes of a second frame."""

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait."""

    @property
    def own_address(self) -> str:
        """The address of this end, without its port; "" if it is not known."""

    def send(self, message: bytes, body: memoryview | None = None, *, done: Done | None = None) -> bool:
        """Send a message, perhaps with a second frame, which must not change before `done` is called. Return False if
        the connection has ended."""

    def tick(self) -> None:
        """Count a second."""

    def drop(self) -> None:
        """Close the connection when what waits has been sent, or after 2 seconds."""

    def close(self) -> None:
        """Close the connection now."""


async def connect(
    host: str,
    port: int,
    keys: ClientKeys | None,
    *,
    on_message: Callable[[bytes], None],
    place: Place,
    on_end: Callable[[str], None],
) -> ToHead:
    """Connect to the head.

    Args:
        host: a name or an address.
        port: a number.
        keys: the host's keys, or None.
        on_message: called with each message that has only one frame.
        place: tells where second frames belong.
        on_end: called once, when the connection has ended; with the reason if the head broke the rules.

    Raises:
        OSError: nobody answers there. Or the peer closes the connection, such as a proxy whose head is gone.
            Or, without keys, the peer is a user of this machine who is not trusted (the head sends pickles).
        KeyRefused: one side has no key, or one that the other side does not accept.
        ProtocolError: the peer does not speak ZeroMQ.
    """
    loop = asyncio.get_running_loop()
    if keys is not None:
        dealer = await loop.run_in_executor(None, lambda: libzmq.dealer(keys, host, port, CONNECTING, lambda: None))
        return _Encrypted(dealer, on_message, place, on_end)
    connection = await _connected(loop, host, port)
    ready: asyncio.Future[str] = loop.create_future()

    def ended(why: str) -> None:
        if ready.done():
            on_end(why)
        else:
            ready.set_result(why or _CLOSED)

    def is_ready() -> None:
        if not ready.done():
            ready.set_result("")

    peer = TcpPeer(connection, is_ready, on_message, ended, ours=b"DEALER", theirs=b"ROUTER")
    peer.receive_into(place)
    try:
        why = await asyncio.wait_for(asyncio.shield(ready), CONNECTING)
    except TimeoutError:
        peer.close()
        raise TimeoutError("it accepts connections, and says nothing") from None
    if why == _CLOSED:
        raise ConnectionResetError("it accepts connections, and closes them")
    if why == zmtp.wants(zmtp.CURVE):
        raise KeyRefused(needs_key("the head"))
    if why:
        raise ProtocolError(f"tcp://{host}:{port} is not a Penstock daemon: {why}")
    try:
        check_peer(connection, f"tcp://{host}:{port}", users(None))
    except Unreachable as error:
        peer.close()
        raise PermissionError(error.message) from None
    return peer


async def _connected(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    error: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(connection, address), CONNECTING)
        except OSError as failed:  # a TimeoutError too
            connection.close()
            error = failed
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise error


class _Encrypted:
    """A connection of libzmq, which copies what it sends."""

    PIECE = CurvePeer.PIECE

    def __init__(
        self,
        dealer: libzmq.LibzmqDealer,
        on_message: Callable[[bytes], None],
        place: Place,
        on_end: Callable[[str], None],
    ) -> None:
        self._dealer = dealer
        self._on_message = on_message
        self._place = place
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._outgoing = OutgoingMessages()
        self._open = True
        self._dropped = 0  # seconds left to send what waits
        self._goes_on = False
        for fd in dealer.descriptors:
            self._loop.add_reader(fd, self._soon)
        self._soon()

    @property
    def unsent_bytes(self) -> int:
        """See ToHead."""
        return self._outgoing.nbytes

    @property
    def own_address(self) -> str:
        """See ToHead."""
        return self._dealer.own_address

    def send(self, message: bytes, body: memoryview | None = None, *, done: Done | None = None) -> bool:
        """See ToHead."""
        if not self._open:
            return False
        self._outgoing.put(message, body, done=done)
        self._soon()
        return True

    def tick(self) -> None:
        """See ToHead."""
        if self._dropped:
            self._dropped -= 1
            if not self._dropped:
                self.close()
        self._soon()

    def drop(self) -> None:
        """See ToHead."""
        self._dropped = self._dropped or 2
        self._soon()

    def close(self) -> None:
        """See ToHead."""
        self._end("")

    def _soon(self) -> None:
        """Exchange messages with libzmq in the loop's next step. Its descriptor reports a change only once."""
        if self._open and not self._goes_on:
            self._goes_on = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = False
        for _ in range(16):
            if not self._open:
                return
            try:
                if not (self._give() | self._take()):
                    if self._dropped and not self._outgoing:
                        self._end("")
                    return
            except ConnectionResetError:
                self._end("")
            except ProtocolError as error:
                self._end(error.message)
        self._soon()

    def _give(self) -> bool:
        if not self._outgoing or not self._dealer.send(self._outgoing.first.first, self._outgoing.first.body):
            return False
        self._outgoing.sent()
        return True

    def _take(self) -> bool:
        frames = self._dealer.frames()
        if frames is None:
            return False
        if len(frames) == 2:
            target = self._place(frames[0])
            if len(target) != len(frames[1]):
                raise ProtocolError(f"a second frame of {len(frames[1])} bytes, expected {len(target)}")
            target[:] = frames[1]
        else:
            self._on_message(frames[0])
        return True

    def _end(self, why: str) -> None:
        if self._open:
            self._open = False
            for fd in self._dealer.descriptors:
                self._loop.remove_reader(fd)
            self._outgoing.clear()
            self._dealer.close(0.5 if self._dropped else 0)
            self._loop.call_soon(self._on_end, why)
