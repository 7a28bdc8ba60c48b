"""The daemon's TCP side: receives and sends messages of consumers that are ZMTP DEALERs, and sends slabs in pieces.

The router gives each peer an id, which it never uses again. It ignores the identity that a peer claims.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import resource
import select
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from penstock_proto.messages import Chunk, Failed, Message, NotKept, Pong, Status, Welcome
from penstock_proto.transport.codec import MAX_MESSAGE, MAX_STATUS, encode

from ..shared_memory.arena import Bytes
from .accepting import Acceptor
from .incoming import Place
from .keys import ClientKey, ServerKeys, revoked
from .network_peer import NetworkPeer
from .tcp_peer import TcpPeer

if TYPE_CHECKING:
    from .curve import Curve

log = logging.getLogger(__name__)

LINGER = 0.5
"""Seconds that a closing router spends on sending what still waits."""

_MOST = 16_384
"""Maximum number of connections, even if half of the descriptors would allow more."""
_ANSWERS = (Failed, NotKept, Pong, Status, Welcome)
"""Messages that answer a request: a peer gets them as often as it asks."""


class Router:
    """Listens on a TCP address, and holds all connections.

    Args:
        bind: a `tcp://address:port` to listen on; port 0 takes a free one.
        on_frame: called with (peer id, frame) for each message of one frame, and with an empty frame for any other.
        on_end: called once, from the loop, with the id of a peer whose connection has ended.
        keys: the daemon's keys, and the clients and hosts that it admits; None: it admits everybody and encrypts
            nothing.

    Raises:
        StartError: the address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        on_frame: Callable[[bytes, bytes], None],
        on_end: Callable[[bytes], None],
        keys: ServerKeys | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._peers: dict[bytes, NetworkPeer] = {}
        self._half_open: dict[bytes, NetworkPeer] = {}  # handshake not finished; oldest first
        self._mute: dict[bytes, NetworkPeer] = {}  # handshake finished, no message since; oldest first
        self._complained = False
        self._closed = False
        self._acceptor = Acceptor(bind, self._full, self._make_room, self._accepted)
        self._curve = None if keys is None else _curve(keys)
        self._clock = self._loop.call_later(1, self._tick)

    @property
    def endpoint(self) -> str:
        """The address that the router listens on, with its real port."""
        return self._acceptor.endpoint

    def send(self, peer: bytes, message: Message) -> bool:
        """Send a message. Return False if the peer is gone."""
        connection = self._peers.get(peer)
        if connection is None:
            return False
        data = encode(message, MAX_STATUS if isinstance(message, Status) else MAX_MESSAGE)
        return connection.send(data, answer=isinstance(message, _ANSWERS))

    def send_bytes(
        self, peer: bytes, seq: int, start: int, data: Bytes, *, done: Callable[[], None] | None = None
    ) -> bool:
        """Send bytes of slab `seq`, which begin at byte `start` of its slot, in pieces straight from `data`. Return
        False if the peer is gone.

        The router refers to `data` until the bytes are sent or the peer is gone. It calls `done` when they are sent,
        but not if the peer is gone before.
        """
        connection = self._peers.get(peer)
        if connection is None:
            return False
        whole = data.data
        for at in range(0, len(whole), connection.PIECE):
            last = done if at + connection.PIECE >= len(whole) else None
            if not connection.send(encode(Chunk(seq, start + at)), whole[at : at + connection.PIECE], done=last):
                return False
        return True

    def send_piece(self, peer: bytes, message: Message, body: memoryview) -> bool:
        """Send a message with a second frame. Return False if the peer is gone.

        The router refers to `body` until it is sent or the peer is gone.
        """
        connection = self._peers.get(peer)
        return connection is not None and connection.send(encode(message), body)

    def receive_into(self, peer: bytes, place: Place) -> None:
        """Accept messages with a second frame from this peer, a joined host. `place` says where that frame belongs."""
        self._peers[peer].receive_into(place)

    def address(self, peer: bytes) -> str:
        """Return the address of a peer, HOST:PORT."""
        return self._peers[peer].address

    def machine(self, peer: bytes) -> str:
        """Return the machine of a peer: its address without the port; "" if it is this machine."""
        return self._peers[peer].machine

    def piece(self, peer: bytes) -> int:
        """Return how many bytes a second frame may have."""
        return self._peers[peer].PIECE

    def unsent(self, peer: bytes) -> bool:
        """Return whether bytes wait until the peer's connection takes them."""
        connection = self._peers.get(peer)
        return connection is not None and connection.unsent

    def unsent_bytes(self, peer: bytes) -> int:
        """Return how many bytes wait until the peer's connection takes them."""
        connection = self._peers.get(peer)
        return 0 if connection is None else connection.unsent_bytes

    @property
    def all_unsent_bytes(self) -> int:
        """How many bytes wait until connections take them."""
        return sum(connection.unsent_bytes for connection in self._peers.values())

    def drop(self, peer: bytes) -> None:
        """Close the peer's connection when what waits for it has been sent, or after 2 seconds."""
        connection = self._peers.get(peer)
        if connection is not None:
            connection.drop()

    def key(self, peer: bytes) -> ClientKey | None:
        """Return the key of a peer; None without keys, or if the peer is gone."""
        connection = self._peers.get(peer)
        return None if connection is None else connection.key

    @property
    def admitted(self) -> Mapping[bytes, ClientKey] | None:
        """The keys that may connect; None without keys."""
        return None if self._curve is None else self._curve.admitted

    def admit(self, admitted: Mapping[bytes, ClientKey]) -> None:
        """Admit only these keys from now on, and drop the connections of all others."""
        assert self._curve is not None
        self._curve.admitted = admitted
        for connection in self._peers.values():
            if connection.key is not None and revoked(connection.key, admitted):
                connection.drop()

    def close(self) -> None:
        """Close all connections, after up to half a second of sending what still waits."""
        if not self._closed:
            self._closed = True
            self._clock.cancel()
            self._acceptor.close()
            self._linger(time.monotonic() + LINGER)
            for connection in self._peers.values():
                connection.close()
            if self._curve is not None:
                self._curve.close()

    def _linger(self, deadline: float) -> None:
        """Send what waits to all peers in parallel, and let them close their ends. Blocks until `deadline` at most."""
        poll = select.poll()
        left: dict[int, NetworkPeer] = {}
        again = [connection for connection in self._peers.values() if connection.open]
        while again:
            for connection in again:
                if (waits := connection.finish()) is not None:
                    fd, events = waits
                    left[fd] = connection
                    poll.register(fd, events)
            found = poll.poll(max(0.0, deadline - time.monotonic()) * 1000) if left else []
            for fd, _ in found:
                poll.unregister(fd)
            again = [left.pop(fd) for fd, _ in found]

    def _accepted(self, connection: socket.socket) -> None:
        peer = next(self._numbers).to_bytes(8, "big")
        calls = partial(self._ready, peer), partial(self._message, peer), partial(self._ended, peer)
        if self._curve is None:
            self._peers[peer] = self._half_open[peer] = TcpPeer(connection, *calls)
        else:
            from .curve_peer import CurvePeer

            self._peers[peer] = self._half_open[peer] = CurvePeer(connection, self._curve, *calls)

    def _ready(self, peer: bytes) -> None:
        self._mute[peer] = self._half_open.pop(peer)

    def _message(self, peer: bytes, data: bytes) -> None:
        self._mute.pop(peer, None)
        self._on_frame(peer, data)

    def _ended(self, peer: bytes, why: str) -> None:
        for peers in (self._peers, self._half_open, self._mute):
            peers.pop(peer, None)
        if why and not self._complained:
            self._complained = True
            text, fields = (
                "closed a connection over TCP: %s; further ones are not logged",
                {"event": "connection_refused"},
            )
            log.warning(text, why, extra=fields)
        if not self._closed:
            self._on_end(peer)

    def _full(self) -> bool:
        """Return whether there are as many connections as allowed. Half of the descriptors are kept for workers, slots
        and consumers on this host."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        each = 1 if self._curve is None else self._curve.DESCRIPTORS
        return len(self._peers) >= (_MOST if soft == resource.RLIM_INFINITY else min(_MOST, soft // 2 // each))

    def _make_room(self) -> bool:
        """Close the oldest connection that has not finished the handshake, or else the oldest that has sent nothing
        since."""
        for peers in (self._half_open, self._mute):
            for peer in peers:
                peers.pop(peer).close()
                self._peers.pop(peer, None)
                return True
        return False

    def _tick(self) -> None:
        self._clock = self._loop.call_later(1, self._tick)
        for connection in list(self._peers.values()):
            connection.tick()
        if self._curve is not None:
            self._curve.tick()


def _curve(keys: ServerKeys) -> Curve:
    from .curve import Curve  # imports ZeroMQ, which only keys need

    return Curve(keys)
