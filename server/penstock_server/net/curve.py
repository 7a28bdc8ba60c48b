"""Encryption by libzmq (CURVE): the daemon's keys, who may connect, and libzmq's end of each connection.

libzmq deciphers a handshake, and then asks over ZAP (https://rfc.zeromq.org/spec/27) whether the client's key may
connect. Each connection has its own libzmq DEALER (see curve_peer.py).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable

import zmq
from zmq.utils import z85

from penstock_proto.transport.codec import MAX_MESSAGE

from ..logs.rate_limited_log import RateLimitedLog
from .keys import ClientKey, ServerKeys

OVERHEAD = 64
"""Bytes that encryption adds to a frame; rounded up."""

_MOST_THREADS = 4
_AHEAD = 8
"""Messages of a connection that libzmq receives in advance, or holds until they are sent."""
_PING_EVERY, _PATIENCE = 5_000, 30_000
"""Milliseconds between two heartbeats, and without an answer before the connection ends."""
_NAMES, _YES, _NO = b"1.0", b"200", b"400"

Admit = Callable[[ClientKey | None], None]
"""Called with the key that a client or host has proved to own; None if it may not connect."""


class Curve:
    """One context of libzmq for all connections of a daemon.

    Args:
        keys: the daemon's keys, and who may connect.

    Attributes:
        admitted: the keys that may connect, by public part.
    """

    DESCRIPTORS = 5
    """Open files of a connection: its socket, a listener and the two ends of a unix connection, and an eventfd."""

    def __init__(self, keys: ServerKeys) -> None:
        self.log = RateLimitedLog(logging.getLogger(__name__))
        self._keys = keys
        self.admitted = keys.admitted
        self._asking: dict[bytes, tuple[str, Admit]] = {}
        self._context = zmq.Context(io_threads=max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2)))
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)
        self._zap = self._context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(int(self._zap.get(zmq.FD)), self._answer)

    def connected(self, address: str, admit: Admit) -> tuple[zmq.Socket[bytes], socket.socket, bytes]:
        """Make libzmq's end of a connection.

        Args:
            address: the client's address, for the log.
            admit: called when libzmq has deciphered the client's handshake.

        Returns:
            A DEALER; a stream socket that carries the network bytes to and from libzmq; and an id, to `forget` when the
            connection ends.

        Raises:
            OSError: there is no descriptor or memory left.
        """
        name = secrets.token_hex(16)
        _require_descriptors()
        try:
            dealer = self._context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None
        try:
            dealer.linger = 0
            dealer.rcvhwm = dealer.sndhwm = _AHEAD
            dealer.maxmsgsize = MAX_MESSAGE + OVERHEAD
            dealer.handshake_ivl = 0  # curve_peer.py counts the seconds
            dealer.heartbeat_ivl, dealer.heartbeat_timeout = _PING_EVERY, _PATIENCE
            dealer.curve_server = True
            dealer.curve_secretkey = self._keys.own.secret
            dealer.zap_domain = name.encode()
            dealer.set(zmq.IPC_FILTER_PID, os.getpid())  # no other process of this host may connect
            pipe = socket.socket(socket.AF_UNIX)
            try:
                dealer.bind(f"ipc://@penstock-{name}")
                pipe.connect(f"\0penstock-{name}")
                pipe.setblocking(False)
            except BaseException:
                pipe.close()
                raise
        except zmq.ZMQError as error:
            dealer.close()
            raise OSError(error.errno, error.strerror) from None
        except BaseException:
            dealer.close()
            raise
        self._asking[name.encode()] = address, admit
        return dealer, pipe, name.encode()

    def forget(self, connection: bytes) -> None:
        """Forget the connection with this id, which has ended."""
        self._asking.pop(connection, None)

    def close(self) -> None:
        """Close what is left. All connections must be closed already."""
        self._loop.remove_reader(int(self._zap.get(zmq.FD)))
        self._context.destroy(linger=0)

    def tick(self) -> None:
        """Note that a second has passed."""
        self.log.look_at_the_clock(time.monotonic())

    def _answer(self) -> None:
        """Tell libzmq which clients may connect."""
        while int(self._zap.get(zmq.EVENTS)) & zmq.POLLIN:
            request = self._zap.recv_multipart()
            client = self._name_of(request)
            answer = [_YES, b"OK", client.encode(), b""] if client else [_NO, b"unknown key", b"", b""]
            self._zap.send_multipart([_NAMES, request[1], *answer])

    def _name_of(self, request: list[bytes]) -> str:
        _, _, domain, _, _, mechanism, *credentials = request
        address, admit = self._asking.get(domain, ("", None))
        if admit is None or mechanism != b"CURVE":
            return ""
        key = z85.encode(credentials[0])
        found = self.admitted.get(key)
        admit(found)
        if found is None:
            self.log.warning(
                "refused a client at %s: its key %s is not in clients/ or hosts/ of %s",
                address,
                key.decode(),
                self._keys.folder,
                event="key_refused",
            )
            return ""
        return found.name


def _require_descriptors() -> None:
    """Raise OSError unless there are descriptors for another connection: libzmq would try again and again."""
    spare: list[int] = []
    try:
        while len(spare) < Curve.DESCRIPTORS:
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise OSError(errno.ENOMEM, "no file descriptors are left") from error
    finally:
        for fd in spare:
            os.close(fd)
