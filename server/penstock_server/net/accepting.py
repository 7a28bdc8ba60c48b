"""The TCP listener: accepts connections while it has room, descriptors and memory for them.

If one of these is lacking, it stops listening for a while. Otherwise the event loop would wake it again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

from penstock_proto import StartError
from penstock_proto.transport import urls

from .addresses import is_loopback

log = logging.getLogger(__name__)

_AT_ONCE = 16
"""Connections that it accepts in one step of the loop."""
_FULL, _EXHAUSTED = 0.1, 1.0
"""Seconds for which it stops listening: if there are too many connections; if no descriptors or memory are left."""
_SILENT = 10.0
"""Seconds between two warnings in the log."""
_BACKLOG = 1024
_RECEIVED = 256 * 1024
"""Bytes that the kernel holds for a connection while the daemon does not read it. Clients' messages are small."""


class Acceptor:
    """A bound and listening socket.

    Args:
        bind: a `tcp://address:port` to listen on; port 0 takes a free one.
        full: returns True if there are as many connections as allowed.
        make_room: closes the least useful connection. Returns False if all are in use.
        on_connection: called with each new connection: a non-blocking socket, which the callee owns. May raise OSError.

    Attributes:
        endpoint: the address that the socket listens on, with its real port, also after it is closed.

    Raises:
        StartError: the address cannot be bound.
    """

    def __init__(
        self,
        bind: str,
        full: Callable[[], bool],
        make_room: Callable[[], bool],
        on_connection: Callable[[socket.socket], None],
    ) -> None:
        self._full = full
        self._make_room = make_room
        self._on_connection = on_connection
        self._loop = asyncio.get_running_loop()
        self._socket = _bound(bind)
        host, port = self._socket.getsockname()[:2]
        self.endpoint = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._spare = -1  # a descriptor to close when no other is left
        self._keep_spare()
        self._again: asyncio.TimerHandle | None = None
        self._silent_until = 0.0
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _accept(self) -> None:
        refused = False
        for _ in range(_AT_ONCE):
            try:
                connection, why = self._next()
                if why and not self._make_room():
                    refused = True
                    connection.close()
                    self._complain(why)
                else:
                    self._take(connection)
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                self._complain(error.strerror or str(error))
                self._look_away(_EXHAUSTED)
                return
            finally:
                self._keep_spare()
        if refused:
            self._look_away(_FULL)

    def _next(self) -> tuple[socket.socket, str]:
        """Return the next waiting connection, and why there is no room for it ("" if there is room)."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self._spare < 0:
                raise
            os.close(self._spare)  # without a free one, accept cannot even tell whether a connection waits
            self._spare = -1
            return self._socket.accept()[0], error.strerror or str(error)
        return connection, "there are too many" if self._full() else ""

    def _take(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._on_connection(connection)
        except OSError as error:
            connection.close()
            if error.errno in (errno.ENOMEM, errno.ENOSPC):  # the loop cannot watch it
                raise

    def _keep_spare(self) -> None:
        if self._spare < 0:
            with contextlib.suppress(OSError):
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _complain(self, why: str) -> None:
        if self._loop.time() >= self._silent_until:
            self._silent_until = self._loop.time() + _SILENT
            text = "cannot take a connection over TCP (%s): raise the limit (ulimit -n) or close others"
            log.error(text, why, extra={"event": "connection_refused"})

    def _look_away(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket.fileno())
        self._again = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self._keep_spare()
        self._loop.add_reader(self._socket.fileno(), self._accept)


def only_this_host(bind: str) -> bool:
    """Return whether only programs on this host can reach the address `bind`.

    Raises:
        StartError: `bind` is not an address to listen on.
    """
    try:
        *_, address = _resolved(bind)
    except OSError as error:
        raise _cannot(bind, error) from None
    return is_loopback(address[0])


def _resolved(bind: str) -> tuple[socket.AddressFamily, socket.SocketKind, int, tuple[Any, ...]]:
    """Return the family, kind, protocol and address of a socket that listens at `bind`."""
    scheme, _, place = bind.partition("://")
    host, _, port = place.rpartition(":")
    if scheme != "tcp" or not host or not port.isdecimal():
        raise OSError("Invalid argument")
    if int(port) > 65535:
        raise StartError(f"cannot listen on {urls.shown(bind)}: a port is a number from 0 (any) to 65535")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return family, kind, protocol, address


def _cannot(bind: str, error: OSError) -> StartError:
    if error.errno == errno.EADDRINUSE:
        why = "the port is in use, perhaps by another daemon: choose another one, or port 0 for a free one"
    else:
        why = f"{error.strerror or error}; an address looks like tcp://127.0.0.1:5555"
    return StartError(f"cannot listen on {urls.shown(bind)}: {why}")


def _bound(bind: str) -> socket.socket:
    """Return a socket that listens at `bind`."""
    try:
        family, kind, protocol, address = _resolved(bind)
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.bind(address)
            made.listen(_BACKLOG)
        except BaseException:
            made.close()
            raise
    except OSError as error:
        raise _cannot(bind, error) from None
    return made
