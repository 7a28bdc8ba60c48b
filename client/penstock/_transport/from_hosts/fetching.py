"""Fetches slabs from the hosts that made them, not through the daemon.

The daemon says which hosts keep slabs (HostAt). The client connects to each host on a thread, since that may take
seconds: over a unix socket if the host is on this machine (host_here.py), and otherwise over the network
(host_over_tcp.py). It tells the daemon when it has a connection, and only then do slabs refer to that host. If it
cannot fetch a slab after all, because the connection broke or nothing comes, it asks the daemon to send it (Resend).
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from penstock_proto import ConnectionLost, PenstockError, ProtocolError
from penstock_proto.messages import ClientMessage, HostAt, NotKept, Reaches, Resend
from penstock_proto.text import one_line

from ..arriving import Arriving
from .host_connection import HostConnection
from .host_here import HostHere
from .host_over_tcp import HostOverTcp

if TYPE_CHECKING:
    from penstock_proto.security.keys import ClientKeys

CONNECT = 5.0
"""Seconds in which a host must answer."""
STALLED = 5.0
"""After this many seconds without a byte from a host, the client asks the daemon for the slabs instead."""
AGAIN, _TIMES = 10.0, 6
"""Seconds before each attempt to reach a lost host, and how many attempts. (A host that rejoins has a new number.)"""
MAX_HOSTS = 256
"""Most hosts that are connected or being connected to. The slabs of further ones come from the daemon."""
_STRANGER = 4
"""Leave a host that has answered this often with NotKept and sent no slab: its address may be another machine's."""

logger = logging.getLogger("penstock")


class Fetches:
    """Fetches slabs from all hosts that keep them. One thread at a time may use it.

    Args:
        keys: the client's keys, or None.
        trusted: the users of this machine whose hosts may send slabs; None: any, as keys say who they are.
        say: sends the daemon a message, now or later.
        wake: wakes the thread that waits for the descriptors.
    """

    def __init__(
        self,
        keys: ClientKeys | None,
        trusted: frozenset[int] | None,
        say: Callable[[ClientMessage], None],
        wake: Callable[[], None],
    ) -> None:
        self._keys = keys
        self._trusted = trusted
        self._say = say
        self._wake = wake
        self._hosts: dict[int, HostConnection] = {}
        self._found: collections.deque[HostConnection] = collections.deque()
        self._closed = threading.Event()
        self._connecting = 0
        """Threads that connect. They share it under `_count`."""
        self._count = threading.Lock()

    def __bool__(self) -> bool:
        """Whether there is a connection, or a new one that `read` has not taken over yet."""
        return bool(self._hosts or self._found)

    def host_at(self, where: HostAt) -> None:
        """Connect to a host, on a thread."""
        self._begin(where, again=False)

    def fetch(self, arriving: Arriving) -> bool:
        """Ask the host that keeps a slab for it. If the connection to it is gone, ask the daemon and return False."""
        slab = arriving.received.slab
        assert slab.kept is not None
        host = self._hosts.get(slab.kept.host)
        if host is None:
            self._say(Resend(slab.seq))
            return False
        host.ask(arriving)
        return True

    def prepare(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [fd for host in self._hosts.values() for fd in host.prepare()]

    @property
    def pending(self) -> bool:
        """Whether something has come that no descriptor reports."""
        return any(host.pending for host in self._hosts.values())

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room to be sent."""
        return any(host.unsent for host in self._hosts.values())

    def read(self) -> list[Arriving]:
        """Receive from the hosts. Return the slabs that did not come, which the daemon has now been asked to send."""
        instead: list[Arriving] = []
        while self._found:
            host = self._found.popleft()
            instead += self._leave_old(host.where.endpoint)
            self._hosts[host.where.host] = host
            self._say(Reaches(host.where.host, True))
        now = time.monotonic()
        for host in list(self._hosts.values()):
            try:
                for came in host.read():
                    if isinstance(came, NotKept):
                        slab = host.asked.get(came.seq)
                        if slab is None or not slab.at_start:
                            raise ProtocolError(f"{came} came, but nobody asked for it")
                        instead.append(host.asked.pop(came.seq))
                        host.missed += 1
                        if host.missed == _STRANGER and not host.known and isinstance(host, HostOverTcp):
                            raise ConnectionLost("it keeps nothing, and may be another host")
                    else:
                        host.known = True
                if host.asked and now - host.heard > STALLED:
                    raise ConnectionLost(f"nothing came for {STALLED:g} s")
            except (OSError, ProtocolError, ConnectionLost) as error:
                instead.extend(host.asked.values())
                self._lose(host, error)
        for slab in instead:
            slab.restart()
            self._say(Resend(slab.received.slab.seq))
        return instead

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        while self._hosts:
            self._hosts.popitem()[1].close()
        self._close_found()

    def forget(self) -> None:
        """In a forked child: leave the connections to the parent."""
        for host in [*self._hosts.values(), *self._found]:
            host.forget()
        self._hosts.clear()
        self._found.clear()

    def _close_found(self) -> None:
        """Close the new connections that `read` has not taken over. (On any thread.)"""
        with contextlib.suppress(IndexError):
            while True:
                self._found.pop().close()

    def _lose(self, host: HostConnection, error: Exception) -> None:
        said = "the connection to the host at %s has ended (%s); its batches come from the daemon"
        logger.info(said, one_line(host.where.endpoint), error)
        host.close()
        del self._hosts[host.where.host]
        self._say(Reaches(host.where.host, False))
        if host.known:
            self._begin(host.where, again=True)
        elif isinstance(host, HostHere):
            self._begin(structs.replace(host.where, unix=""), again=False)

    def _leave_old(self, endpoint: str) -> list[Arriving]:
        """Close the old connection to a host that has joined again with a new number. Return the slabs it owed."""
        left: list[Arriving] = []
        for host in [host for host in self._hosts.values() if host.where.endpoint == endpoint]:
            left += host.asked.values()
            host.close()
            del self._hosts[host.where.host]
        return left

    def _begin(self, where: HostAt, *, again: bool) -> None:
        with self._count:
            if self._connecting + len(self._hosts) + len(self._found) >= MAX_HOSTS:
                return
            self._connecting += 1
        thread = threading.Thread(target=self._run, args=(where, again), name="penstock-connector", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # this process cannot have another thread
            self._on_thread_ended()

    def _run(self, where: HostAt, again: bool) -> None:
        """Connect, on a thread of its own."""
        try:
            self._connect(where, again)
        finally:
            self._on_thread_ended()

    def _on_thread_ended(self) -> None:
        with self._count:
            self._connecting -= 1

    def _connect(self, where: HostAt, again: bool) -> None:
        """Connect to a host, or, after a pause, again to a lost one."""
        for attempt in range(_TIMES if again else 1):
            if again and self._closed.wait(AGAIN):
                return
            try:
                host = self._connection(where)
            except (OSError, PenstockError, ValueError) as error:
                said = "the host at %s cannot be reached from here (%s); its batches come from the daemon"
                if not (attempt or self._closed.is_set()):
                    logger.info(said, one_line(where.endpoint), error)
                continue
            self._found.append(host)
            if self._closed.is_set():
                self._close_found()
            else:
                self._wake()
            return

    def _connection(self, where: HostAt) -> HostConnection:
        """Connect to a host. Raises as HostOverTcp."""
        if where.unix:
            with contextlib.suppress(OSError, ProtocolError):  # it is on another machine, or does not admit this user
                return HostHere(where, self._trusted, CONNECT)
        return HostOverTcp(where, self._keys, self._trusted, CONNECT, self._give_up_if_closed)

    def _give_up_if_closed(self) -> None:
        if self._closed.is_set():
            raise ConnectionLost("the stream was closed")
